"""Matches ranks in pairs, and exchanges snapshots within them, also with ranks that have ended.

Each rank goes through the same rounds in the same order, at its own pace. One that has ended says
so to all others, and then only answers: it sends its snapshot when that of its partner has come,
and leaves out rounds whose partner has ended, too.
"""

from collections.abc import Callable, Sequence

import numpy as np

from ..memory.arrays import Array
from ..transport.base import Channel, Request, Schedule

_SNAPSHOT, _END = range(2)


def partner(seed: int, number: int, rank: int, size: int) -> int | None:
    """Return a rank's partner in a round: a random perfect matching; one rests if `size` is odd."""
    order = np.random.default_rng([seed, number]).permutation(size).tolist()
    other: int = order.index(rank) ^ 1
    return order[other] if other < size else None


class Exchanges:
    """A rank's exchanges of snapshots.

    Attributes:
        training: The other ranks that have not said that they have ended.
        bytes_sent: To other ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._others = [other for other in range(size) if other != rank]
        self.training = set(self._others)
        self.bytes_sent = 0

    def exchange(self, net: Channel, other: int, mine: Sequence[Array],
                 theirs: Sequence[Array]) -> Schedule[None]:
        """Send a snapshot to a partner, and receive its own.

        Args:
            mine: Not to be changed until complete.
            theirs: Overwritten.
        """
        leaving = self._send(net, other, mine)
        while (yield from _hear(net, other)) == _END:
            self.training.discard(other)
        yield [*leaving, *(net.irecv(x, other) for x in theirs)]

    def answer(self, net: Channel, number: int, partner_of: Callable[[int], int | None],
               snapshot: Callable[[], Sequence[Array]], theirs: Sequence[Array],
               take: Callable[[], None]) -> Schedule[int]:
        """Say that this rank has ended; answer the others until all have.

        Args:
            number: The first round that this rank has not begun.
            partner_of: Returns this rank's partner in a round.
            snapshot: Returns this rank's weights; left alone until the next call.
            theirs: Overwritten by a partner's.
            take: Called when these are there.

        Returns:
            The first round that nobody among these ranks' partners has begun.
        """
        end = np.array([_END])
        leaving = [net.isend(end, other) for other in self._others]
        while self.training:
            other = partner_of(number)
            if other in self.training:
                if (yield from _hear(net, other)) == _END:
                    self.training.discard(other)
                else:
                    sent = self._send(net, other, snapshot())
                    yield [*sent, *(net.irecv(x, other) for x in theirs)]
                    take()
            number += 1
        yield leaving
        self.training.update(self._others)
        return number

    def _send(self, net: Channel, other: int, snapshot: Sequence[Array]) -> list[Request]:
        self.bytes_sent += sum(x.nbytes for x in snapshot)
        return [net.isend(x, other) for x in (np.array([_SNAPSHOT]), *snapshot)]


def _hear(net: Channel, other: int) -> Schedule[int]:
    """Return what a rank says next."""
    note = np.empty(1, np.int64)
    yield (net.irecv(note, other),)
    return int(note[0])
