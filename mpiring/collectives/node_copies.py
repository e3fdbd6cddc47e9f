"""Collectives on private vectors by way of the staging slots of one node.

A collective goes in rounds: in each, a rank lays pieces into its own slot, and takes from the
others' what is meant for it. The halves of the slots are used in turn: while piece j is taken
out of one, piece j+1 is laid into the other, so that a round costs one barrier. One copy in
and one copy out are the least possible between memories that are not shared.
"""

from collections.abc import Callable, Sequence

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
        pieces: How many a rank lays down in a round.
    """

    def __init__(self, node: Node, dtype: "np.dtype[np.generic]", pieces: int) -> None:
        self._node = node
        self._slots = node.slots(dtype)
        # The rest is for `announce`.
        self._half = (self._slots[0].size - node.size * 8 // dtype.itemsize) // 2
        self._size = min(self._half, _ROUND_BYTES // dtype.itemsize) // pieces

    def piece(self, x: Array, j: int) -> Array:
        """Return piece j of a vector; empty behind its end."""
        return x[j * self._size:(j + 1) * self._size]

    def position(self, rank: int, k: int, j: int, size: int) -> Array:
        """Return where the k-th vector's piece j, of `size` elements, lies in a rank's slot."""
        start = j % 2 * self._half + k * self._size
        return self._slots[rank][start:start + size]

    def lay(self, x: Array, k: int, j: int) -> None:
        """Copy piece j of the k-th vector to this rank's slot."""
        piece = self.piece(x, j)
        copy_to(self.position(self._node.rank, k, j, piece.size), piece)

    def take(self, x: Array, rank: int, k: int, j: int) -> None:
        """Copy piece j of another rank's k-th vector from its slot."""
        piece = self.piece(x, j)
        copy_to(piece, self.position(rank, k, j, piece.size))

    def announce(self, vectors: Sequence[Array]) -> None:
        """Note how many bytes this rank has for each of the others."""
        self._announced(self._node.rank)[:] = [x.nbytes for x in vectors]

    def check(self, source: int, x: Array) -> None:
        """Raise BufferMismatchError unless a rank has announced as many bytes as `x` has."""
        _check(self._node, source, int(self._announced(source)[self._node.rank]), x)

    def _announced(self, rank: int) -> Array:
        return self._node.slots(_BYTES)[rank][-8 * self._node.size:].view(np.int64)

    def rounds(self, longest: int, lay: _Move, take: _Move,
               check: Callable[[Sequence[int]], None] = lambda lengths: None) -> Schedule[None]:
        """Lay down and take vectors, piece by piece.

        Args:
            longest: Length of the longest that this rank lays or takes.
            lay, take: Are given the number of a round.
            check: Is given `longest` of each rank before anything is taken.
        """
        node = self._node
        if node.met:
            # What an earlier schedule of this operation has laid there may still be read.
            yield (node.barrier(),)
        lay(0)
        lengths = [length for length, in (yield from node.share(longest))]
        check(lengths)
        last = (max(lengths) - 1) // self._size
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
    return slots.rounds(
        x.size,
        (lambda j: slots.lay(x, 0, j)) if is_root else _nothing,
        _nothing if is_root else lambda j: slots.take(x, root, 0, j))


def allgather(node: Node, parts: Sequence[Array]) -> Schedule[None]:
    """Copy `parts[r]` of each rank r of the node to all its ranks.

    Args:
        parts: Per rank of the node a vector, contiguous, of lengths that all ranks agree on;
            all but this rank's own are overwritten.

    Collective: yes. Blocking: no (a schedule).
    """
    slots, local_part, others = _Slots(node, parts[0].dtype, 1), parts[node.rank], _others(node)

    def take(j: int) -> None:
        for rank in others:
            slots.take(parts[rank], rank, 0, j)

    return slots.rounds(_longest(parts), lambda j: slots.lay(local_part, 0, j), take)


def reduce_scatter(node: Node, chunks: Sequence[Array], combine: Combine) -> Schedule[None]:
    """Combine `chunks[r]` of all ranks of the node on rank r.

    Args:
        chunks: Per rank of the node a vector, contiguous, of lengths that all ranks agree on.
            This rank's own is overwritten by the result, the others are only read.
        combine: The op; contributions are combined in the order of ranks.

    Collective: yes. Blocking: no (a schedule).
    """
    slots, local_rank, others = _Slots(node, chunks[0].dtype, node.size), node.rank, _others(node)

    def lay(j: int) -> None:
        for rank in others:
            slots.lay(chunks[rank], rank, j)

    def take(j: int) -> None:
        piece = slots.piece(chunks[local_rank], j)
        sources = [slots.position(rank, local_rank, j, piece.size) for rank in range(node.size)]
        sources[local_rank] = piece
        combine.combine(sources, piece)

    return slots.rounds(_longest(chunks), lay, take)


