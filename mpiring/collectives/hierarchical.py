"""Combines arrays over nodes of several ranks: in each node's memory, and between the nodes.

An array is cut into pieces, and each piece into R slices, one for each rank of the largest
node. On every node the local ranks take the slices in turn: rank l of m takes l, l+m, … For
each of its slices a rank combines what its node has, a ring of all nodes' ranks with that
slice combines the nodes', and the result goes to the node's other ranks. R rings, not only
as many as the smallest node has ranks: on large nodes, where most is to be added, all ranks
add, and each of N nodes still sends 2(N-1)/N of the array, which is the least possible.

If the arrays are in memory that the ranks of a node share, a rank combines and hands out part by
part, while messages travel; see `local`. Otherwise the ranks meet before and after the rings.

A few pieces are under way at once, so that the wire carries one while another is added. The
pieces are the same on all nodes, whatever memory the arrays of each are in.

Where each rank is to have its own slice only, ring j goes through the slices of the ranks
with local number j: one on each node, none where a node has fewer ranks.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..gpu.vectors import copy_to
from ..memory.arrays import Array, bounds_of, chunks_of
from ..memory.reduction import Combine, widens
from ..transport.base import Channel, Members, Node, Schedule, T, together
from . import direct, doubling, ring, shared
from .local import Local
from .operation import Operation, Tuning

# One piece of an array, as its slices: those of ring 0, 1, …
Piece = Sequence[slice]
# What nodes do with a slice: given the ranks that have it, one of each node; the slice, as this
# node has it; and the number of its ring.
Exchange = Callable[[Channel, Array, int], Schedule[T]]
# Where in a staging slot a section of a slice lies: the slot, its number there, the section.
Position = Callable[[Array, int, Array], Array]


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
    def of(cls, operation: Operation, op: str, dtype: "np.dtype[np.generic]") -> "Levels":
        """Return the levels of an op on the vectors of an operation."""
        combiner, sizes = operation.combiner, [len(ranks) for ranks in operation.nodes]
        p, largest = sum(sizes), max(sizes)
        if widens(dtype, op):
            # Divides by `largest` on all nodes, whatever their size, and then by the rest.
            return cls(combiner(op, dtype, largest), combiner(op, dtype, p / largest), True)
        within = "sum" if op == "mean" else op
        return cls(combiner(within, dtype, p), combiner(op, dtype, p), False)


class Inside(Protocol):
    """How slices are combined within a node, and handed out: at once, or part by part.

    Attributes:
        meets: The ranks of the node meet for that, so that it takes all slices of a piece at once.
    """

    meets: bool

    def collect(self, piece: Piece) -> Schedule[None]:
        """Combine what the node has of this rank's slices, into its own vector."""

    def spread(self, piece: Piece) -> Schedule[None]:
        """Copy this rank's slices to the other ranks of the node."""

    def local(self, chunks: Sequence[slice]) -> Local | None:
        """Return what does both part by part, while other parts are on the wire; or None.

        Args:
            chunks: What this rank exchanges of its vector.
        """


def meet(operation: Operation, x: Array, within: Combine) -> Schedule[Sequence[Inside]]:
    """Meet the ranks of the node; return, per lane, how they combine their vectors.

    Args:
        x: This rank's vector.
        within: The op within the node.
    """
    node, windows, tuning = operation.node, operation.windows, operation.tuning
    positions = yield from node.share(*windows.position_of(x))
    vectors = [x] if node.size == 1 else windows.vectors(positions, x)
    if vectors is None:
        return by_slots(node, x, within, tuning.in_flight)
    return [_InWindows(node.rank, vectors, within)] * tuning.in_flight


def allreduce(operation: Operation, x: Array, op: str, combine: Combine) -> Schedule[None]:
    """Combine `x` over all ranks, in place.

    Args:
        operation: Of ranks on several nodes.
        x: Shape (n,), contiguous. Overwritten by the result.
        op, combine: The op, and what combines by it on all ranks at once.

    Collective: yes. Blocking: no (a schedule).
    """
    levels = Levels.of(operation, op, x.dtype)
    inside = yield from meet(operation, x, levels.within)
    yield from by_levels(operation, x, levels, inside)


