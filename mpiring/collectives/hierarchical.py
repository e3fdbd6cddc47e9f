"""Combines arrays over nodes of several ranks: in each node's memory, and between the nodes.

An array is cut into pieces, and each piece into R slices, one for each rank of the largest node.
On every node the local ranks process the slices in turn: rank l of m processes l, l+m, … A rank
combines its node's contributions to the slice. A ring of one rank per node combines the slice over
nodes, and the result is copied to the node's other ranks. There are R rings, even if the smallest
node has fewer ranks, so that all ranks of large nodes combine. Each of N nodes still sends
2(N-1)/N of the array, which is the least possible.

If the arrays are in memory that the ranks of a node share, a rank combines and copies piece by
piece while messages are sent; see `local`. Otherwise the ranks synchronize before and after the
rings.

A few pieces are in flight at once, so that the network sends one while another is combined. The
pieces are the same on all nodes, independent of the memory that holds the arrays.

If each rank needs only its own slice, ring j processes the slices of the ranks with local number
j. A node with fewer ranks has an empty slice in it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..gpu.vectors import copy_to
from ..memory.arrays import Array, bounds_of, chunks_of, slices
from ..memory.reduction import Combine, widens
from ..transport.base import Channel, Members, Node, Schedule, T, run_together
from . import direct, doubling, ring, shared
from .local import Local
from .operation import Operation, Tuning

# One piece of an array, as a list of slices: the slice of ring 0, of ring 1, …
Piece = Sequence[slice]
# Function by which nodes exchange a slice, given the channel of the ranks that have it (one of
# each node), this node's slice, and the number of its ring.
Exchange = Callable[[Channel, Array, int], Schedule[T]]
# Function that returns a section's position in a staging slot, given the slot, the number of the
# position, and the section.
Position = Callable[[Array, int, Array], Array]


class Levels(NamedTuple):
    """An op on a dtype, split into an op within nodes and one between them.

    Sums and products of 16 bits are rounded twice, once on the node and once at the end. Sums in
    float32 would double the bytes on the wire. Sending each rank's contribution would multiply them
    by the number of ranks per node. The means of nodes and their mean are within the range of the
    contributions, so neither overflows.

    Attributes:
        direct: If true, nodes send contributions directly to the rank that combines them.
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
            # Every node divides by `largest`, whatever its size; the final division is by the rest.
            return cls(combiner(op, dtype, largest), combiner(op, dtype, p / largest), True)
        within = "sum" if op == "mean" else op
        return cls(combiner(within, dtype, p), combiner(op, dtype, p), False)


class IntraNode:
    """Combines slices within a node and copies them to its ranks, at once or piece by piece.

    This base class does nothing: it is for an array that exists once in the node's memory.

    Attributes:
        synchronizes: If true, the ranks of the node synchronize, and process all slices of a piece
            at once.
    """

    synchronizes = False

    def collect(self, piece: Piece) -> Schedule[None]:
        """Combine the node's contributions to this rank's slices, into this rank's vector."""
        return
        yield ()

    def spread(self, piece: Piece) -> Schedule[None]:
        """Copy this rank's slices to the other ranks of the node."""
        return
        yield ()

    def local(self, chunks: Sequence[slice]) -> Local | None:
        """Return a Local that combines and copies `chunks` while messages are sent; or None."""
        return None


def synchronize(operation: Operation, x: Array, within: Combine) -> Schedule[Sequence[IntraNode]]:
    """Synchronize the ranks of the node; return, per lane, how they combine their vectors."""
    node, windows, tuning = operation.node, operation.windows, operation.tuning
    positions = yield from node.share(*windows.position_of(x))
    vectors = [x] if node.size == 1 else windows.vectors(positions, x)
    if vectors is None:
        return _by_slots(node, x, within, tuning.in_flight)
    return [_InWindows(node.rank, vectors, within)] * tuning.in_flight


