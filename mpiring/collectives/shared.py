"""Combines and copies vectors through memory that the ranks of a node share.

Rank r combines slice r out of all ranks' memory, block by block while it is in the
cache, and stores each finished block into all ranks' memory: 2n bytes per rank, which
is the least possible. The slices are combined in rank order, so that the result does
not depend on which rank combines them.
"""

from collections.abc import Sequence

import numpy as np

from ..gpu.vectors import copy_to
from ..memory.arrays import Array, cut
from ..memory.reduction import Combine
from ..transport.base import Node, Schedule
from ..transport.node_call import SlotPlan, piece_call, slot_call, slot_plan, window_call
from . import node_copies
from .operation import IN_SLOT, Operation, Tuning


def is_short(nbytes: int, dtype: "np.dtype[np.generic]", ranks: int, limit: int) -> bool:
    """Return whether every rank may combine all vectors.

    Args:
        nbytes, dtype: Of each vector.
        ranks: How many vectors there are; few count as four.
        limit: On the bytes of all.
    """
    # In the padding of an extended double every rank would leave its own junk.
    return nbytes * max(ranks, 4) <= limit and dtype.char not in "gG"


def allreduce(operation: Operation, x: Array, op: str, combine: Combine) -> Schedule[None]:
    """Combine `x` over the ranks of a node, in place: in windows, or by way of staging slots.

    Args:
        operation: Of the ranks of one node.
        x: Shape (n,), contiguous, in host memory. Overwritten by the result.
        op, combine: The op, and what combines by it.

    Collective: yes. Blocking: no (a schedule).
    """
    positions = yield from operation.node.share(*operation.windows.position_of(x))
    yield from located(operation, positions, x, op, combine)


def located(operation: Operation, positions: Sequence[tuple[int, ...]], x: Array, op: str,
            combine: Combine) -> Schedule[None]:
    """Go on with `allreduce` when all ranks have told where their vectors are.

    Args:
        positions: Per rank of the node, the window and the offset there; or NOWHERE or IN_SLOT.
        operation, x, op, combine: As for `allreduce`.

    Collective: yes. Blocking: no (a schedule).
    """
    node = operation.node
    slices = operation.windows.slices(node, positions, x)
    if IN_SLOT in positions:
        yield from eager(operation, x, op, combine)
    elif slices is not None:
        yield from in_place(node, slices, combine)
    else:
        yield from staged(node, x, combine, operation.tuning.staged_bytes)


def eager(operation: Operation, x: Array, op: str, combine: Combine,
          root: int | None = None) -> Schedule[None]:
    """Combine a short vector over the ranks of a node, in place: each rank reads all of them.

    Args:
        x: Shape (n,), contiguous, not longer than a staging slot. Overwritten by the result.
        operation, op, combine: As for `allreduce`.
        root: The only rank that is to have the result; by default, all.

    Collective: yes. Blocking: no (a schedule).
    """
    node = operation.node
    plan = slot_plan("allreduce", x.size, node.rank, node.size)
    if root is not None and root != node.rank:
        plan = plan._replace(reduces=None)
    return moved(node, x, plan, combine)


def eager_reduce_scatter(operation: Operation, x: Array, bounds: Sequence[int], op: str,
                         combine: Combine) -> Schedule[None]:
    """Do as `reduce_scatter` with a short vector: each rank reads its slice of all."""
    node = operation.node
    plan = slot_plan("reduce_scatter", x.size, node.rank, node.size, bounds=bounds)
    return moved(node, x, plan, combine)


def eager_allgather(operation: Operation, x: Array, bounds: Sequence[int]) -> Schedule[None]:
    """Do as `allgather` with a short vector: each rank lays down its slice."""
    node = operation.node
    return moved(node, x, slot_plan("allgather", x.size, node.rank, node.size, bounds=bounds))


def eager_broadcast(operation: Operation, x: Array, root: int) -> Schedule[None]:
    """Copy a short vector of the node's rank `root` to all ranks of the node.

    Args: as for `eager`.
    """
    node = operation.node
    return moved(node, x, slot_plan("broadcast", x.size, node.rank, node.size, root))


