"""Combines arrays over nodes of several ranks: in each node's memory, and between the nodes.

An array is cut into pieces, and each piece into R slices, one for each rank of the largest
node. On every node the local ranks take the slices in turn: rank l of m takes l, l+m, … For
each of its slices a rank combines what its node has, a ring of all nodes' ranks with that
slice combines the nodes', and the result goes to the node's other ranks. R rings, not only
as many as the smallest node has ranks: on large nodes, where most is to be added, all ranks
add, and each of N nodes still sends 2(N-1)/N of the array, which is the least possible.

A few pieces are under way at once, so that the wire carries one while another is added. The
pieces are the same on all nodes, whatever memory the arrays of each are in.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..gpu.vectors import copy_to
from ..memory.arrays import Array, chunks_of
from ..memory.reduction import Combine, widens
from ..transport.base import Channel, Node, Schedule, T, together
from ..transport.members import Members
from . import direct, ring, shared

# Length of the slices, and how many pieces are under way at a time. Measured with 4 hosts of
# 2 ranks at 1 Gbit/s: 320 to 640 KiB are the same; with two pieces, nodes that compete for
# the processor let the wire wait.
SLICE_BYTES = 320 << 10
IN_FLIGHT = 3
# On many nodes slices are longer, so that messages are worth their latency.
CHUNK_BYTES = 64 << 10
# Up to here each node tells all others at once: that takes half the time of the rings, and at
# 64 KiB as long. MPI's own call takes about as long.
SHORT_BYTES = 16 << 10

# One piece of an array, as its slices.
Piece = Sequence[slice]
# What nodes do with a slice: given the ranks that have it, one of each node; the slice, as this
# node has it; and its place in the piece.
Exchange = Callable[[Channel, Array, int], Schedule[T]]
# Where on a slot a section of a slice lies: the slot, the shelf's number, the section.
Shelf = Callable[[Array, int, Array], Array]


@dataclass(frozen=True)
class Levels:
    """An op on a dtype, as it is done within nodes and between them.

    Sums and products of 16 bits are rounded twice, once on the node and once at the end:
    float32 sums would double the bytes on the wire, and every rank's own contribution would
    take as many times the bytes as a node has ranks. The means of a node and the mean of
    those are no further apart than the contributions, so neither overflows.

    Attributes:
        within: The op on a node.
        between: The op on what the nodes have.
        direct: Between nodes, every contribution goes straight to the rank that combines it.
    """

    within: Combine
    between: Combine
    direct: bool

    @classmethod
    def of(cls, op: str, dtype: "np.dtype[np.generic]", nodes: Sequence[Sequence[int]],
           combiner: Callable[[str, "np.dtype[np.generic]", float], Combine]) -> "Levels":
        """Return the levels of an op on the ranks of some nodes.

        Args:
            combiner: As `reduction`.
        """
        p, largest = sum(map(len, nodes)), max(map(len, nodes))
        if widens(dtype, op):
            # Divides by `largest` on all nodes, whatever their size, and then by the rest.
            return cls(combiner(op, dtype, largest), combiner(op, dtype, p / largest), True)
        within = "sum" if op == "mean" else op
        return cls(combiner(within, dtype, p), combiner(op, dtype, p), False)


class Inside(Protocol):
    """How slices are combined within a node, and handed out."""

    def collect(self, piece: Piece) -> Schedule[None]:
        """Combine what the node has of this rank's slices, into its own vector."""

    def spread(self, piece: Piece) -> Schedule[None]:
        """Copy this rank's slices to the other ranks of the node."""


def allreduce(
    net: Channel, nodes: Sequence[Sequence[int]], inside: Sequence[Inside], node: Node,
    x: Array, inbox: Array, levels: Levels, slice_bytes: int | None = None,
) -> Schedule[None]:
    """Combine `x` over all ranks, in place. To be called when all ranks of the node have arrived.

    Args:
        nodes: The ranks of each node, in the same order on all ranks.
        inside: From `in_windows` or `by_slots`; the nodes' may differ.
        node: The meeting place of this rank's node.
        x: Shape (n,), contiguous. Overwritten by the result.
        inbox: Scratch vector of at least `inbox_size` elements of the same dtype.
        levels: The op.
        slice_bytes: Length of the slices; SLICE_BYTES by default. The same on all ranks.

    Collective: yes. Blocking: no (a schedule).
    """
    pieces = pieces_of(x.size, x.itemsize, nodes, slice_bytes)
    inboxes = chunks_of(inbox, IN_FLIGHT)
    between = direct.allreduce if levels.direct else ring.allreduce

    def lane(index: int) -> Schedule[None]:
        """Combine every third piece, one after the other."""
        def exchange(members: Channel, part: Array, place: int) -> Schedule[None]:
            return between(members, part, inboxes[index], levels.between)

        for piece in pieces[index::IN_FLIGHT]:
            yield from by_slices(net.lane(index), nodes, inside[index], node, x, piece, exchange)

    yield from together(map(lane, range(IN_FLIGHT)), IN_FLIGHT)
    # Nobody's vector is complete before. And whoever does not agree with another node is
    # not here: no result of theirs leaves the node.
    yield (node.barrier(),)


