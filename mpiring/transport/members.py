"""A channel among a few of the ranks, in an order of their own."""

from collections.abc import Sequence

from .base import Array, Channel, Request


class Members:
    """A channel that joins a few ranks of another; see base.Channel.

    It has no messages of its own: they travel, and keep their order, as those of `net`.

    Args:
        net: The channel of all.
        members: Ranks of `net`, this rank among them, in their new order.
    """

    def __init__(self, net: Channel, members: Sequence[int]) -> None:
        self.rank = members.index(net.rank)
        self.size = len(members)
        self._net = net
        self._members = members

    @property
    def ranks(self) -> Sequence[int]:
        """The communicator's number of each member."""
        return tuple(self._net.ranks[member] for member in self._members)

    def lane(self, index: int) -> Channel:
        """Return lane `index` of the same operation, among the same ranks."""
        return Members(self._net.lane(index), self._members)

    def isend(self, array: Array, dest: int) -> Request:
        """Start sending the bytes of a contiguous array to member `dest`."""
        return self._net.isend(array, self._members[dest])

    def irecv(self, array: Array, source: int) -> Request:
        """Start receiving exactly `array.nbytes` bytes from member `source`."""
        return self._net.irecv(array, self._members[source])
