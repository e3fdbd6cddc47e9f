"""The two sides of a parameter server: the owner of a slice, and the workers that use the slice."""

from collections.abc import Callable, Sequence

import numpy as np

from ..provisional import Array, Channel, Schedule, transport
from .store import SliceStore

# Kinds of notes, which workers send together with their clocks. The second is a push without a
# gradient.
PUSH, VOID, PULL, FINISH = range(4)
# Lanes of the channel: workers send notes and gradients, owners send weights.
NOTES, GRADIENTS, WEIGHTS = range(3)
# The vectors of a model, by owner.
SlicesByOwner = Sequence[Sequence[Array]]


class Condition:
    """A request that is complete once a condition on this rank holds.

    After `happened` has returned True, it must always return True. `text` describes the condition.
    """

    def __init__(self, happened: Callable[[], bool], text: str) -> None:
        self.test, self._text = happened, text

    def __repr__(self) -> str:
        return self._text


class SliceOwner:
    """The owner of a slice, which keeps the clocks of all workers within a bound.

    A worker's clock is the number of its pushes; for the bounds on clocks and for the updates, see
    ParameterServer. If `damped`, a push's learning rate is divided by 1 + τ.

    Source: Ho et al., More effective distributed ML via a stale synchronous parallel parameter
    server, NIPS 2013. Rates: Zhang et al., Staleness-aware async-SGD for distributed deep
    learning, IJCAI 2016.

    `clocks` counts the applied pushes of each worker. `updates` counts the updates of the slice.
    """

    def __init__(self, size: int, staleness: int | None, store: SliceStore, *,
                 damped: bool) -> None:
        self.store = store
        self.clocks, self.finished = [0] * size, [False] * size
        self.updates = self.bytes_sent = 0
        self._staleness, self._damped = staleness, damped
        # Update counts at each worker's last pull, and gradients that wait for the other gradients
        # of their clock.
        self._pulled = [0] * size
        self._waiting: dict[int, Sequence[Array]] = {}

    def serve(self, net: Channel) -> Schedule[None]:
        """Serve all workers until they finish, as a schedule."""
        yield from transport.run_together(
            [self._serve(net, worker) for worker in range(net.size)], net.size)

    def behind(self, clock: int) -> list[int]:
        """Return the workers that delay a pull at this clock."""
        if self._staleness is None:
            return []
        return [worker for worker, worker_clock in enumerate(self.clocks)
                if worker_clock < clock - self._staleness and not self.finished[worker]
                and worker not in self._waiting]

    def restart(self) -> None:
        """Restart at clock 0, with other weights; no worker may push or pull meanwhile."""
        self.clocks[:] = self._pulled[:] = [0] * len(self.clocks)
        self.updates = 0

    def _serve(self, net: Channel, worker: int) -> Schedule[None]:
        inbox, outbox = ([np.empty_like(x) for x in self.store.weights] for _ in range(2))
        note = np.empty(2, np.int64)
        while True:
            yield (net.lane(NOTES).irecv(note, worker),)
            kind, clock = map(int, note)
            if kind == PULL:
                yield [Condition(lambda: not self.behind(clock), f"clock {clock} of rank {worker}")]
                for x, weights in zip(outbox, self.store.weights):
                    x[...] = weights
                self._pulled[worker] = self.updates
                self.bytes_sent += sum(x.nbytes for x in outbox) * (worker != net.rank)
                yield [net.lane(WEIGHTS).isend(x, worker) for x in outbox]
            elif kind == FINISH:
                self.finished[worker] = True
                self._apply_together()
                return
            else:
                if kind == PUSH:
                    yield [net.lane(GRADIENTS).irecv(x, worker) for x in inbox]
                self._push(worker, inbox if kind == PUSH else ())
                # The gradient must stay in the inbox until it is applied.
                yield [Condition(lambda: self.clocks[worker] == clock,
                                 f"push {clock} of {worker}")]

    def _push(self, worker: int, gradient: Sequence[Array]) -> None:
        if self._staleness == 0:
            self._waiting[worker] = gradient
            self._apply_together()
            return
        if gradient:
            tau = self.updates - self._pulled[worker]
            self._update([gradient], 1 / (1 + tau) if self._damped else 1.0)
        self.clocks[worker] += 1

    def _apply_together(self) -> None:
        """Apply the pushes of a clock once all of them have arrived."""
        workers = [worker for worker, finished in enumerate(self.finished) if not finished]
        if not workers or any(worker not in self._waiting for worker in workers):
            return
        self._update([self._waiting[worker] for worker in workers if self._waiting[worker]], 1.0)
        for worker in workers:
            del self._waiting[worker]
            self.clocks[worker] += 1

    def _update(self, gradients: Sequence[Sequence[Array]], rate: float) -> None:
        if gradients:
            self.store.update(gradients, rate)
            self.updates += 1


class SliceWorker:
    """The worker's side of SliceOwner.

    Start the schedules in the order in which the methods were called. `unanswered` has the ranks of
    owners that have not answered the last pull.
    """

    def __init__(self) -> None:
        self.unanswered: set[int] = set()
        self.bytes_sent = 0

    def push(self, net: Channel, clock: int, gradients: SlicesByOwner | None) -> Schedule[None]:
        """Send a gradient, or a push without a gradient, to all owners.

        `clock` is the number of this push, from 1. Vectors must not change until the schedule ends.
        """
        note = np.array([VOID if gradients is None else PUSH, clock])
        requests: list[transport.Request] = []
        for owner in _owners_from(net):
            requests.append(self._send(net, NOTES, note, owner))
            requests += [self._send(net, GRADIENTS, x, owner)
                         for x in (gradients[owner] if gradients is not None else ())]
        yield requests

    def pull(self, net: Channel, clock: int, weights: SlicesByOwner) -> Schedule[None]:
        """Fetch weights once they contain all pushes that a worker at this clock must see."""
        self.unanswered = set(range(net.size))
        yield from transport.run_together(
            [self._ask(net, clock, weights[owner], owner) for owner in _owners_from(net)],
            net.size)

    def _ask(self, net: Channel, clock: int, weights: Sequence[Array],
             owner: int) -> Schedule[None]:
        note = np.array([PULL, clock])
        yield [self._send(net, NOTES, note, owner),
               *(net.lane(WEIGHTS).irecv(x, owner) for x in weights)]
        self.unanswered.discard(owner)

    def finish(self, net: Channel, clock: int) -> Schedule[None]:
        """Announce to all owners that no push or pull will follow."""
        note = np.array([FINISH, clock])
        yield [self._send(net, NOTES, note, owner) for owner in _owners_from(net)]

    def _send(self, net: Channel, lane: int, x: Array, owner: int) -> transport.Request:
        self.bytes_sent += x.nbytes * (owner != net.rank)
        return net.lane(lane).isend(x, owner)


def _owners_from(net: Channel) -> list[int]:
    """Return all ranks, starting with this one, so that workers start with different owners."""
    return [(net.rank + i) % net.size for i in range(net.size)]
