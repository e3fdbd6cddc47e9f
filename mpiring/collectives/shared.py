"""Combines and copies vectors through memory that the ranks of a node share.

Rank r combines slice r of all ranks' vectors, one block at a time so that the block stays in the
cache. It writes each finished block to the memory of all ranks. This moves 2n bytes per rank, which
is the minimum. Slices are combined in rank order, so the result does not depend on the combining
rank. In node memory, short vectors and private vectors use a NodeCall, compiled if possible. For
vectors on GPUs, they use the loops of `slots`.
"""

from collections.abc import Sequence

import numpy as np

from ..gpu.vectors import copy_to
from ..memory.arrays import Array, chunks_of, cut
from ..memory.reduction import Combine
from ..transport.base import Node, Schedule
from ..transport.layout import IN_SLOT
from ..transport.node_call import SlotPlan, piece_part, rows_call, slot_call, slot_plan
from ..transport.node_memory import SharedNode
from . import chain, exchange, ring, slots
from .operation import Operation, Tuning


def is_short(nbytes: int, dtype: "np.dtype[np.generic]", ranks: int, limit: int) -> bool:
    """Return whether vectors are short enough for every rank to combine all of them.

    The limit is on the total number of bytes. Fewer than four ranks count as four.
    """
    # Each rank would leave other undefined bytes in the padding of an extended double.
    return nbytes * max(ranks, 4) <= limit and dtype.char not in "gG"


def allreduce(operation: Operation, x: Array, op: str, combine: Combine) -> Schedule[None]:
    """Combine `x` over the ranks of a node, in place: in windows, or through staging slots."""
    positions = yield from operation.node.share(*operation.windows.position_of(x))
    yield from located(operation, positions, x, op, combine)


def located(operation: Operation, positions: Sequence[tuple[int, ...]], x: Array, op: str,
            combine: Combine) -> Schedule[None]:
    """Continue `allreduce` when all ranks have shared the positions of their vectors.

    A position is a window and an offset, or NOWHERE or IN_SLOT.
    """
    node = operation.node
    slices = operation.windows.slices(node, positions, x)
    if IN_SLOT in positions:
        yield from eager(operation, x, op, combine)
    elif slices is not None:
        combine.combine(slices, *slices)
        yield (node.barrier(),)
    else:
        yield from staged(node, x, combine, operation.tuning.staged_bytes)


def eager(operation: Operation, x: Array, op: str, combine: Combine,
          root: int | None = None) -> Schedule[None]:
    """Combine a short vector over the ranks of a node, in place: each rank reads all of them.

    It is at most as long as a staging slot. If a root is given, only this rank needs the result.
    """
    node = operation.node
    plan = slot_plan("allreduce", x.size, node.rank, node.size)
    if root is not None and root != node.rank:
        plan = plan._replace(reduces=None)
    return by_plan(node, x, plan, combine)


def eager_reduce_scatter(operation: Operation, x: Array, bounds: Sequence[int], op: str,
                         combine: Combine) -> Schedule[None]:
    """Like `reduce_scatter`, for a short vector: each rank reads its slice of all vectors."""
    node = operation.node
    plan = slot_plan("reduce_scatter", x.size, node.rank, node.size, bounds=bounds)
    return by_plan(node, x, plan, combine)


def eager_allgather(operation: Operation, x: Array, bounds: Sequence[int]) -> Schedule[None]:
    """Like `allgather`, for a short vector: each rank writes its slice to its staging slot."""
    node = operation.node
    return by_plan(node, x, slot_plan("allgather", x.size, node.rank, node.size, bounds=bounds))


def eager_broadcast(operation: Operation, x: Array, root: int) -> Schedule[None]:
    """Copy a short vector of the node's rank `root` to all ranks of the node."""
    node = operation.node
    return by_plan(node, x, slot_plan("broadcast", x.size, node.rank, node.size, root))


def by_plan(node: Node, x: Array, plan: SlotPlan,
            combine: Combine | None = None) -> Schedule[None]:
    """Write a part of a short vector to a slot, synchronize, and combine or read all slots.

    One barrier is enough, because no rank writes to its slot again until all ranks have left the
    operation. The protocol is the same as for a fast call; see transport.layout. The vector is at
    most as long as a staging slot.
    """
    if node.has_arrived:
        # Ranks may still be reading the slots for an earlier schedule of this operation.
        yield (node.barrier(),)
    if isinstance(node, SharedNode):
        yield from node.part(slot_call(node.memory, x.dtype, x.size, plan, combine), x)
    else:
        yield from slots.by_plan(node, x, plan, combine)


def staged_copies(node: Node, x: Array) -> Sequence[Array]:
    """Copy a short vector to this rank's staging slot; return the copies of all ranks."""
    copies = node.slots(x.dtype, x.size)
    copy_to(copies[node.rank], x)
    return copies