def allreduce(operation: Operation, x: Array, op: str, combine: Combine) -> Schedule[None]:
    """Combine `x` over the ranks of several nodes, in place; `combine` is for all ranks at once."""
    node, nodes, tuning = operation.node, operation.nodes, operation.tuning
    levels = Levels.of(operation, op, x.dtype)
    inside = yield from synchronize(operation, x, levels.within)
    size = inbox_size(x.size, x.itemsize, nodes, levels, tuning)
    with operation.borrow(size, x.dtype) as inbox:
        inboxes = chunks_of(inbox, len(inside))

        def lane(index: int, piece: Piece) -> Schedule[None]:
            intra = inside[index]
            if intra.synchronizes:
                yield from intra.collect(piece)
            for j in range(node.rank, len(piece), node.size):
                members, part = _ring(operation, index, j), x[piece[j]]
                local = intra.local(_chunks_of(piece[j], members.size))
                if levels.direct:
                    yield from direct.allreduce(members, part, inboxes[index], levels.between,
                                                tuning.direct_bytes, tuning.ring_bytes, local)
                else:
                    yield from ring.allreduce(members, part, inboxes[index], levels.between,
                                              tuning.ring_bytes, local)
            if intra.synchronizes:
                yield from intra.spread(piece)

        yield from _in_lanes(node, pieces_of(x.size, x.itemsize, nodes, tuning),
                             len(inside), lane)


def reduce_scatter(operation: Operation, x: Array, bounds: Sequence[int], op: str,
                   combine: Combine) -> Schedule[None]:
    """Combine slice r of `x` over all ranks on rank r; the other slices are also overwritten.

    Each of N nodes sends the slices of the other nodes' ranks: (N-1)/N of the array if all are
    equal, which is the least possible.
    """
    node, nodes, tuning = operation.node, operation.nodes, operation.tuning
    levels = Levels.of(operation, op, x.dtype)
    inside = yield from synchronize(operation, x, levels.within)
    size = inbox_size_of_slices(bounds, x.itemsize, nodes, levels, tuning)
    with operation.borrow(size, x.dtype) as inbox:
        inboxes = chunks_of(inbox, len(inside))

        def lane(index: int, rows: Sequence[Piece]) -> Schedule[None]:
            intra = inside[index]
            # Synchronizing between rings could deadlock: a rank with several rings may keep
            # others in a ring waiting, which then do not reach the barrier.
            if intra.synchronizes:
                for row in rows:
                    yield from intra.collect(row)
            for j in range(node.rank, len(rows[0]), node.size):
                members, parts = _ring(operation, index, j), [row[j] for row in rows]
                chunks = [x[part] for part in parts]
                local = intra.local(parts)
                if levels.direct:
                    yield from direct.reduce_scatter(members, chunks, inboxes[index],
                                                     levels.between, tuning.direct_bytes, local)
                else:
                    yield from ring.reduce_scatter(members, chunks, inboxes[index],
                                                   levels.between, tuning.ring_bytes, local)

        yield from _in_lanes(
            node, pieces_of_slices(bounds, x.itemsize, nodes, tuning), len(inside), lane)


def allgather(operation: Operation, x: Array, bounds: Sequence[int]) -> Schedule[None]:
    """Copy slice r of `x` of rank r to all ranks: the inverse of `reduce_scatter`."""
    # An arbitrary op, because nothing is combined.
    inside = yield from synchronize(operation, x, operation.combiner("max", np.dtype(bool), 1))
    yield from by_rings(operation, x, bounds, inside)


def by_rings(operation: Operation, x: Array, bounds: Sequence[int],
             inside: Sequence[IntraNode]) -> Schedule[None]:
    """Continue `allgather` when all ranks of the node have arrived; see `synchronize`."""
    node, tuning = operation.node, operation.tuning

    def lane(index: int, rows: Sequence[Piece]) -> Schedule[None]:
        intra = inside[index]
        for j in range(node.rank, len(rows[0]), node.size):
            parts = [row[j] for row in rows]
            yield from ring.allgather(
                _ring(operation, index, j), [x[part] for part in parts], tuning.ring_bytes,
                intra.local(parts))
        if intra.synchronizes:
            for row in rows:
                yield from intra.spread(row)

    return _in_lanes(node, pieces_of_slices(bounds, x.itemsize, operation.nodes, tuning),
                     len(inside), lane)


def _in_lanes(node: Node, pieces: Sequence[T], count: int,
              lane: Callable[[int, T], Schedule[object]]) -> Schedule[None]:
    """Deal pieces out to a few concurrent lanes, each of which processes its pieces in order."""
    def run(index: int) -> Schedule[None]:
        for piece in pieces[index::count]:
            yield from lane(index, piece)

    yield from run_together(map(run, range(count)), count)
    # Every rank's vector is complete only after this barrier. A rank that disagrees with another
    # node never arrives, so no result leaves its node.
    yield (node.barrier(),)


