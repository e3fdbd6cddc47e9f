"""The input of an algorithm: the operation that it runs for, and lengths of pieces."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike

from ..gpu.nccl import Nccl
from ..memory.arrays import Array
from ..memory.reduction import Combine
from ..transport.base import Channel, Node, Schedule
from ..transport.windows import Windows


@dataclass(frozen=True)
class Tuning:
    """Lengths, in bytes, and counts that make the algorithms fast; the same on all ranks.

    The numbers were measured on one machine with two cores; those for networks, in its lab (see
    `python -m mpiring lab`) with up to four hosts at 1 Gbit/s. For other machines they are a guess.

    Attributes:
        eager_bytes: Limit on the total length of a node's vectors that every rank combines, with
            one barrier instead of two. Measured on 2 and 4 ranks: it is faster up to 64 KiB each.
        compiled_eager_bytes: Limit that replaces `eager_bytes` for compiled code, in which the
            second barrier costs less. Measured on 2 and 4 ranks: it is faster up to 4 KiB each.
        compiles: True if every rank may compile code.
        moved_bytes: Limit on vectors that a node scatters, gathers and broadcasts in one piece
            with one barrier; the length of a staging slot. Measured on 2 and 4 ranks: at 1 MiB it
            takes 0.3 to 0.7 of the time of pieces and messages. At 4 MiB it takes longer.
        staged_bytes: Length of the pieces in which a node combines private vectors, so that the
            pieces of two ranks stay in a core's cache. Measured.
        rows_bytes: Length of the pieces that a rank of a node writes at a time for the others, for
            a reduce-scatter of private vectors; at most half a slot. Measured on 2 and 4 ranks:
            each piece takes NumPy about 7 µs in addition, and compiled code is as fast with any
            length.
        broadcast_bytes: Length of pieces along a chain. A piece is on the wire of every hop at
            once. On one node, 256 KiB to 1 MiB differ by less than the noise.
        ring_bytes: Length of the longest piece around a ring, so that a rank combines one while
            the next is on the wire. At 1 Gbit/s, lengths from 128 KiB to 1 MiB take
            1.02 times the least time that the wire allows.
        direct_bytes: Lengths of the shortest and longest piece sent directly to the rank that
            combines it. A rank holds two pieces from every other rank at a time. The
            pieces of two operations need no more memory than a chunk, unless shorter pieces would
            cost more in messages than they save in memory. Longer pieces gain nothing.
        slice_bytes: Length of the slices sent between nodes of several ranks. With 4 hosts of 2
            ranks at 1 Gbit/s, 320 to 640 KiB are equally fast.
        chunk_bytes: Length of the shortest part of a slice for one node. On many nodes slices are
            longer, because short messages would cost mostly latency.
        in_flight: Number of slices of a rank that are in flight between nodes at a time. With
            two, nodes that compete for the processor leave the wire idle.
        short_bytes: Limit on vectors that each node sends to all others at once. This takes half
            the time of the rings, and at 64 KiB the same time. MPI's own call takes about as
            long.
        direct_nodes: Number of nodes up to which each sends a short vector directly to all others
            in one step. More nodes use `doubling`. Counted, not measured: each of 8
            nodes sends 7 messages directly, or 3 by doubling.
        gathered_bytes: Limit up to which more than `direct_nodes` nodes of one rank gather slices
            by `doubling`. Doubling sends as many bytes as a ring in fewer messages, but
            overlaps nothing. Not measured on many nodes.
        host_bytes: Limit on vectors in GPU memory that are combined in host memory, which takes
            only two copies and two events. Not measured on a GPU.
        native_below_bytes: Length below which MPI's own call is used if nothing was measured. It
            needs fewer messages, and mpiring sends fewer bytes. Not measured on many nodes.
    """

    eager_bytes: int = 256 << 10
    compiled_eager_bytes: int = 16 << 10
    compiles: bool = False
    moved_bytes: int = 1 << 20
    staged_bytes: int = 256 << 10
    rows_bytes: int = 512 << 10
    broadcast_bytes: int = 512 << 10
    ring_bytes: int = 512 << 10
    direct_bytes: tuple[int, int] = (16 << 10, 256 << 10)
    slice_bytes: int = 320 << 10
    chunk_bytes: int = 64 << 10
    in_flight: int = 3
    short_bytes: int = 16 << 10
    direct_nodes: int = 8
    gathered_bytes: int = 256 << 10
    host_bytes: int = 0
    native_below_bytes: int = 256 << 10


class Operation(Protocol):
    """One operation of a communicator, as its algorithm sees it. Every rank has a `node`."""

    rank: int
    size: int
    node: Node
    tuning: Tuning

    @property
    def gpu(self) -> str:
        """The name of the GPU that holds the vectors; "" for host memory."""

    @property
    def nccl(self) -> Nccl:
        """NCCL's communicator, if the algorithm "nccl" is possible."""

    @property
    def net(self) -> Channel:
        """The channel, with ranks as numbered by the communicator."""

    @property
    def ring(self) -> Channel:
        """The channel, with ranks numbered node after node."""

    @property
    def order(self) -> Sequence[int]:
        """The communicator's ranks in the order of `ring`, node after node."""

    @property
    def windows(self) -> Windows:
        """The arrays in node-shared memory."""

    @property
    def nodes(self) -> Sequence[Sequence[int]]:
        """The ranks that share a memory, for each memory, in the same order on all ranks."""

    def borrow(self, n: int, dtype: DTypeLike) -> AbstractContextManager[Array]:
        """Lend scratch memory for n elements within a block."""

    def combiner(self, op: str, dtype: "np.dtype[Any]", size: float) -> Combine:
        """Return the implementation of an op that combines vectors in place."""

    def reduce_scatter_chunks(self, chunks: Sequence[Array], *, op: str = "sum") -> Schedule[None]:
        """Combine `chunks[r]` of all ranks on rank r; each rank sends it there directly."""

    def least_sent(self, nbytes: int) -> int:
        """Return the least bytes that each rank must send if data goes from one to all nodes."""

    def count_sent(self, nbytes: int) -> None:
        """Count bytes that a library sends to other nodes for this rank."""

    def native_allreduce(self, x: Array, op: str) -> Schedule[None]:
        """Combine `x` over all ranks, in place, by MPI's own call."""
