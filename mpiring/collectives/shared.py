"""Combines arrays through memory that the ranks of a node share.

Rank r combines slice r out of all ranks' memory, block by block while it is in the
cache, and stores each finished block into all ranks' memory: 2n bytes per rank, which
is the least possible. The slices are combined in rank order, so that the result does
not depend on who owns them.
"""

from collections.abc import Sequence

import numpy as np

from ..gpu.vectors import copy_to
from ..memory.arrays import Array, chunks_of, slice_of
from ..memory.reduction import Combine
from ..transport.base import Node, Schedule

# Where all ranks' vectors together are not longer, everybody combines everything: one
# barrier instead of two. Measured on 2 and 4 ranks: it wins up to 16 KiB each for vectors
# in shared memory, which it copies, and up to 64 KiB each for others.
EAGER_BYTES = 64 << 10
EAGER_PRIVATE_BYTES = 256 << 10
# So that the pieces of two ranks stay in a core's cache. Measured.
STAGED_BYTES = 128 << 10


def is_short(nbytes: int, dtype: "np.dtype[np.generic]", ranks: int, limit: int) -> bool:
    """Return whether every rank may combine all vectors.

    Args:
        nbytes, dtype: Of each vector.
        ranks: How many vectors there are; few count as four.
        limit: On the bytes of all.
    """
    # In the padding of an extended double every rank would leave its own junk.
    return nbytes * max(ranks, 4) <= limit and dtype.char not in "gG"


def eager(node: Node, x: Array, combine: Combine, root: int | None = None) -> Schedule[None]:
    """Combine a short vector over the ranks of a node, in place: each rank reads all of them.

    Args:
        x: Shape (n,), contiguous, not longer than a slot. Overwritten by the result.
        combine: The op.
        root: The only rank that shall have the result; by default, all.

    Collective: yes. Blocking: no (a schedule).
    """
    if node.met:
        # What an earlier part of this operation has laid on the slots may be read yet.
        yield (node.barrier(),)
    copies = laid_out(node, x)
    yield (node.barrier(),)
    if root is None or root == node.rank:
        combine.combine(copies, x)


def laid_out(node: Node, x: Array) -> Sequence[Array]:
    """Copy a short vector to this rank's slot, and return where all ranks' copies are."""
    copies = node.slots(x.dtype, x.size)
    copy_to(copies[node.rank], x)
    return copies


def in_place(node: Node, slices: Sequence[Array], combine: Combine) -> Schedule[None]:
    """Combine vectors in shared memory over the ranks of a node, in place.

    To be called when all ranks have arrived and said where their vectors are.

    Args:
        slices: Per rank of the node, slice `node.rank` of its vector, see `slice_of`.
        combine: The op.

    Collective: yes. Blocking: no (a schedule).
    """
    combine.everywhere(slices, node.rank)
    yield (node.barrier(),)


def staged(node: Node, x: Array, combine: Combine) -> Schedule[None]:
    """Combine private vectors over the ranks of a node, in place, piece by piece.

    Pieces go by two slots in turn: at one barrier a piece is finished, and the next
    one lies ready. To be called when all ranks have arrived.

    Args:
        x: Shape (n,), contiguous, in any memory. Overwritten by the result.
        combine: The op.

    Collective: yes. Blocking: no (a schedule).
    """
    slots = [chunks_of(slot, 2) for slot in node.slots(x.dtype)]
    step = min(slots[0][0].size, STAGED_BYTES // x.itemsize)
    pieces = [x[start:start + step] for start in range(0, x.size, step)]
    for j in range(len(pieces) + 1):
        if j < len(pieces):
            slots[node.rank][j % 2][:pieces[j].size] = pieces[j]
        if j > 0:
            last = pieces[j - 1]
            slices = [slice_of(halves[(j - 1) % 2][:last.size], node.rank, node.size)
                      for halves in slots]
            combine.everywhere(slices, node.rank)
        yield (node.barrier(),)
        if j > 0:
            last[...] = slots[node.rank][(j - 1) % 2][:last.size]
