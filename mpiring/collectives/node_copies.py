"""Collectives on private vectors by way of the staging slots of one node.

A collective goes in rounds: in each, a rank lays pieces into its own slot, and takes from the
others' what is meant for it. The halves of the slots are used in turn: while piece j is taken
out of one, piece j+1 is laid into the other, so that a round costs one barrier. One copy in
and one copy out are the least possible between memories that are not shared.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from ..errors import BufferMismatchError
from ..gpu.vectors import copy_to
from ..memory.arrays import Array, as_bytes
from ..memory.reduction import Combine
from ..transport.base import Node, Schedule

# The pieces of two ranks stay in a core's cache. Measured.
_ROUND_BYTES = 128 << 10

_BYTES = np.dtype(np.uint8)

# What a rank does in a round, given its number.
_Move = Callable[[int], None]


class _Slots:
    """The staging slots of a node, with room for the pieces of a round in each half.

    Args:
        node: The meeting place.
        dtype: Of the vectors.
        rows: Number of vectors that a rank lays down in a round: one for all ranks, or one for
            each of them.
    """

    def __init__(self, node: Node, dtype: "np.dtype[np.generic]", rows: int) -> None:
        self._node, self._row = node, node.rank % rows
        self._slots = node.slots(dtype)
        # The rest is for `announced`.
        self._half = (self._slots[0].size - node.size * 8 // dtype.itemsize) // 2
        self._size = min(self._half, _ROUND_BYTES // dtype.itemsize) // rows

    def piece(self, x: Array, j: int) -> Array:
        """Return piece j of a vector; empty behind its end."""
        return x[j * self._size:(j + 1) * self._size]

    def position(self, rank: int, row: int, j: int, size: int) -> Array:
        """Return where a row's piece j, of `size` elements, lies in a rank's slot."""
        start = j % 2 * self._half + row * self._size
        return self._slots[rank][start:start + size]

    def lay(self, rows: Mapping[int, Array], j: int) -> None:
        """Copy piece j of vectors, by row, to this rank's slot."""
        for row, x in rows.items():
            piece = self.piece(x, j)
            copy_to(self.position(self._node.rank, row, j, piece.size), piece)

    def take(self, vectors: Mapping[int, Array], j: int) -> None:
        """Copy piece j of the vectors that other ranks have for this one, by rank."""
        for rank, x in vectors.items():
            piece = self.piece(x, j)
            copy_to(piece, self.position(rank, self._row, j, piece.size))

    def announced(self, rank: int) -> Array:
        """Return where a rank notes how many bytes it has for each of the others."""
        return self._node.slots(_BYTES)[rank][-8 * self._node.size:].view(np.int64)

    def rounds(self, longest: int, lay: _Move, take: _Move,
               check: Callable[[], None] = lambda: None) -> Schedule[None]:
        """Lay down and take vectors, piece by piece.

        Args:
            longest: Length of the longest that this rank lays or takes.
            lay, take: Are given the number of a round.
            check: Called before anything is taken.
        """
        node = self._node
        if node.met:
            # What an earlier schedule of this operation has laid there may still be read.
            yield (node.barrier(),)
        lay(0)
        lengths = yield from node.share(longest)
        check()
        last = (max(lengths)[0] - 1) // self._size
        for j in range(1, last + 1):
            lay(j)
            take(j - 1)
            yield (node.barrier(),)
        take(max(last, 0))


def broadcast(node: Node, x: Array, root: int) -> Schedule[None]:
    """Copy `x` of the node's rank `root` to all its ranks.

    Args:
        x: Shape (n,), contiguous; overwritten on all ranks but `root`.
        root: Among the ranks of the node.

    Collective: yes. Blocking: no (a schedule).
    """
    slots, is_root = _Slots(node, x.dtype, 1), node.rank == root
    lays, takes = ({0: x}, {}) if is_root else ({}, {root: x})
    return slots.rounds(x.size, lambda j: slots.lay(lays, j), lambda j: slots.take(takes, j))


def allgather(node: Node, parts: Sequence[Array]) -> Schedule[None]:
    """Copy `parts[r]` of each rank r of the node to all its ranks.

    Args:
        parts: Per rank of the node a vector, contiguous, of lengths that all ranks agree on;
            all but this rank's own are overwritten.

    Collective: yes. Blocking: no (a schedule).
    """
    slots, lays = _Slots(node, parts[0].dtype, 1), {0: parts[node.rank]}
    takes = _of_others(node, enumerate(parts))
    return slots.rounds(
        _longest(parts), lambda j: slots.lay(lays, j), lambda j: slots.take(takes, j))


def reduce_scatter(node: Node, chunks: Sequence[Array], combine: Combine) -> Schedule[None]:
    """Combine `chunks[r]` of all ranks of the node on rank r.

    Args:
        chunks: Per rank of the node a vector, contiguous, of lengths that all ranks agree on.
            This rank's own is overwritten by the result, the others are only read.
        combine: The op; contributions are combined in the order of ranks.

    Collective: yes. Blocking: no (a schedule).
    """
    slots, rank = _Slots(node, chunks[0].dtype, node.size), node.rank
    lays = _of_others(node, enumerate(chunks))

    def take(j: int) -> None:
        piece = slots.piece(chunks[rank], j)
        sources = [slots.position(source, rank, j, piece.size) for source in range(node.size)]
        sources[rank] = piece
        combine.combine(sources, piece)

    return slots.rounds(_longest(chunks), lambda j: slots.lay(lays, j), take)


def exchange(node: Node, sends: Mapping[int, Array], receives: Mapping[int, Array],
             rows: int) -> Schedule[None]:
    """Copy the bytes of `sends[s]` of each rank r of the node to `receives[r]` of rank s.

    Args:
        sends: Vectors by rank of the node, contiguous, of any length.
        receives: Vectors by rank of the node, each of as many bytes as that rank sends to this
            one, contiguous; overwritten.
        rows: Number of ranks to which a rank sends: 1, or all; the same on all ranks.

    Raises:
        BufferMismatchError: A rank sends another number of bytes.

    Collective: yes. Blocking: no (a schedule).
    """
    slots, rank = _Slots(node, _BYTES, rows), node.rank
    outgoing, incoming = (
        {other: as_bytes(x) for other, x in vectors.items()} for vectors in (sends, receives))
    lays = {other % rows: x for other, x in _of_others(node, outgoing.items()).items()}
    takes = _of_others(node, incoming.items())

    def lay(j: int) -> None:
        if j == 0:
            slots.announced(rank)[:] = [
                outgoing[dest].size if dest in outgoing else 0 for dest in range(node.size)]
        slots.lay(lays, j)

    def check() -> None:
        for source, x in incoming.items():
            sent = int(slots.announced(source)[rank])
            if sent != x.size:
                raise BufferMismatchError(
                    f"rank {node.ranks[rank]}: receiving {x.size} bytes from rank "
                    f"{node.ranks[source]}: it sent {sent}")
        if rank in receives and receives[rank] is not sends[rank]:
            copy_to(incoming[rank], outgoing[rank])

    return slots.rounds(_longest([*outgoing.values(), *incoming.values()]), lay,
                        lambda j: slots.take(takes, j), check)


def _of_others(node: Node, vectors: Iterable[tuple[int, Array]]) -> dict[int, Array]:
    return {rank: x for rank, x in vectors if rank != node.rank}


def _longest(vectors: Sequence[Array]) -> int:
    return max((x.size for x in vectors), default=0)