def by_levels(operation: Operation, x: Array, levels: Levels,
              inside: Sequence[Inside]) -> Schedule[None]:
    """Continue `allreduce` when all ranks of the node have arrived.

    Args:
        operation, x: As for `allreduce`.
        levels: The op.
        inside: Per lane, see `meet`; the nodes' may differ.

    Collective: yes. Blocking: no (a schedule).
    """
    node, nodes, tuning = operation.node, operation.nodes, operation.tuning
    size = inbox_size(x.size, x.itemsize, nodes, levels, tuning)
    with operation.borrow(size, x.dtype) as inbox:
        inboxes = chunks_of(inbox, len(inside))

        def lane(index: int, piece: Piece) -> Schedule[None]:
            room = inside[index]
            if room.meets:
                yield from room.collect(piece)
            for j in range(node.rank, len(piece), node.size):
                members, part = _ring(operation, index, j), x[piece[j]]
                local = room.local(_chunks_of(piece[j], members.size))
                if levels.direct:
                    yield from direct.allreduce(members, part, inboxes[index], levels.between,
                                                tuning.direct_bytes, tuning.ring_bytes, local)
                else:
                    yield from ring.allreduce(members, part, inboxes[index], levels.between,
                                              tuning.ring_bytes, local)
            if room.meets:
                yield from room.spread(piece)

        yield from _in_lanes(node, pieces_of(x.size, x.itemsize, nodes, tuning),
                             len(inside), lane)


def reduce_scatter(operation: Operation, x: Array, bounds: Sequence[int], op: str,
                   combine: Combine) -> Schedule[None]:
    """Combine slice r of `x` over all ranks on rank r.

    Each of N nodes sends the slices of the other nodes' ranks, (N-1)/N of the array where
    they are equal, which is the least possible.

    Args:
        x: Shape (n,), contiguous. Overwritten; this rank's slice holds the result.
        bounds: Rank r's slice is `x[bounds[r]:bounds[r + 1]]`.
        operation, op, combine: As for `allreduce`.

    Collective: yes. Blocking: no (a schedule).
    """
    node, nodes, tuning = operation.node, operation.nodes, operation.tuning
    levels = Levels.of(operation, op, x.dtype)
    inside = yield from meet(operation, x, levels.within)
    size = inbox_size_of_slices(bounds, x.itemsize, nodes, levels, tuning)
    with operation.borrow(size, x.dtype) as inbox:
        inboxes = chunks_of(inbox, len(inside))

        def lane(index: int, rows: Sequence[Piece]) -> Schedule[None]:
            room = inside[index]
            # Ranks that meet amid their rings, one of which waits for a rank with several rings,
            # could wait in a circle.
            if room.meets:
                for row in rows:
                    yield from room.collect(row)
            for j in range(node.rank, len(rows[0]), node.size):
                members, parts = _ring(operation, index, j), [row[j] for row in rows]
                chunks = [x[part] for part in parts]
                local = room.local(parts)
                if levels.direct:
                    yield from direct.reduce_scatter(members, chunks, inboxes[index],
                                                     levels.between, tuning.direct_bytes, local)
                else:
                    yield from ring.reduce_scatter(members, chunks, inboxes[index],
                                                   levels.between, tuning.ring_bytes, local)

        yield from _in_lanes(
            node, pieces_of_slices(bounds, x.itemsize, nodes, tuning), len(inside), lane)


def allgather(operation: Operation, x: Array, bounds: Sequence[int]) -> Schedule[None]:
    """Copy slice r of `x` of rank r to all ranks; the way back from `reduce_scatter`.

    Args:
        x: Shape (n,), contiguous. All but this rank's slice is overwritten.
        operation, bounds: As for `reduce_scatter`.

    Collective: yes. Blocking: no (a schedule).
    """
    # Nothing is combined.
    inside = yield from meet(operation, x, operation.combiner("max", np.dtype(bool), 1))
    yield from by_rings(operation, x, bounds, inside)