def short(
    net: Channel, nodes: Sequence[Sequence[int]], node: Node, x: Array, inbox: Array,
    levels: Levels,
) -> Schedule[None]:
    """Combine a short vector over all ranks, in place: the nodes' first ranks tell each other.

    Takes one message's time between nodes. The bits are equal: each of those ranks combines
    what all have, in the order of nodes.

    Args:
        x: Shape (n,), contiguous, at most SHORT_BYTES long. Overwritten by the result.
        inbox: Scratch vector of at least `(len(nodes) - 1) * n` elements.
        nodes, node, levels: As for `allreduce`.

    Collective: yes. Blocking: no (a schedule).
    """
    # Not after the messages: who disagrees with another node must not have sent any.
    if node.met:
        yield (node.barrier(),)
    copies = shared.laid_out(node, x)
    yield (node.barrier(),)
    if node.rank == 0:
        levels.within.combine(copies, x)
        leaders = [ranks[0] for ranks in nodes]
        others = [leader for leader in leaders if leader != net.rank]
        theirs = dict(zip(others, chunks_of(inbox[:len(others) * x.size], len(others))))
        yield [*(net.irecv(theirs[leader], leader) for leader in others),
               *(net.isend(x, leader) for leader in others)]
        levels.between.combine([theirs.get(leader, x) for leader in leaders], x)
        copy_to(copies[0], x)
    yield (node.barrier(),)
    copy_to(x, copies[0])


def by_slices(
    net: Channel, nodes: Sequence[Sequence[int]], inside: Inside, node: Node, x: Array,
    piece: Piece, exchange: Exchange[T],
) -> Schedule[list[T]]:
    """Combine a piece of `x` within the node, let nodes exchange its slices, and hand them out.

    All ranks take the slices in the same order, so that the exchanges cannot wait for each
    other in a circle.

    Args:
        piece: Its slices, one for each rank of the largest node.
        exchange: Replaces a slice, in place, by what all nodes are to have, with the same bits.
        net, nodes, inside, node, x: As for `allreduce`.

    Returns:
        What `exchange` has returned for each of this rank's slices.

    Collective: yes. Blocking: no (a schedule).
    """
    returned = []
    yield from inside.collect(piece)
    for j in range(node.rank, len(piece), node.size):
        members = Members(net, [ranks[j % len(ranks)] for ranks in nodes])
        returned.append((yield from exchange(members, x[piece[j]], j)))
    yield from inside.spread(piece)
    return returned


