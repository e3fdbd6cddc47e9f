"""What a rank lays into its staging slot, and takes out of all slots, in a short collective."""

from collections.abc import Sequence
from typing import NamedTuple

NOTHING = slice(0, 0)


class SlotPlan(NamedTuple):
    """One rank's part in a collective in which each rank of a node lays down once, and reads once.

    What is laid down lies in the slot where it lies in the vector.

    Attributes:
        writes: What this rank lays down of its vector.
        reduces: What it reduces of all ranks' vectors; None where nothing is combined.
        reads: Else, per rank of the node, what it takes of that one's vector.
    """

    writes: slice
    reduces: slice | None
    reads: Sequence[slice] = ()


# Nothing moves.
BARRIER = SlotPlan(NOTHING, None)


def allreduce(n: int) -> SlotPlan:
    """Return the moves by which a rank combines vectors of n elements."""
    return SlotPlan(slice(0, n), slice(0, n))


def reduce_scatter(bounds: Sequence[int], rank: int) -> SlotPlan:
    """Return the moves by which a rank combines its slice of all vectors.

    Args:
        bounds: Rank r's slice is `bounds[r]` to `bounds[r + 1]`.
        rank: This rank, among those of the node.
    """
    return SlotPlan(slice(bounds[0], bounds[-1]), slice(bounds[rank], bounds[rank + 1]))


def allgather(bounds: Sequence[int], rank: int) -> SlotPlan:
    """Return the moves by which a rank takes each other one's slice.

    Args: as for `reduce_scatter`.
    """
    slices = [slice(*pair) for pair in zip(bounds, bounds[1:])]
    rank_slice, slices[rank] = slices[rank], NOTHING
    return SlotPlan(rank_slice, None, slices)


def broadcast(n: int, root: int, rank: int, ranks: int) -> SlotPlan:
    """Return the moves by which a rank of a node takes the vector of another one.

    Args:
        n: Elements of the vector.
        root, rank: Whose it is, and this rank, among those of the node.
        ranks: How many these are.
    """
    all_elements = slice(0, n)
    return SlotPlan(all_elements if rank == root else NOTHING, None, [
        all_elements if r == root != rank else NOTHING for r in range(ranks)])
