"""Sends one rank's gradients to the owners of slices, and fetches weights from them."""

from collections.abc import Sequence

import numpy as np

from ..memory.arrays import Array
from ..transport.base import Channel, Request, Schedule, together
from .owner import FINISH, GRADIENTS, NOTES, PULL, PUSH, VOID, WEIGHTS

# A model's vectors, by owner.
Slices = Sequence[Sequence[Array]]


class Worker:
    """The side of a worker in what Owner describes.

    Its schedules must be begun in the order of its calls.

    Attributes:
        unanswered: The owners that have not answered the last pull.
        bytes_sent: To other ranks.
    """

    def __init__(self) -> None:
        self.unanswered: set[int] = set()
        self.bytes_sent = 0

    def push(self, net: Channel, clock: int, gradients: Slices | None) -> Schedule[None]:
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

    def pull(self, net: Channel, clock: int, weights: Slices) -> Schedule[None]:
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
