"""What an algorithm is given: the operation it works for, and the lengths in which it cuts."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike

from ..memory.arrays import Array
from ..memory.reduction import Combine
from ..transport.base import Channel, Node, Schedule


@dataclass(frozen=True)
class Tuning:
    """Lengths, in bytes, and counts that make the algorithms fast; the same on all ranks.

    Measured numbers come from one machine of two cores, between hosts from its lab (see
    `python -m mpiring lab`) of up to four hosts at 1 Gbit/s. On other machines, they are a guess.

    Attributes:
        eager_bytes: On a node, vectors that take no more together are combined by every rank:
            one barrier instead of two. Measured on 2 and 4 ranks: it wins up to 64 KiB each.
        moved_bytes: On a node, vectors up to here are scattered, gathered and broadcast in one
            piece, with one barrier: as long as a staging slot. Measured on 2 and 4 ranks: at
            512 KiB that takes a third of the time of pieces.
        staged_bytes: Of a node's private vectors, so much is combined at a time: the pieces of
            two ranks stay in a core's cache. Measured.
        broadcast_bytes: Length of pieces along a chain. A piece is on the wire of every hop at
            once; on one node, 256 KiB to 1 MiB differ by less than the noise.
        ring_bytes: Longest piece around a ring, so that one is combined while the next is on
            the wire. At 1 Gbit/s all of 128 KiB to 1 MiB reach 1.02 of the wire's limit.
        direct_bytes: Shortest and longest piece sent straight to the rank that combines it.
            Two from every other rank are held at a time; those of two operations take no more
            than a chunk, but where shorter ones would cost more in messages than they save in
            memory. Longer ones gain nothing.
        slice_bytes: Length of the slices that go between nodes of several ranks. With 4 hosts
            of 2 ranks at 1 Gbit/s, 320 to 640 KiB are the same.
        chunk_bytes: Shortest piece of a slice for one node: on many nodes slices are longer,
            so that messages are worth their latency.
        in_flight: So many slices of a rank are under way between nodes at a time: with two,
            nodes that compete for the processor let the wire wait.
        short_bytes: Up to here each node sends to all others at once: that takes half the time
            of the rings, and at 64 KiB as long. MPI's own call takes about as long.
        direct_nodes: Up to so many nodes send a short vector straight to all others, in one step;
            more of them take the steps of `doubling`. Counted: 8 nodes send 7 messages each, or 3.
        gathered_bytes: Up to here, more than `direct_nodes` nodes of one rank gather slices by
            `doubling`: as many bytes as a ring in fewer messages, but nothing overlaps. As
            `native_below_bytes`, not measured on many nodes.
        native_below_bytes: Where nothing was measured, MPI's own call is taken below: it needs
            fewer messages, ours fewer bytes.
    """

    eager_bytes: int = 256 << 10
    moved_bytes: int = 512 << 10
    staged_bytes: int = 256 << 10
    broadcast_bytes: int = 512 << 10
    ring_bytes: int = 512 << 10
    direct_bytes: tuple[int, int] = (16 << 10, 256 << 10)
    slice_bytes: int = 320 << 10
    chunk_bytes: int = 64 << 10
    in_flight: int = 3
    short_bytes: int = 16 << 10
    direct_nodes: int = 8
    gathered_bytes: int = 256 << 10
    native_below_bytes: int = 256 << 10


# The number and offset of a vector that no window holds ...
NOWHERE = (-1, 0)
# ... and of one that lies in its rank's staging slot, because others cannot wait for the rank.
IN_SLOT = (-2, 0)


class WindowFinder(Protocol):
    """The arrays in node-shared memory."""

    def position_of(self, x: Array) -> tuple[int, int]:
        """Return the number of the window that holds `x`, and its byte offset; or NOWHERE."""

    def vectors(self, positions: Sequence[tuple[int, ...]], x: Array) -> Sequence[Array] | None:
        """Return, per rank of the node, its vector; None unless all lie in one window."""

    def slices(
        self, node: Node, positions: Sequence[tuple[int, ...]], x: Array,
    ) -> Sequence[Array] | None:
        """Return, per rank of the node, slice `node.rank` of its vector, likewise."""


class Operation(Protocol):
    """One operation of a communicator, as its algorithm sees it.

    Attributes:
        rank, size: This rank, and how many there are.
        node: The meeting place of this rank's node; of a rank alone there, its own.
        tuning: Lengths and counts.
    """

    rank: int
    size: int
    node: Node
    tuning: Tuning

    @property
    def net(self) -> Channel:
        """The channel, with ranks as the communicator numbers them."""

    @property
    def ring(self) -> Channel:
        """The channel, with ranks node after node."""

    @property
    def order(self) -> Sequence[int]:
        """The ranks, node after node."""

    @property
    def windows(self) -> WindowFinder:
        """What finds vectors in node-shared memory."""

    @property
    def nodes(self) -> Sequence[Sequence[int]]:
        """The ranks that share a memory, for each memory, in the same order on all ranks."""

    def borrow(self, n: int, dtype: DTypeLike) -> AbstractContextManager[Array]:
        """Lend scratch memory for n elements."""

    def combiner(self, op: str, dtype: "np.dtype[Any]", size: float) -> Combine:
        """Return what combines vectors where they lie."""

    def reduce_scatter_chunks(self, chunks: Sequence[Array], *, op: str = "sum") -> Schedule[None]:
        """Combine vector r of `chunks` of all ranks on rank r, each sent straight to it."""

    def native_allreduce(self, x: Array, op: str) -> Schedule[None]:
        """Combine `x` over all ranks, in place, by MPI's own call."""

    def confirmed(self, schedule: Schedule[None]) -> Schedule[None]:
        """Run a schedule in which ranks exchange data that are not neighbours on the ring."""