def all_to_all(
    node: Node, sends: Sequence[Array], receives: Sequence[Array],
) -> Schedule[None]:
    """Copy the bytes of `sends[s]` of each rank r of the node to `receives[r]` of rank s.

    Args:
        sends: Per rank of the node a vector, contiguous, of any length.
        receives: Per rank of the node, a vector of as many bytes as that rank sends to
            this one, contiguous; overwritten.

    Raises:
        BufferMismatchError: A rank sends another number of bytes.

    Collective: yes. Blocking: no (a schedule).
    """
    local_rank, others = node.rank, _others(node)
    sends, receives = [*map(as_bytes, sends)], [*map(as_bytes, receives)]
    slots = _Slots(node, _BYTES, node.size)

    def lay(j: int) -> None:
        if j == 0:
            slots.announce(sends)
        for rank in others:
            slots.lay(sends[rank], rank, j)

    def check(_: Sequence[int]) -> None:
        for rank in range(node.size):
            slots.check(rank, receives[rank])
        copy_to(receives[local_rank], sends[local_rank])

    def take(j: int) -> None:
        for rank in others:
            slots.take(receives[rank], rank, local_rank, j)

    return slots.rounds(_longest([*sends, *receives]), lay, take, check)


def gather(node: Node, vector: Array, parts: Sequence[Array], root: int) -> Schedule[None]:
    """Copy the bytes of `vector` of each rank r of the node to `parts[r]` of its rank `root`.

    Args:
        vector: Contiguous, of any length.
        parts: On `root`, per rank of the node a vector of as many bytes as that rank sends,
            contiguous; overwritten. Ignored elsewhere.
        root: Among the ranks of the node.

    Raises:
        BufferMismatchError: A rank sends another number of bytes.

    Collective: yes. Blocking: no (a schedule).
    """
    slots, data, others = _Slots(node, _BYTES, 1), as_bytes(vector), _others(node)
    if node.rank != root:
        return slots.rounds(data.size, lambda j: slots.lay(data, 0, j), _nothing)
    targets = [*map(as_bytes, parts)]

    def check(lengths: Sequence[int]) -> None:
        for rank in others:
            _check(node, rank, lengths[rank], targets[rank])
        if parts[root] is not vector:
            copy_to(targets[root], data)

    def take(j: int) -> None:
        for rank in others:
            slots.take(targets[rank], rank, 0, j)

    return slots.rounds(data.size, _nothing, take, check)


def scatter(node: Node, parts: Sequence[Array], vector: Array, root: int) -> Schedule[None]:
    """Copy the bytes of `parts[r]` of the node's rank `root` to `vector` of each rank r.

    Args:
        parts: On `root`, per rank of the node a vector, contiguous. Ignored elsewhere.
        vector: Contiguous, as many bytes as `root` sends; overwritten.
        root: Among the ranks of the node.

    Raises:
        BufferMismatchError: `root` sends another number of bytes.

    Collective: yes. Blocking: no (a schedule).
    """
    slots, data, others = _Slots(node, _BYTES, node.size), as_bytes(vector), _others(node)
    sources = [*map(as_bytes, parts)] if node.rank == root else []

    def lay(j: int) -> None:
        if j == 0:
            slots.announce(sources)
        for rank in others:
            slots.lay(sources[rank], rank, j)

    def check(_: Sequence[int]) -> None:
        slots.check(root, data)
        if node.rank == root:
            copy_to(data, sources[root])

    return slots.rounds(
        data.size,
        lay if node.rank == root else _nothing,
        _nothing if node.rank == root else lambda j: slots.take(data, root, node.rank, j),
        check)


def _check(node: Node, source: int, sent: int, x: Array) -> None:
    """Raise BufferMismatchError unless `x`, in bytes, takes what a rank sends."""
    if sent != x.size:
        raise BufferMismatchError(
            f"rank {node.ranks[node.rank]}: receiving {x.size} bytes from rank "
            f"{node.ranks[source]}: it sent {sent}")


def _others(node: Node) -> list[int]:
    return [rank for rank in range(node.size) if rank != node.rank]


def _longest(vectors: Sequence[Array]) -> int:
    return max(x.size for x in vectors)


def _nothing(j: int) -> None:
    """Do nothing in round j."""
