"""Combines the vectors of a node through staging slots, in plain loops, for any kind of node.

Copies and reductions may be queued: a rank arrives at a barrier when its queued work is done.
"""

from collections.abc import Sequence

from ..gpu.vectors import copy_to
from ..memory.arrays import Array, slice_of
from ..memory.reduction import Combine
from ..transport.base import Node, Request, Schedule
from ..transport.node_call import SlotPlan


def by_plan(node: Node, x: Array, plan: SlotPlan, combine: Combine | None) -> Schedule[None]:
    """Write a part of a short vector to a slot, synchronize, and combine or read all slots."""
    slots = node.slots(x.dtype, x.size)
    copy_to(slots[node.rank][plan.writes], x[plan.writes])
    yield (node.barrier(),)
    if combine is not None and plan.reduces is not None:
        combine.combine([slot[plan.reduces] for slot in slots], x[plan.reduces])
    for slot, part in zip(slots, plan.reads):
        copy_to(x[part], slot[part])


def by_pieces(node: Node, chunks: Sequence[Array], combine: Combine, piece_bytes: int, *,
              gathers: bool = False) -> Schedule[None]:
    """Combine `chunks[r]` of all ranks on rank r; if `gathers`, copy the results to all ranks.

    In phase j, a rank writes piece j of the other ranks' chunks to its slot, and combines piece
    j - 2 of chunk r. If `gathers`, it also writes this result to its slot, and reads piece j - 4 of
    the other chunks. The phase begins after the barrier of phase j - 2. So its work is already
    queued while the ranks synchronize for phase j - 1. Pieces use the quarters of a slot in turn.

    Args:
        chunks: Vectors of one dtype, one per rank. Their lengths are the same on all ranks. Without
            `gathers`, the other ranks' chunks are only read.
        piece_bytes: Number of bytes that a rank writes in a phase, at most a quarter of a slot.
    """
    p, r, slots = node.size, node.rank, node.slots(chunks[0].dtype)
    quarter = slots[0].size // 4
    width = min(quarter, piece_bytes // chunks[0].itemsize) // p
    count = max(1, -(-max(map(len, chunks)) // width))
    others = [rank for rank in range(p) if rank != r]

    def piece(j: int, owner: int) -> Array:
        return chunks[owner][j * width:(j + 1) * width]

    def staged(rank: int, j: int, owner: int) -> Array:
        """Return the place of a piece in a rank's slot."""
        start = j % 4 * quarter + owner * width
        return slots[rank][start:start + piece(j, owner).size]

    waiting: tuple[Request, ...] = ()
    for j in range(count + (4 if gathers else 2)):
        combines = 2 <= j < count + 2
        if j < count:
            for owner in others:
                copy_to(staged(r, j, owner), piece(j, owner))
        if combines:
            out = piece(j - 2, r)
            combine.combine(
                [out if rank == r else staged(rank, j - 2, r) for rank in range(p)], out)
            if gathers:
                copy_to(staged(r, j - 2, r), out)
        if gathers and j >= 4:
            for owner in others:
                copy_to(piece(j - 4, owner), staged(owner, j - 4, owner))
        yield waiting
        # The phases without a barrier are followed by no writes to slots that others still read.
        waiting = (node.barrier(),) if j < count or combines and gathers else ()


def combined_in_slots(node: Node, x: Array, combine: Combine) -> Schedule[None]:
    """Combine `x` over the ranks of a node in their slots, for slots in fast memory.

    Each rank copies a piece to its slot, combines a slice of it in the slots of all ranks, and
    copies the result back. This needs few steps; see `spread` for the halves of the slots.
    """
    slots = node.slots(x.dtype)
    width = slots[0].size // 2
    for start in range(0, x.size, width):
        piece = x[start:start + width]
        half = start // width % 2 * width
        copies = [slot[half:half + piece.size] for slot in slots]
        copy_to(copies[node.rank], piece)
        yield (node.barrier(),)
        slices = [slice_of(copy, node.rank, node.size) for copy in copies]
        combine.combine(slices, *slices)
        yield (node.barrier(),)
        copy_to(piece, copies[node.rank])


def spread(node: Node, chunks: Sequence[Array]) -> Schedule[None]:
    """Copy `chunks[r]` of rank r to all ranks, piece by piece, in the halves of slots in turn.

    A rank writes to a half again after the barrier of the other half, which follows all reads.
    """
    if node.has_arrived:
        # Ranks may still be reading the slots for an earlier schedule of this operation.
        yield (node.barrier(),)
    slots = node.slots(chunks[0].dtype)
    width = slots[0].size // 2
    for start in range(0, max(map(len, chunks)), width):
        pieces = [chunk[start:start + width] for chunk in chunks]
        half = start // width % 2 * width
        copies = [slot[half:half + piece.size] for slot, piece in zip(slots, pieces)]
        copy_to(copies[node.rank], pieces[node.rank])
        yield (node.barrier(),)
        for rank, piece in enumerate(pieces):
            if rank != node.rank:
                copy_to(piece, copies[rank])