def staged(node: Node, x: Array, combine: Combine,
           piece_bytes: int = Tuning.staged_bytes) -> Schedule[None]:
    """Combine private vectors over the ranks of a node, in place, piece by piece.

    For each piece, a rank writes the other ranks' slices to its slot, combines its own slice, and
    reads the results of the others; see `protocol` and `slots`. Call it when all ranks have
    arrived.
    """
    if isinstance(node, SharedNode):
        return node.part(piece_part(node.memory, x, piece_bytes, combine), x)
    if node.is_queued:
        return slots.combined_in_slots(node, x, combine)
    return slots.by_pieces(node, chunks_of(x, node.size), combine, piece_bytes, gathers=True)


def reduce_scatter(operation: Operation, x: Array, bounds: Sequence[int], op: str,
                   combine: Combine) -> Schedule[None]:
    """Combine slice r of `x` over the ranks of a node on rank r: in windows, or staged.

    This rank's slice is overwritten by the result; the other slices are only read.
    """
    node = operation.node
    vectors = yield from _vectors(operation, x)
    if vectors is None:
        yield from _rows(node, cut(x, bounds), combine, operation.tuning.rows_bytes)
        return
    rank_slice = slice(bounds[node.rank], bounds[node.rank + 1])
    sources = [vector[rank_slice] for vector in vectors]
    combine.combine(sources, sources[node.rank])
    # Other ranks may still be reading this rank's contribution.
    yield (node.barrier(),)


def reduce_rows(node: Node, chunks: Sequence[Array], combine: Combine,
                piece_bytes: int) -> Schedule[None]:
    """Combine `chunks[r]` of all ranks of a node on rank r, piece by piece, in rank order.

    The chunks may be in any memory. This rank's vector is overwritten by the result; the others are
    only read. A rank writes `piece_bytes` to its slot at a time.
    """
    if node.has_arrived:
        # Ranks may still be reading the slots for an earlier schedule of this operation.
        yield (node.barrier(),)
    yield from _rows(node, chunks, combine, piece_bytes)


def _rows(node: Node, chunks: Sequence[Array], combine: Combine,
          piece_bytes: int) -> Schedule[None]:
    """Run `reduce_rows` when no rank reads the slots any more."""
    if isinstance(node, SharedNode):
        return node.part(*rows_call(node.memory, chunks, piece_bytes, combine))
    return slots.by_pieces(node, chunks, combine, piece_bytes)


def allgather(operation: Operation, x: Array, bounds: Sequence[int]) -> Schedule[None]:
    """Copy slice r of rank r's `x` to all ranks of a node: from windows, or by messages."""
    node = operation.node
    vectors = yield from _vectors(operation, x)
    if vectors is None:
        yield from allgather_chunks(operation, cut(x, bounds))
        return
    for rank, vector in enumerate(vectors):
        if rank != node.rank:
            rank_slice = slice(bounds[rank], bounds[rank + 1])
            copy_to(x[rank_slice], vector[rank_slice])
    yield (node.barrier(),)


def allgather_chunks(operation: Operation, chunks: Sequence[Array]) -> Schedule[None]:
    """Copy `chunks[r]`, in any memory, of rank r to all ranks of a node, by messages.

    MPI usually reads the memory of the sending process, and copies once. For NumPy arrays of 16 and
    64 MiB, copies through a staging slot took 1.5 to 2.5 times as long (measured on 2 and 4 ranks).
    For 2 and 4 MiB on 2 ranks, NumPy's copies in pieces of 256 KiB took as long as messages.
    """
    if operation.node.is_queued:
        return slots.spread(operation.node, chunks)
    if operation.gpu:
        # Pieces can be copied to the host while others are on their way.
        return ring.allgather(operation.net, chunks, operation.tuning.ring_bytes)
    sends = dict.fromkeys(range(operation.size), chunks[operation.rank])
    return exchange.exchange(operation.net, sends, dict(enumerate(chunks)))


def broadcast(operation: Operation, x: Array, root: int) -> Schedule[None]:
    """Copy `x` of rank `root` of the node to all its ranks: from a window, or by messages."""
    vectors = yield from _vectors(operation, x)
    if vectors is not None:
        if operation.rank != root:
            copy_to(x, vectors[root])
        yield (operation.node.barrier(),)
    elif operation.node.is_queued:
        yield from slots.spread(operation.node, [
            x if rank == root else x[:0] for rank in range(operation.size)])
    elif operation.gpu:
        yield from chain.broadcast(operation.net, x, root, operation.tuning.broadcast_bytes)
    else:
        sends = dict.fromkeys(range(operation.size), x) if operation.rank == root else {}
        yield from exchange.exchange(operation.net, sends, {root: x})


def _vectors(operation: Operation, x: Array) -> Schedule[Sequence[Array] | None]:
    """Synchronize the ranks of the node; return their vectors if all are in one window."""
    windows = operation.windows
    positions = yield from operation.node.share(*windows.position_of(x))
    return windows.vectors(positions, x)
