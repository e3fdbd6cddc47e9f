"""Builds the schedules of one operation that only copy: broadcast, allgather, gather, barrier."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import DTypeLike

from ..collectives import chain, exchange, node_copies, ring
from ..memory.arrays import Array, chunks_of
from ..transport.base import Channel, Node, Schedule
from ..transport.members import Members
from .resources import OperationChannel, Resources


class Copies:
    """The schedules of one operation that copy vectors between ranks, bound to its channel.

    Attributes:
        rank, size: This rank, and how many there are.
        node: The operation's meeting place on this node; None for a rank that is alone there.
        sequence: The operation's number.
        algorithm: Of its last allreduce, if any.
    """

    __slots__ = ("rank", "size", "node", "sequence", "algorithm", "_own", "_net", "_windows",
                 "_native_bytes")

    def __init__(self, own: Resources, node: Node | None, sequence: int) -> None:
        self.rank, self.size = own.transport.rank, own.transport.size
        self.node = node
        self.sequence, self.algorithm = sequence, ""
        self._own = own
        self._net: OperationChannel | None = None
        self._windows = self._native_bytes = 0

    @property
    def net(self) -> Channel:
        """The operation's channel."""
        if self._net is None:
            self._net = self._own.transport.channel(self.sequence)
        return self._net

    @property
    def bytes_sent(self) -> int:
        """How many this rank has sent in this operation so far; see Statistics."""
        return self._native_bytes + (0 if self._net is None else self._net.sent[0])

    @property
    def ring(self) -> Channel:
        """The channel in node order."""
        return self.net if self._own.in_order else Members(self.net, self._own.order)

    @property
    def _whole(self) -> Node | None:
        """The meeting place of all ranks, if one node has them all."""
        return self.node if len(self._own.nodes) == 1 else None

    def borrow(self, n: int, dtype: DTypeLike) -> AbstractContextManager[Array]:
        """Lend scratch memory for n elements, as long as the operation needs it."""
        return self._own.scratch.borrow(n, dtype)

    def allgather(self, x: Array) -> Schedule[None]:
        """Return the schedule that copies every rank's chunk of the vector `x` to all."""
        return self.allgather_chunks(chunks_of(x, self.size))

    def allgather_chunks(self, chunks: Sequence[Array]) -> Schedule[None]:
        """Return the schedule that copies vector r of `chunks` of rank r to all ranks.

        Args:
            chunks: Per rank a vector, of lengths that all ranks agree on, in any memory;
                all but this rank's own are overwritten.
        """
        if self._whole is not None:
            return node_copies.allgather(self._whole, chunks)
        return ring.allgather(self.ring, [chunks[rank] for rank in self._own.order])

    def all_to_all(self, sends: Sequence[Array], receives: Sequence[Array]) -> Schedule[None]:
        """Return the schedule that sends `sends[r]` to rank r; see exchange.all_to_all."""
        if self._whole is not None:
            return node_copies.all_to_all(self._whole, sends, receives)
        return self._confirmed(exchange.all_to_all(self.net, sends, receives))

    def gather(self, mine: Array, parts: Sequence[Array], root: int) -> Schedule[None]:
        """Return the schedule that copies `mine` of all ranks to `root`; see exchange.gather."""
        return self._confirmed(self._gather(mine, parts, root))

    def _gather(self, mine: Array, parts: Sequence[Array], root: int) -> Schedule[None]:
        if self._whole is not None:
            return node_copies.gather(self._whole, mine, parts, root)
        return exchange.gather(self.net, mine, parts, root)

    def scatter(self, parts: Sequence[Array], mine: Array, root: int) -> Schedule[None]:
        """Return the schedule that copies a part to each rank; see exchange.scatter."""
        if self._whole is not None:
            return node_copies.scatter(self._whole, parts, mine, root)
        return self._confirmed(exchange.scatter(self.net, parts, mine, root))

    def _confirmed(self, schedule: Schedule[None]) -> Schedule[None]:
        """Run a schedule in which ranks that are no neighbours exchange data."""
        yield from schedule
        if len(self._own.nodes) > 1:
            # Between nodes only the left neighbour's call was compared; the others' were
            # believed. Who disagrees is not here.
            yield from chain.barrier(self.net)

    def allgather_bytes(self, mine: Array) -> Schedule[list[Array]]:
        """Return the schedule that collects a byte vector from every rank, in rank order."""
        lengths = np.zeros(self.size, np.int64)
        lengths[self.rank] = mine.size
        # Around they go first, because receives need them.
        yield from self.allgather(lengths)
        gathered = [np.empty(length, np.uint8) for length in lengths]
        gathered[self.rank] = mine
        yield from self.allgather_chunks(gathered)
        return gathered

    def broadcast(self, x: Array, root: int) -> Schedule[None]:
        """Return the schedule that copies the vector `x` of rank `root` to all."""
        if self._whole is not None:
            return node_copies.broadcast(self._whole, x, root)
        return chain.broadcast(self.ring, x, self._own.order.index(root))

    def broadcast_bytes(self, mine: Array, root: int) -> Schedule[Array]:
        """Return the schedule that copies a byte vector of any length to all."""
        length = np.array([mine.size], np.int64)
        yield from self.broadcast(length, root)
        payload = mine if self.rank == root else np.empty(length[0], np.uint8)
        yield from self.broadcast(payload, root)
        return payload

    def barrier(self) -> Schedule[None]:
        """Return the schedule that returns after every rank has called."""
        if len(self._own.nodes) > 1:
            yield from chain.barrier(self.net)
        if self.node is not None:
            # A node's lowest rank is here only if it agrees with the other nodes.
            yield (self.node.barrier(),)

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> Schedule[Array]:
        """Return the schedule that returns an array in node-shared memory, where possible."""
        if self.node is None:
            return _returned(np.empty(shape, dtype))
        return self._own.windows.empty(self.node, shape, dtype, self._next_window())

    def _next_window(self) -> int:
        """Return a number for a window; not by counting all: operations may end in any order."""
        self._windows += 1
        return self.sequence << 16 | self._windows


def _returned(x: Array) -> Schedule[Array]:
    yield ()
    return x