def pieces_of(n: int, itemsize: int, nodes: Sequence[Sequence[int]],
              slice_bytes: int | None = None) -> list[Piece]:
    """Cut n elements into pieces, and those into slices."""
    slices, count = max(map(len, nodes)), _count(n, itemsize, nodes, slice_bytes)
    bounds = [i * n // (count * slices) for i in range(count * slices + 1)]
    flat = [slice(start, stop) for start, stop in zip(bounds, bounds[1:])]
    return [flat[i * slices:(i + 1) * slices] for i in range(count)]


def _count(n: int, itemsize: int, nodes: Sequence[Sequence[int]],
           slice_bytes: int | None) -> int:
    """Return in how many pieces n elements travel."""
    # The ring cuts a slice once more, into as many chunks as there are nodes.
    slice_bytes = max(slice_bytes or SLICE_BYTES, len(nodes) * CHUNK_BYTES)
    return max(1, -(-n * itemsize // (max(map(len, nodes)) * slice_bytes)))


def inbox_size(n: int, itemsize: int, nodes: Sequence[Sequence[int]], levels: Levels,
               slice_bytes: int | None = None) -> int:
    """Return how many elements of scratch memory a rank needs to combine n."""
    slices = max(map(len, nodes)) * _count(n, itemsize, nodes, slice_bytes)
    of_one = direct.inbox_size if levels.direct else ring.inbox_size
    # A longer slice, cut into more pieces, may need less than a shorter one.
    return IN_FLIGHT * max(of_one(length, len(nodes), itemsize)
                           for length in (n // slices, -(-n // slices)))


def in_windows(node: Node, vectors: Sequence[Array], combine: Combine) -> Sequence[Inside]:
    """Return how lanes combine vectors that lie in shared memory.

    Args:
        vectors: Per rank of the node.
        combine: The op within the node.
    """
    return [_InWindows(node.rank, vectors, combine)] * IN_FLIGHT


def by_slots(node: Node, x: Array, combine: Combine) -> Sequence[Inside]:
    """Return how lanes combine private vectors: by the slots of the node.

    Args:
        x: This rank's vector.
        combine: The op within the node.
    """
    slots = node.slots(x.dtype)
    size = slots[0].size // (2 * IN_FLIGHT)
    halves = [[slot[start:start + size] for slot in slots]
              for start in range(0, 2 * IN_FLIGHT * size, size)]
    return [_BySlots(node.lane(1 + index), x, combine, halves[2 * index:2 * index + 2])
            for index in range(IN_FLIGHT)]


class _InWindows:
    """Nobody but the rank that combines a slice touches it, in any vector: no barriers."""

    def __init__(self, rank: int, vectors: Sequence[Array], combine: Combine) -> None:
        self._rank, self._vectors, self._combine = rank, vectors, combine

    def collect(self, piece: Piece) -> Schedule[None]:
        for part in piece[self._rank::len(self._vectors)]:
            sources = [x[part] for x in self._vectors]
            self._combine.combine(sources, sources[self._rank])
        return
        yield ()

    def spread(self, piece: Piece) -> Schedule[None]:
        for part in piece[self._rank::len(self._vectors)]:
            for place, x in enumerate(self._vectors):
                if place != self._rank:
                    copy_to(x[part], self._vectors[self._rank][part])
        return
        yield ()


class _BySlots:
    """Sections of slices go by two halves of the slots in turn.

    At a barrier, what lies on one half is complete, and nobody looks at the other any more.
    """

    def __init__(self, node: Node, x: Array, combine: Combine,
                 halves: Sequence[Sequence[Array]]) -> None:
        self._node, self._x, self._combine = node, x, combine
        self._halves = list(halves)

    def collect(self, piece: Piece) -> Schedule[None]:
        """Combine what the node has of this rank's slices: each lays out those of the others."""
        node, r, m = self._node, self._node.rank, self._node.size
        for parts, shelf in self._sections(piece, len(piece) - len(piece) // m):
            slots = self._turn()
            for j, part in enumerate(parts):
                if j % m != r:
                    # Before j come so many slices that are not r's.
                    copy_to(shelf(slots[r], j + (r - j) // m, part), part)
            yield (node.barrier(),)
            for j in range(r, len(parts), m):
                self._combine.combine([
                    parts[j] if rank == r else shelf(slot, j + (rank - j) // m, parts[j])
                    for rank, slot in enumerate(slots)], parts[j])

    def spread(self, piece: Piece) -> Schedule[None]:
        """Copy this rank's slices to the others: each lays out its own."""
        node, r, m = self._node, self._node.rank, self._node.size
        for parts, shelf in self._sections(piece, -(-len(piece) // m)):
            slots = self._turn()
            for j in range(r, len(parts), m):
                copy_to(shelf(slots[r], j // m, parts[j]), parts[j])
            yield (node.barrier(),)
            for j, part in enumerate(parts):
                if j % m != r:
                    copy_to(part, shelf(slots[j % m], j // m, part))

    def _turn(self) -> Sequence[Array]:
        self._halves.reverse()
        return self._halves[0]

    def _sections(self, piece: Piece, shelves: int) -> Iterator[tuple[list[Array], Shelf]]:
        """Cut the slices of a piece into sections, of which each fits a shelf of a slot.

        Args:
            shelves: How many a slot must have.

        Returns:
            A section of each slice, and a function that returns a section's place.
        """
        width = self._halves[0][0].size // shelves
        slices = [self._x[part] for part in piece]
        for start in range(0, max(map(len, slices)), width):
            yield ([part[start:start + width] for part in slices],
                   lambda slot, place, part: slot[place * width:place * width + part.size])