def by_rings(operation: Operation, x: Array, bounds: Sequence[int],
             inside: Sequence[Inside]) -> Schedule[None]:
    """Continue `allgather` when all ranks of the node have arrived.

    Args:
        operation, x, bounds: As for `allgather`.
        inside: Per lane, see `meet`; the nodes' may differ.

    Collective: yes. Blocking: no (a schedule).
    """
    node, tuning = operation.node, operation.tuning

    def lane(index: int, rows: Sequence[Piece]) -> Schedule[None]:
        room = inside[index]
        for j in range(node.rank, len(rows[0]), node.size):
            parts = [row[j] for row in rows]
            yield from ring.allgather(
                _ring(operation, index, j), [x[part] for part in parts], tuning.ring_bytes,
                room.local(parts))
        if room.meets:
            for row in rows:
                yield from room.spread(row)

    return _in_lanes(node, pieces_of_slices(bounds, x.itemsize, operation.nodes, tuning),
                     len(inside), lane)


def _in_lanes(node: Node, pieces: Sequence[T], count: int,
              lane: Callable[[int, T], Schedule[object]]) -> Schedule[None]:
    """Deal the pieces out to a few lanes, each of which takes its own one after the other."""
    def run(index: int) -> Schedule[None]:
        for piece in pieces[index::count]:
            yield from lane(index, piece)

    yield from together(map(run, range(count)), count)
    # No rank's vector is complete before. And a rank that does not agree with another node is
    # not here: no result leaves its node.
    yield (node.barrier(),)


def _ring(operation: Operation, lane: int, j: int) -> Channel:
    """Return a lane's channel of the ranks, one of each node, that exchange slice j."""
    return Members(operation.net.lane(lane), [ranks[j % len(ranks)] for ranks in operation.nodes])


def short(operation: Operation, x: Array, op: str, combine: Combine) -> Schedule[None]:
    """Combine a short vector over all ranks, in place: the nodes' first ranks tell each other.

    Between few nodes in one message's time: each of those ranks combines what all have, in the
    order of nodes. Between more than `tuning.direct_nodes`, see `doubling`. The bits are equal.

    Args:
        x: Shape (n,), contiguous, not longer than a staging slot. Overwritten by the result.
        operation, op, combine: As for `allreduce`.

    Collective: yes. Blocking: no (a schedule).
    """
    node, levels = operation.node, Levels.of(operation, op, x.dtype)
    # Not after the messages: a rank that disagrees with another node must not have sent any.
    if node.met:
        yield (node.barrier(),)
    copies = shared.laid_out(node, x)
    yield (node.barrier(),)
    if node.rank == 0:
        levels.within.combine(copies, x)
        leaders = Members(operation.net, [ranks[0] for ranks in operation.nodes])
        if leaders.size > operation.tuning.direct_nodes:
            yield from doubling.allreduce(operation, leaders, x, op, levels.between.divisor)
        else:
            yield from _short_directly(operation, leaders.lane(doubling.LANE), x, levels.between)
        copy_to(copies[0], x)
    yield (node.barrier(),)
    copy_to(x, copies[0])


def _short_directly(operation: Operation, net: Channel, x: Array,
                    combine: Combine) -> Schedule[None]:
    """Combine a short vector over the ranks of a channel: each sends its own to all others."""
    with operation.borrow(net.size * x.size, x.dtype) as inbox:
        received = chunks_of(inbox, net.size)
        received[net.rank] = x
        others = [rank for rank in range(net.size) if rank != net.rank]
        yield [*(net.irecv(received[rank], rank) for rank in others),
               *(net.isend(x, rank) for rank in others)]
        combine.combine(received, x)


def by_slices(operation: Operation, lane: int, inside: Inside, x: Array, piece: Piece,
              exchange: Exchange[T]) -> Schedule[list[T]]:
    """Combine a piece of `x` within the node, let nodes exchange its slices, and hand them out.

    All ranks take the slices in the same order, so that the exchanges cannot wait for each
    other in a circle.

    Args:
        lane: Whose channel is used.
        inside: That lane's.
        piece: Its slices, one for each rank of the largest node.
        exchange: Replaces a slice, in place, by what all nodes are to have, with the same bits.
        operation, x: As for `allreduce`.

    Returns:
        What `exchange` has returned for each of this rank's slices.

    Collective: yes. Blocking: no (a schedule).
    """
    node, returned = operation.node, []
    yield from inside.collect(piece)
    for j in range(node.rank, len(piece), node.size):
        returned.append((yield from exchange(_ring(operation, lane, j), x[piece[j]], j)))
    yield from inside.spread(piece)
    return returned