def _ring(operation: Operation, lane: int, j: int) -> Channel:
    """Return a lane's channel between the ranks, one per node, that exchange slice j."""
    return Members(operation.net.lane(lane), [ranks[j % len(ranks)] for ranks in operation.nodes])


def short(operation: Operation, x: Array, op: str, combine: Combine) -> Schedule[None]:
    """Combine a vector, at most as long as a slot, in place, through the first rank of each node.

    Between few nodes this takes one message's time: each first rank combines the vectors of all
    nodes in node order. For more than `tuning.direct_nodes` nodes, see `doubling`. The result is
    bitwise identical on all ranks.
    """
    node, levels = operation.node, Levels.of(operation, op, x.dtype)
    # The barriers must precede the messages: ranks that disagree must not send any.
    if node.has_arrived:
        yield (node.barrier(),)
    copies = shared.staged_copies(node, x)
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
    """Combine a short vector over a channel: each rank sends its vector to all others."""
    with operation.borrow(net.size * x.size, x.dtype) as inbox:
        received = chunks_of(inbox, net.size)
        received[net.rank] = x
        others = [rank for rank in range(net.size) if rank != net.rank]
        yield [*(net.irecv(received[rank], rank) for rank in others),
               *(net.isend(x, rank) for rank in others)]
        combine.combine(received, x)


def by_slices(operation: Operation, lane: int, inside: IntraNode, x: Array, piece: Piece,
              exchange: Exchange[T]) -> Schedule[list[T]]:
    """Combine a piece of `x` within the node, exchange its slices between nodes, and copy them.

    All ranks process the slices in the same order, so that the exchanges cannot deadlock. A piece
    has one slice for each rank of the largest node. The function `exchange` replaces a slice in
    place, bitwise identically on all nodes. Return its results for this rank's slices.
    """
    node, returned = operation.node, []
    yield from inside.collect(piece)
    for j in range(node.rank, len(piece), node.size):
        returned.append((yield from exchange(_ring(operation, lane, j), x[piece[j]], j)))
    yield from inside.spread(piece)
    return returned


def pieces_of(n: int, itemsize: int, nodes: Sequence[Sequence[int]],
              tuning: Tuning) -> list[Piece]:
    """Cut n elements into pieces, and each piece into slices."""
    largest, count = max(map(len, nodes)), _count(n, itemsize, nodes, tuning)
    flat = slices(bounds_of(n, count * largest))
    return [flat[i * largest:(i + 1) * largest] for i in range(count)]


def _chunks_of(part: slice, parts: int) -> list[slice]:
    """Cut a range in the same way as `chunks_of` cuts a vector."""
    bounds = bounds_of(part.stop - part.start, parts)
    return slices([part.start + bound for bound in bounds])


def pieces_of_slices(bounds: Sequence[int], itemsize: int, nodes: Sequence[Sequence[int]],
                     tuning: Tuning) -> list[Sequence[Piece]]:
    """Cut each rank's slice into the same number of pieces.

    Return, for each piece and each node, one piece of the slice of each rank; smaller nodes are
    padded with empty pieces.
    """
    largest, count = max(map(len, nodes)), _count_of_slices(bounds, itemsize, nodes, tuning)
    by_rank = [_chunks_of(part, count) for part in slices(bounds)]
    return [[[parts[rank] for rank in ranks] + [slice(0, 0)] * (largest - len(ranks))
             for ranks in nodes] for parts in zip(*by_rank)]


