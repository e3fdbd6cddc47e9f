"""Collectives on private vectors through the staging slots of one node.

A collective runs in rounds. In each round, a rank copies pieces to its own slot, and reads the
pieces meant for it from the other slots. The halves of a slot alternate: while ranks read piece j
from one half, they write piece j+1 to the other, so a round costs one barrier. One copy in and one
copy out are the least possible between memories that are not shared.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import BufferMismatchError
from ..gpu.vectors import copy_to
from ..memory.arrays import Array, as_bytes
from ..memory.reduction import Combine
from ..transport.base import Node, Schedule
from ..transport.layout import COPIES, ROWS
from ..transport.node_call import parts_call

# The pieces of two ranks stay in a core's cache. Measured.
_ROUND_BYTES = 128 << 10


class _Slots:
    """The staging slots of a node as bytes, with space for the pieces of a round in each half.

    Args:
        node: Node whose ranks share the slots.
        rows: Number of vectors that a rank writes in a round: one for all ranks, or one for each
            rank.

    Attributes:
        piece_bytes: Length of a piece.
    """

    def __init__(self, node: Node, rows: int) -> None:
        self._node, self._row = node, node.rank % rows
        self._slots = node.slots(np.dtype(np.uint8))
        # The rest of the slot is for `announced`.
        self._half = (self._slots[0].size - 8 * node.size) // 2
        self.piece_bytes = min(self._half, _ROUND_BYTES) // rows

    def piece(self, x: Array, j: int) -> Array:
        """Return piece j of a vector; empty beyond its end."""
        return x[j * self.piece_bytes:(j + 1) * self.piece_bytes]

    def position(self, rank: int, row: int, j: int, size: int) -> Array:
        """Return the position of a row's piece j, of `size` bytes, in a rank's slot."""
        start = j % 2 * self._half + row * self.piece_bytes
        return self._slots[rank][start:start + size]

    def copy_in(self, rows: Mapping[int, Array], j: int) -> None:
        """Copy piece j of vectors, by row, to this rank's slot."""
        for row, x in rows.items():
            piece = self.piece(x, j)
            copy_to(self.position(self._node.rank, row, j, piece.size), piece)

    def copy_out(self, vectors: Mapping[int, Array], j: int) -> None:
        """Copy piece j of the vectors meant for this rank from the other ranks' slots."""
        for rank, x in vectors.items():
            piece = self.piece(x, j)
            copy_to(piece, self.position(rank, self._row, j, piece.size))

    def announced(self, rank: int) -> Array:
        """Return the words in which a rank announces how many bytes it has for each rank."""
        return self._slots[rank][-8 * self._node.size:].view(np.int64)


def broadcast(node: Node, x: Array, root: int) -> Schedule[None]:
    """Copy `x` of the node's rank `root` to all its ranks.

    Args:
        node: Node whose ranks take part.
        x: Vector of shape (n,), contiguous; overwritten on all ranks but `root`.
        root: Rank within the node whose data is copied.

    Collective: yes. Blocking: no (a schedule).
    """
    return _by_parts(node, COPIES, [x if rank == root else x[:0] for rank in range(node.size)])


def allgather(node: Node, parts: Sequence[Array]) -> Schedule[None]:
    """Copy `parts[r]` of each rank r of the node to all ranks of the node.

    Args:
        node: Node whose ranks take part.
        parts: Contiguous vectors, one for each rank of the node, with lengths that are equal on
            all ranks. All but this rank's vector are overwritten.

    Collective: yes. Blocking: no (a schedule).
    """
    return _by_parts(node, COPIES, parts)


def reduce_scatter(node: Node, chunks: Sequence[Array], combine: Combine) -> Schedule[None]:
    """Combine `chunks[r]` of all ranks of the node on rank r.

    Args:
        node: Node whose ranks take part.
        chunks: Contiguous vectors, one for each rank of the node, with lengths that are equal on
            all ranks. This rank's vector is overwritten by the result; the others are only read.
        combine: Implementation of the op; contributions are combined in rank order.

    Collective: yes. Blocking: no (a schedule).
    """
    return _by_parts(node, ROWS, chunks, combine)


def _by_parts(node: Node, kind: int, parts: Sequence[Array],
              combine: Combine | None = None) -> Schedule[None]:
    if node.has_arrived:
        # Ranks may still be reading the slots for an earlier schedule of this operation.
        yield (node.barrier(),)
    yield from node.part(*parts_call(node.memory, kind, parts, _ROUND_BYTES, combine))


def exchange(node: Node, sends: Mapping[int, Array], receives: Mapping[int, Array],
             rows: int) -> Schedule[None]:
    """Copy the bytes of `sends[s]` of each rank r of the node to `receives[r]` of rank s.

    Args:
        node: Node whose ranks take part.
        sends: Contiguous vectors of any length, by receiving rank of the node.
        receives: Contiguous vectors by sending rank of the node, overwritten. Vector r has as
            many bytes as rank r sends to this rank.
        rows: Number of ranks to which a rank sends, 1 or all; the same on all ranks.

    Raises:
        BufferMismatchError: A rank sends a different number of bytes.

    Collective: yes. Blocking: no (a schedule).
    """
    slots, rank = _Slots(node, rows), node.rank
    outgoing, incoming = (
        {other: as_bytes(x) for other, x in vectors.items()} for vectors in (sends, receives))
    writes = {dest % rows: x for dest, x in outgoing.items() if dest != rank}
    reads = {source: x for source, x in incoming.items() if source != rank}
    if node.has_arrived:
        # Ranks may still be reading the slots for an earlier schedule of this operation.
        yield (node.barrier(),)
    slots.announced(rank)[:] = [
        outgoing[dest].size if dest in outgoing else 0 for dest in range(node.size)]
    slots.copy_in(writes, 0)
    lengths = yield from node.share(
        max((x.size for x in [*outgoing.values(), *incoming.values()]), default=0))
    for source, x in incoming.items():
        sent = int(slots.announced(source)[rank])
        if sent != x.size:
            raise BufferMismatchError(
                f"rank {node.ranks[rank]}: receiving {x.size} bytes from rank "
                f"{node.ranks[source]}: it sent {sent}")
    if rank in receives and receives[rank] is not sends[rank]:
        copy_to(incoming[rank], outgoing[rank])
    last = max(0, max(lengths)[0] - 1) // slots.piece_bytes
    for j in range(1, last + 1):
        slots.copy_in(writes, j)
        slots.copy_out(reads, j - 1)
        yield (node.barrier(),)
    slots.copy_out(reads, last)