def pieces_of(n: int, itemsize: int, nodes: Sequence[Sequence[int]],
              tuning: Tuning) -> list[Piece]:
    """Cut n elements into pieces, and those into slices."""
    slices, count = max(map(len, nodes)), _count(n, itemsize, nodes, tuning)
    bounds = bounds_of(n, count * slices)
    flat = [slice(start, stop) for start, stop in zip(bounds, bounds[1:])]
    return [flat[i * slices:(i + 1) * slices] for i in range(count)]


def _chunks_of(part: slice, parts: int) -> list[slice]:
    """Cut a slice as `chunks_of` cuts a vector."""
    n = part.stop - part.start
    return [slice(part.start + i * n // parts, part.start + (i + 1) * n // parts)
            for i in range(parts)]


def pieces_of_slices(bounds: Sequence[int], itemsize: int, nodes: Sequence[Sequence[int]],
                     tuning: Tuning) -> list[Sequence[Piece]]:
    """Cut each rank's slice into as many pieces.

    Returns:
        Per piece, and per node, a piece of the slice of each of its ranks, and empty ones on
        nodes that are not the largest.
    """
    largest, count = max(map(len, nodes)), _count_of_slices(bounds, itemsize, nodes, tuning)
    parts = [[slice(start + i * (stop - start) // count, start + (i + 1) * (stop - start) // count)
              for start, stop in zip(bounds, bounds[1:])] for i in range(count)]
    return [[[part[rank] for rank in ranks] + [slice(0, 0)] * (largest - len(ranks))
             for ranks in nodes] for part in parts]


def _count(n: int, itemsize: int, nodes: Sequence[Sequence[int]], tuning: Tuning) -> int:
    """Return in how many pieces n elements travel."""
    # The ring cuts a slice once more, into as many chunks as there are nodes.
    slice_bytes = max(tuning.slice_bytes, len(nodes) * tuning.chunk_bytes)
    return max(1, -(-n * itemsize // (max(map(len, nodes)) * slice_bytes)))


def _count_of_slices(bounds: Sequence[int], itemsize: int, nodes: Sequence[Sequence[int]],
                     tuning: Tuning) -> int:
    """Return in how many pieces each rank's slice travels: as if all were as the longest."""
    slices = len(nodes) * max(map(len, nodes))
    return _count(_longest(bounds) * slices, itemsize, nodes, tuning)


def _longest(bounds: Sequence[int]) -> int:
    return max(stop - start for start, stop in zip(bounds, bounds[1:]))


def inbox_size(n: int, itemsize: int, nodes: Sequence[Sequence[int]], levels: Levels,
               tuning: Tuning) -> int:
    """Return how many elements of scratch memory `allreduce` of n needs."""
    slices = max(map(len, nodes)) * _count(n, itemsize, nodes, tuning)
    return _inbox_size((n // slices, -(-n // slices)), itemsize, len(nodes), levels, tuning)


def inbox_size_of_slices(bounds: Sequence[int], itemsize: int, nodes: Sequence[Sequence[int]],
                         levels: Levels, tuning: Tuning) -> int:
    """Return how many elements of scratch memory `reduce_scatter` needs."""
    count = _count_of_slices(bounds, itemsize, nodes, tuning)
    # Pieces of the slices of all lengths, not only of the longest: see `_inbox_size`.
    sizes = {stop - start for start, stop in zip(bounds, bounds[1:])}
    lengths = {len(nodes) * piece for n in sizes for piece in (n // count, -(-n // count))}
    return _inbox_size(lengths, itemsize, len(nodes), levels, tuning)


def _inbox_size(lengths: Iterable[int], itemsize: int, p: int, levels: Levels,
                tuning: Tuning) -> int:
    """Return how much a few exchanges at once need, each of p ranks and one of some lengths."""
    # A longer slice, cut into more pieces, may need less than a shorter one.
    return tuning.in_flight * max(
        direct.inbox_size(n, p, itemsize, tuning.direct_bytes) if levels.direct else
        ring.inbox_size(n, p, itemsize, tuning.ring_bytes) for n in lengths)


def by_slots(node: Node, x: Array, combine: Combine, in_flight: int) -> Sequence[Inside]:
    """Return how lanes combine private vectors: by way of the node's staging slots.

    Args:
        x: This rank's vector.
        combine: The op within the node.
        in_flight: How many lanes there are.
    """
    slots = node.slots(x.dtype)
    size = slots[0].size // (2 * in_flight)
    halves = [[slot[start:start + size] for slot in slots]
              for start in range(0, 2 * in_flight * size, size)]
    return [_BySlots(node.lane(1 + index), x, combine, halves[2 * index:2 * index + 2])
            for index in range(in_flight)]


class InOneArray:
    """An array that lies once in the node's memory: what one rank writes, all have."""

    meets = False

    def collect(self, piece: Piece) -> Schedule[None]:
        """Move nothing."""
        return
        yield ()

    spread = collect

    def local(self, chunks: Sequence[slice]) -> None:
        """Return None: each part is where all ranks of the node have it."""


class _InWindows:
    """A slice is touched by none but the rank that combines it, in any vector: no barriers."""

    meets = False

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
            outs = [x[part] for x in self._vectors]
            self._combine.copy(outs.pop(self._rank), *outs)
        return
        yield ()

    def local(self, chunks: Sequence[slice]) -> Local:
        return Local(self._vectors, self._rank, chunks, self._combine)


class _BySlots:
    """Sections of slices go by the halves of the slots in turn.

    At a barrier, what lies in one half is complete, and the other is not read any more.
    """

    meets = True

    def __init__(self, node: Node, x: Array, combine: Combine,
                 halves: Sequence[Sequence[Array]]) -> None:
        self._node, self._x, self._combine = node, x, combine
        self._halves = list(halves)

    def collect(self, piece: Piece) -> Schedule[None]:
        """Combine what the node has of this rank's slices: each lays out those of the others."""
        node, r, m = self._node, self._node.rank, self._node.size
        for parts, position in self._sections(piece, len(piece) - len(piece) // m):
            slots = self._turn()
            for j, part in enumerate(parts):
                if j % m != r:
                    # Before j come so many slices that are not r's.
                    copy_to(position(slots[r], j + (r - j) // m, part), part)
            yield (node.barrier(),)
            for j in range(r, len(parts), m):
                self._combine.combine([
                    parts[j] if rank == r else position(slot, j + (rank - j) // m, parts[j])
                    for rank, slot in enumerate(slots)], parts[j])

    def spread(self, piece: Piece) -> Schedule[None]:
        """Copy this rank's slices to the others: each lays out its own."""
        node, r, m = self._node, self._node.rank, self._node.size
        for parts, position in self._sections(piece, -(-len(piece) // m)):
            slots = self._turn()
            for j in range(r, len(parts), m):
                copy_to(position(slots[r], j // m, parts[j]), parts[j])
            yield (node.barrier(),)
            for j, part in enumerate(parts):
                if j % m != r:
                    copy_to(part, position(slots[j % m], j // m, part))

    def local(self, chunks: Sequence[slice]) -> None:
        return None

    def _turn(self) -> Sequence[Array]:
        self._halves.reverse()
        return self._halves[0]

    def _sections(self, piece: Piece, positions: int) -> Iterator[tuple[list[Array], Position]]:
        """Cut the slices of a piece into sections that each fit one position in a slot.

        Args:
            positions: How many a half of a slot must have.

        Returns:
            A section of each slice, and a function that returns where a section lies.
        """
        width = self._halves[0][0].size // positions
        slices = [self._x[part] for part in piece]
        for start in range(0, max(map(len, slices)), width):
            yield ([part[start:start + width] for part in slices],
                   lambda slot, k, part: slot[k * width:k * width + part.size])
