"""Averages the weights of ranks in random pairs while all of them compute."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import ClosedError, Communicator, ConfigError, Handle, Statistics
from ..provisional import (
    Array, Call, Channel, Schedule, arguments, memory, same_on_all, transport, world,
)
from .base import AsynchronousTraining
from .layout import FlatModel, ModelArrays

_SNAPSHOT, _END = range(2)


def partner(seed: int, number: int, rank: int, size: int) -> int | None:
    """Return a rank's partner in a random perfect matching; None for one rank if `size` is odd."""
    order = np.random.default_rng([seed, number]).permutation(size).tolist()
    other: int = order.index(rank) ^ 1
    return order[other] if other < size else None


class Exchanges:
    """A rank's exchanges of snapshots.

    `training` has the other ranks that have not announced their end.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._others = [other for other in range(size) if other != rank]
        self.training = set(self._others)
        self.bytes_sent = 0

    def exchange(self, net: Channel, other: int, snapshot: Sequence[Array],
                 received: Sequence[Array]) -> Schedule[None]:
        """Send a snapshot to a partner, and receive the partner's snapshot.

        The snapshot must not change until the schedule ends.
        """
        sends = self._send(net, other, snapshot)
        while (yield from _receive_note(net, other)) == _END:
            self.training.discard(other)
        yield [*sends, *(net.irecv(x, other) for x in received)]

    def answer(self, net: Channel, number: int, partner_of: Callable[[int], int | None],
               snapshot: Callable[[], Sequence[Array]], received: Sequence[Array],
               apply: Callable[[], None]) -> Schedule[int]:
        """Announce that this rank has ended, and answer other ranks until all have ended.

        `number` is the first round that this rank has not begun. `snapshot` returns this rank's
        weights, unchanged until its next call. `apply` is called when a partner's weights have
        arrived in `received`.

        Returns:
            The first round that neither this rank nor any of its partners has begun.
        """
        end = np.array([_END])
        announcements = [net.isend(end, other) for other in self._others]
        while self.training:
            other = partner_of(number)
            if other in self.training:
                if (yield from _receive_note(net, other)) == _END:
                    self.training.discard(other)
                else:
                    sends = self._send(net, other, snapshot())
                    yield [*sends, *(net.irecv(x, other) for x in received)]
                    apply()
            number += 1
        yield announcements
        self.training.update(self._others)
        return number

    def _send(self, net: Channel, other: int, snapshot: Sequence[Array]) -> list[transport.Request]:
        self.bytes_sent += sum(x.nbytes for x in snapshot)
        return [net.isend(x, other) for x in (np.array([_SNAPSHOT]), *snapshot)]


def _receive_note(net: Channel, other: int) -> Schedule[int]:
    note = np.empty(1, np.int64)
    yield (net.irecv(note, other),)
    return int(note[0])


_log = logging.getLogger("mpiring")


class PairAveraging(AsynchronousTraining):
    """Weights that random pairs of ranks average in the background.

        with PairAveraging(model, comm, seed=1) as pairs:
            for batch in batches:
                ...
                optimizer.step()                # any local optimizer
                pairs.step()

    In each round, all ranks draw the same perfect matching from the seed. A rank and its partner
    exchange snapshots of their weights while they compute. When the partner's snapshot has arrived,
    each of them adds half of the difference between the snapshots to its weights. The exchange
    therefore does not change the mean over all ranks, up to rounding. Then the next round begins,
    so ranks may be in different rounds and may take several steps in one round. Each rank keeps its
    own optimizer state.

    Sources: Lian et al., Can decentralized algorithms outperform centralized algorithms?, NIPS
    2017 (D-PSGD). Lian et al., Asynchronous decentralized parallel SGD, ICML 2018 (AD-PSGD).

    Args:
        model: PyTorch module, for its parameters and its saved floating-point buffers, or dict of
            NumPy arrays, in host memory. The user may replace arrays in the dict with arrays of the
            same shape and dtype. All ranks start with the weights of rank 0.
        comm: Communicator whose ranks train together; by default, all ranks.
        seed: Seed of the matchings.
        delay: Number of steps after which a rank waits for its partner; with 0, it waits in the
            same step. With 0 or 1, results do not depend on the speeds of ranks.

    Attributes:
        rounds: Number of rounds that this rank has begun.
        delay: The argument of the same name.
        closed: True after `close`.

    Raises:
        ConfigError: An argument is wrong, or differs between ranks.
        BufferMismatchError: The models differ between ranks; the message has the first difference.

    Collective: yes. Blocking: yes.
    """

    def __init__(self, model: Any, comm: Communicator | None = None, *, seed: int = 0,
                 delay: int = 4) -> None:
        comm = world.or_world(comm)
        with same_on_all(comm, "PairAveraging") as same:
            same["seed"] = self._seed = arguments.whole_number("seed", seed, 0)
            same["delay"] = self.delay = arguments.whole_number("delay", delay, 0)
        self._model = ModelArrays(model, comm, "PairAveraging")
        # The model's arrays at the last call.
        self._params, self.rounds = self._model.arrays(), 0
        self._snapshot, self._partners = (FlatModel(self._model.tensors, 1, name)
                                          for name in ("snapshot", "partner's snapshot"))
        self._exchanges = Exchanges(comm.rank, comm.size)
        self._exchange: tuple[Handle[None], int] | None = None
        self._age = 0
        for flat in self._update_snapshot():
            comm.broadcast(flat, root=0)
        self._write_back()
        super().__init__(comm)

    def step(self) -> None:
        """Apply the partner's weights, and begin the next round; call after each optimizer.step().

        Raises:
            StallError: The partner, which the message names, has not answered within
                `stall_timeout_s`.
            ConfigError: A shape or dtype of the model has changed.
            ClosedError: After `close`.

        Collective: no. Blocking: until a partner that is late by `delay` steps has answered.
        """
        self._refuse_closed("step()")
        if self._exchange is not None:
            self._age += 1
            if self._age < self.delay and not self._exchange[0].test():
                return
        self._params = self._model.arrays()
        self._complete()
        self._begin()
        if self.delay == 0:
            self._complete()

    def agree(self) -> None:
        """Complete all rounds, and set the weights of all ranks to their mean.

        Call it before the weights are evaluated or saved; training may continue afterwards.

        Raises:
            BufferMismatchError: A rank has left without `agree` or `close`.
            ConfigError, ClosedError: As for `step`.

        Collective: yes. Blocking: yes, as long as other ranks train.
        """
        self._refuse_closed("agree()")
        self._params = self._model.arrays()
        self._complete()
        handle = self._messages.submit(
            Call("answer", "partners in pair averaging"), lambda net: self._exchanges.answer(
                net, self.rounds, self._partner, self._update_snapshot, self._partners.flats,
                lambda: self._add_difference(None)))
        with self._waiting():
            self._wait_for_all(Call("agree", "in pair averaging"))
            last = np.array([handle.wait()])
        self._comm.allreduce(last, op="max")
        self.rounds = int(last[0])
        for flat in self._update_snapshot():
            self._comm.allreduce(flat, op="mean")
        self._write_back()

    def close(self) -> None:
        """Call `agree`, and end training.

        Collective: yes. Blocking: yes, as long as other ranks train.
        """
        if not self.closed:
            self.agree()
            self.closed = True
            self._comm.close()

    @property
    def statistics(self) -> Statistics:
        """Costs of this rank's exchanges so far."""
        return self._costs(self._exchanges.bytes_sent)

    def state_dict(self) -> dict[str, Any]:
        """Return the seed and the round; save them with the weights after `agree()`.

        Raises:
            ConfigError: An exchange is in flight.

        Collective: no.
        """
        if self._exchange is not None:
            raise ConfigError(f"rank {self._comm.rank}: an exchange with rank {self._exchange[1]} "
                              f"is in progress; call agree() on all ranks before state_dict()")
        return {"seed": self._seed, "rounds": self.rounds}

    def load_state_dict(self, state_dict: Any) -> None:
        """Continue from a state, before the first step; the state does not contain the weights.

        Args:
            state_dict: Result of `state_dict`; the same on all ranks.

        Raises:
            ConfigError: It is not such a state, or it differs between ranks.

        Collective: yes. Blocking: yes.
        """
        self._refuse_closed("load_state_dict()")
        with same_on_all(self._comm, "the state of PairAveraging",
                         remedy="load the same state on every rank") as same:
            arguments.refuse_other_state(state_dict, ("seed", "rounds"), "of a PairAveraging")
            self.state_dict()
            same["seed"] = seed = arguments.whole_number("seed", state_dict["seed"], 0)
            same["rounds"] = rounds = arguments.whole_number("rounds", state_dict["rounds"], 0)
        self._seed, self.rounds = seed, rounds

    # Details

    def _refuse_closed(self, method: str) -> None:
        if self.closed:
            raise ClosedError(f"rank {self._comm.rank}: {method} after close() of this "
                              f"PairAveraging; make another one")

    def _partner(self, number: int) -> int | None:
        return partner(self._seed, number, self._comm.rank, self._comm.size)

    def _begin(self) -> None:
        other = self._partner(self.rounds)
        self.rounds += 1
        if other is not None:
            snapshot = self._update_snapshot()
            self._exchange = self._messages.submit(
                Call("exchange", f"with rank {other} in round {self.rounds - 1}",
                     nbytes=self._snapshot.nbytes),
                lambda net: self._exchanges.exchange(net, other, snapshot, self._partners.flats),
                other), other
            self._age = 0
            self._calls += 1

    def _complete(self) -> None:
        """Wait for the exchange in flight, if any, and apply the partner's weights."""
        if self._exchange is not None:
            handle, other = self._exchange
            with self._waiting():
                handle.wait()
            self._in_flight_s += handle.flight.ended_s - handle.flight.called_s
            self._exchange = None
            self._add_difference(other)

    def _update_snapshot(self) -> list[Array]:
        for name, x in self._params.items():
            self._snapshot.views[name][...] = x
        return self._snapshot.flats

    def _write_back(self) -> None:
        for name, x in self._params.items():
            x[...] = self._snapshot.views[name]

    def _add_difference(self, other: int | None) -> None:
        """Add half of the difference between the two snapshots to the weights."""
        for snapshot, received in zip(self._snapshot.flats, self._partners.flats):
            np.subtract(received, snapshot, out=received)
            np.multiply(received, received.dtype.type(0.5), out=received)
        if not all(memory.is_finite(x) for x in self._partners.flats):
            # The partner also leaves out this round.
            _log.warning("rank %d: round %d with rank %s is left out: a snapshot of theirs holds "
                         "NaN or Inf", self._comm.rank, self.rounds - 1, other)
            return
        for name, x in self._params.items():
            x += self._partners.views[name]
