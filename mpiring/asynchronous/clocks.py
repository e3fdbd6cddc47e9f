"""The two sides of a parameter server: a slice's owner, and the workers whose clocks it keeps."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from ..memory.arrays import Array
from ..transport.base import Channel, Request, Schedule, together

# What a worker's note announces, beside its clock; a void push brings no gradient.
PUSH, VOID, PULL, FINISH = range(4)
# Lanes of the channel: notes and gradients to owners, weights from them.
NOTES, GRADIENTS, WEIGHTS = range(3)
# The vectors of a model, by owner.
SlicesByOwner = Sequence[Sequence[Array]]


class Store(Protocol):
    """The weights of a slice, and what updates them."""

    @property
    def weights(self) -> Sequence[Array]:
        """Vectors; updated in place."""

    def update(self, gradients: Sequence[Sequence[Array]], rate: float) -> None:
        """Update the weights once, with the mean of some gradients.

        Args:
            gradients: Of several workers, in the order of ranks; vectors as the weights are.
            rate: Factor of the learning rate.
        """


class Condition:
    """A request that is complete when something has happened on this rank.

    Args:
        happened: Once it returns True, it always does.
        text: What is awaited, for messages.
    """

    def __init__(self, happened: Callable[[], bool], text: str) -> None:
        self.test, self._text = happened, text

    def __repr__(self) -> str:
        return self._text


class SliceOwner:
    """The owner of a slice, whose clocks keep workers within a bound of each other.

    A worker's clock is the number of its pushes. Its pull at clock c is answered once every worker
    that has not finished has pushed c - `staleness` times: nobody reads anything older, and nobody
    runs further ahead. With a staleness of 0 the pushes of a clock are applied together, as their
    mean, and weights have the same bits in every run; else each push is an update, when it arrives.

    Source: Ho et al., More effective distributed ML via a stale synchronous parallel parameter
    server, NIPS 2013. Rates: Zhang et al., Staleness-aware async-SGD for distributed deep
    learning, IJCAI 2016.

    Args:
        size: Number of workers.
        staleness: As above; None for no bound.
        store: The slice.
        damped: Divide a push's learning rate by 1 + τ, its staleness: the updates since its worker
            last pulled.

    Attributes:
        store: As above.
        clocks: The pushes of each worker that were applied.
        finished: Whether each worker will push no more.
        updates: Of the slice.
        bytes_sent: To other ranks.
    """

    def __init__(self, size: int, staleness: int | None, store: Store, *, damped: bool) -> None:
        self.store = store
        self.clocks, self.finished = [0] * size, [False] * size
        self.updates = self.bytes_sent = 0
        self._staleness, self._damped = staleness, damped
        # Updates when each worker last pulled; gradients that wait for others of their clock.
        self._pulled = [0] * size
        self._waiting: dict[int, Sequence[Array]] = {}

    def serve(self, net: Channel) -> Schedule[None]:
        """Serve all workers until they finish.

        Collective: no. Blocking: no (a schedule).
        """
        yield from together([self._serve(net, worker) for worker in range(net.size)], net.size)

    def behind(self, clock: int) -> list[int]:
        """Return the workers for which a pull at a clock has to wait."""
        if self._staleness is None:
            return []
        return [worker for worker, its in enumerate(self.clocks)
                if its < clock - self._staleness and not self.finished[worker]
                and worker not in self._waiting]

    def restart(self) -> None:
        """Begin anew at clock 0, with other weights; while nobody pushes or pulls."""
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
                # Its gradient stays in the inbox until then.
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
        """Apply the pushes of a clock once all are there."""
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
    """The side of a worker in what SliceOwner describes.

    Its schedules must be begun in the order of its calls.

    Attributes:
        unanswered: The owners that have not answered the last pull.
        bytes_sent: To other ranks.
    """

    def __init__(self) -> None:
        self.unanswered: set[int] = set()
        self.bytes_sent = 0

    def push(self, net: Channel, clock: int, gradients: SlicesByOwner | None) -> Schedule[None]:
        """Send a gradient.

        Args:
            clock: The number of this push, from 1.
            gradients: Not to be changed until complete; None for a push that is void.
        """
        note = np.array([VOID if gradients is None else PUSH, clock])
        requests: list[Request] = []
        for owner in _in_turn(net):
            requests.append(self._send(net, NOTES, note, owner))
            requests += [self._send(net, GRADIENTS, x, owner)
                         for x in (gradients[owner] if gradients is not None else ())]
        yield requests

    def pull(self, net: Channel, clock: int, weights: SlicesByOwner) -> Schedule[None]:
        """Fetch weights, once they contain what a worker at this clock has to see.

        Args:
            clock: The number of pushes so far.
            weights: Overwritten.
        """
        self.unanswered = set(range(net.size))
        yield from together([self._ask(net, clock, weights[owner], owner)
                             for owner in _in_turn(net)], net.size)

    def _ask(self, net: Channel, clock: int, weights: Sequence[Array],
             owner: int) -> Schedule[None]:
        note = np.array([PULL, clock])
        yield [self._send(net, NOTES, note, owner),
               *(net.lane(WEIGHTS).irecv(x, owner) for x in weights)]
        self.unanswered.discard(owner)

    def finish(self, net: Channel, clock: int) -> Schedule[None]:
        """Tell all owners that no push or pull will follow."""
        note = np.array([FINISH, clock])
        yield [self._send(net, NOTES, note, owner) for owner in _in_turn(net)]

    def _send(self, net: Channel, lane: int, x: Array, owner: int) -> Request:
        self.bytes_sent += x.nbytes * (owner != net.rank)
        return net.lane(lane).isend(x, owner)


def _in_turn(net: Channel) -> list[int]:
    """Return all ranks, this one first: not all begin with the same owner."""
    return [(net.rank + i) % net.size for i in range(net.size)]