def _count(n: int, itemsize: int, nodes: Sequence[Sequence[int]], tuning: Tuning) -> int:
    """Return the number of pieces in which n elements are sent."""
    # The ring cuts a slice again, into as many chunks as there are nodes.
    slice_bytes = max(tuning.slice_bytes, len(nodes) * tuning.chunk_bytes)
    return max(1, -(-n * itemsize // (max(map(len, nodes)) * slice_bytes)))


def _count_of_slices(bounds: Sequence[int], itemsize: int, nodes: Sequence[Sequence[int]],
                     tuning: Tuning) -> int:
    """Return the number of pieces of each rank's slice, computed from the longest slice."""
    longest = max(stop - start for start, stop in zip(bounds, bounds[1:]))
    return _count(longest * len(nodes) * max(map(len, nodes)), itemsize, nodes, tuning)


def inbox_size(n: int, itemsize: int, nodes: Sequence[Sequence[int]], levels: Levels,
               tuning: Tuning) -> int:
    """Return the number of scratch elements that `allreduce` of n elements needs."""
    parts = max(map(len, nodes)) * _count(n, itemsize, nodes, tuning)
    return _inbox_size((n // parts, -(-n // parts)), itemsize, len(nodes), levels, tuning)


def inbox_size_of_slices(bounds: Sequence[int], itemsize: int, nodes: Sequence[Sequence[int]],
                         levels: Levels, tuning: Tuning) -> int:
    """Return the number of scratch elements that `reduce_scatter` needs."""
    count = _count_of_slices(bounds, itemsize, nodes, tuning)
    # Slices of all lengths count, not only the longest: see `_inbox_size`.
    sizes = {stop - start for start, stop in zip(bounds, bounds[1:])}
    lengths = {len(nodes) * piece for n in sizes for piece in (n // count, -(-n // count))}
    return _inbox_size(lengths, itemsize, len(nodes), levels, tuning)


def _inbox_size(lengths: Iterable[int], itemsize: int, p: int, levels: Levels,
                tuning: Tuning) -> int:
    """Return the number of scratch elements for a few concurrent exchanges among p ranks."""
    # A longer slice, cut into more pieces, may need less than a shorter one.
    return tuning.in_flight * max(
        direct.inbox_size(n, p, itemsize, tuning.direct_bytes) if levels.direct else
        ring.inbox_size(n, p, itemsize, tuning.ring_bytes) for n in lengths)


def _by_slots(node: Node, x: Array, combine: Combine, in_flight: int) -> Sequence[IntraNode]:
    """Return how lanes combine private vectors through the node's staging slots."""
    slots = node.slots(x.dtype)
    size = slots[0].size // (2 * in_flight)
    halves = [[slot[start:start + size] for slot in slots]
              for start in range(0, 2 * in_flight * size, size)]
    return [_BySlots(node.lane(1 + index), x, combine, halves[2 * index:2 * index + 2])
            for index in range(in_flight)]


class _InWindows(IntraNode):
    """Vectors in windows; each slice is accessed by one rank, so no barrier is needed."""

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


class _BySlots(IntraNode):
    """Private vectors, whose sections pass through two halves of the staging slots in turn.

    At a barrier, the data in one half is complete, and no rank reads the other half any more.
    """

    synchronizes = True

    def __init__(self, node: Node, x: Array, combine: Combine,
                 halves: Sequence[Sequence[Array]]) -> None:
        self._node, self._x, self._combine = node, x, combine
        self._halves = list(halves)

    def collect(self, piece: Piece) -> Schedule[None]:
        """Combine this rank's slices over the node; each rank stages the slices of the others."""
        node, r, m = self._node, self._node.rank, self._node.size
        for parts, position in self._sections(piece, len(piece) - len(piece) // m):
            slots = self._turn()
            for j, part in enumerate(parts):
                if j % m != r:
                    # `(r - j) // m` subtracts rank r's own slices, which it does not stage.
                    copy_to(position(slots[r], j + (r - j) // m, part), part)
            yield (node.barrier(),)
            for j in range(r, len(parts), m):
                self._combine.combine([
                    parts[j] if rank == r else position(slot, j + (rank - j) // m, parts[j])
                    for rank, slot in enumerate(slots)], parts[j])

    def spread(self, piece: Piece) -> Schedule[None]:
        """Copy this rank's slices to the other ranks; each rank stages its own slices."""
        node, r, m = self._node, self._node.rank, self._node.size
        for parts, position in self._sections(piece, -(-len(piece) // m)):
            slots = self._turn()
            for j in range(r, len(parts), m):
                copy_to(position(slots[r], j // m, parts[j]), parts[j])
            yield (node.barrier(),)
            for j, part in enumerate(parts):
                if j % m != r:
                    copy_to(part, position(slots[j % m], j // m, part))

    def _turn(self) -> Sequence[Array]:
        self._halves.reverse()
        return self._halves[0]

    def _sections(self, piece: Piece, positions: int) -> Iterator[tuple[list[Array], Position]]:
        """Cut the slices of a piece into sections that each fit one position in half a slot.

        Yield a section of each slice, and a function that returns the position of a section.
        """
        width = self._halves[0][0].size // positions
        slices = [self._x[part] for part in piece]
        for start in range(0, max(map(len, slices)), width):
            yield ([part[start:start + width] for part in slices],
                   lambda slot, k, part: slot[k * width:k * width + part.size])