def moved(node: Node, x: Array, plan: SlotPlan, combine: Combine | None = None) -> Schedule[None]:
    """Lay a part of a short vector down, meet, and combine or take what all have laid down.

    One barrier: nobody lays down anything else before all have left the operation. This is what a
    fast call does, see transport.layout, to the bit.

    Args:
        x: Shape (n,), contiguous, not longer than a staging slot.
        plan: Which parts.
        combine: The op, where any is combined.

    Collective: yes. Blocking: no (a schedule).
    """
    if node.met:
        # What an earlier schedule of this operation has left in the slots may still be read.
        yield (node.barrier(),)
    yield from node.part(slot_call(node.memory, x.dtype, x.size, plan, combine), x)


def laid_out(node: Node, x: Array) -> Sequence[Array]:
    """Copy a short vector to this rank's staging slot, and return where all ranks' copies are."""
    copies = node.slots(x.dtype, x.size)
    copy_to(copies[node.rank], x)
    return copies


def in_place(node: Node, slices: Sequence[Array], combine: Combine) -> Schedule[None]:
    """Combine vectors in shared memory over the ranks of a node, in place.

    To be called when all ranks have arrived and shared where their vectors are.

    Args:
        slices: Per rank of the node, slice `node.rank` of its vector, see `slice_of`.
        combine: The op.

    Collective: yes. Blocking: no (a schedule).
    """
    return node.part(window_call(node.memory, slices, combine), slices[node.rank])


def staged(node: Node, x: Array, combine: Combine,
           piece_bytes: int = Tuning.staged_bytes) -> Schedule[None]:
    """Combine private vectors over the ranks of a node, in place, piece by piece.

    Of a piece, a rank lays out the others' slices, combines its own one, lays out the result, and
    takes the others'. Pieces go by the halves of the slots in turn: at a barrier a piece is
    combined, and the next lies ready. To be called when all ranks have arrived.

    Args:
        x: Shape (n,), contiguous, in host memory. Overwritten by the result.
        combine: The op.
        piece_bytes: Longest piece; the same on all ranks.

    Collective: yes. Blocking: no (a schedule).
    """
    return node.part(piece_call(node.memory, x, piece_bytes, combine), x)


def reduce_scatter(operation: Operation, x: Array, bounds: Sequence[int], op: str,
                   combine: Combine) -> Schedule[None]:
    """Combine slice r of `x` over the ranks of a node on rank r: out of windows, or staged.

    Args:
        operation: Of the ranks of one node.
        x: Shape (n,), contiguous. This rank's slice is overwritten by the result, the others
            are only read.
        bounds: Rank r's slice is `x[bounds[r]:bounds[r + 1]]`.
        op, combine: The op, and what combines by it.

    Collective: yes. Blocking: no (a schedule).
    """
    node = operation.node
    vectors = yield from _vectors(operation, x)
    if vectors is None:
        yield from node_copies.reduce_scatter(node, cut(x, bounds), combine)
        return
    rank_slice = slice(bounds[node.rank], bounds[node.rank + 1])
    sources = [vector[rank_slice] for vector in vectors]
    combine.combine(sources, sources[node.rank])
    # The others may still read what this rank has contributed.
    yield (node.barrier(),)


def allgather(operation: Operation, x: Array, bounds: Sequence[int]) -> Schedule[None]:
    """Copy slice r of `x` of rank r to all ranks of a node: out of windows, or staged.

    Args:
        operation: Of the ranks of one node.
        x: Shape (n,), contiguous. All but this rank's slice is overwritten.
        bounds: Rank r's slice is `x[bounds[r]:bounds[r + 1]]`.

    Collective: yes. Blocking: no (a schedule).
    """
    node = operation.node
    vectors = yield from _vectors(operation, x)
    if vectors is None:
        yield from node_copies.allgather(node, cut(x, bounds))
        return
    for rank, vector in enumerate(vectors):
        if rank != node.rank:
            rank_slice = slice(bounds[rank], bounds[rank + 1])
            copy_to(x[rank_slice], vector[rank_slice])
    yield (node.barrier(),)


def _vectors(operation: Operation, x: Array) -> Schedule[Sequence[Array] | None]:
    """Meet the ranks of the node; return their vectors if all lie in one window."""
    windows = operation.windows
    positions = yield from operation.node.share(*windows.position_of(x))
    return windows.vectors(positions, x)
