"""Combines and copies vectors of GPUs by NCCL, which queues the work on all ranks.

NCCL would round 16-bit sums at each step, and drop NaN in maxima. For such ops, each rank receives
the contributions to its slice by NCCL, and combines them as in `direct`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ..gpu import nccl
from ..gpu.vectors import copy_to
from ..memory.arrays import Array, bounds_of, cut
from ..memory.reduction import Combine
from ..transport.base import Schedule
from .operation import Operation


def allreduce(operation: Operation, x: Any, op: str, combine: Combine) -> Schedule[None]:
    """Combine the vector `x` over all ranks, in place."""
    if nccl.reduces(op, x.dtype):
        operation.nccl.allreduce(x, op)
        operation.count_sent(2 * operation.least_sent(x.nbytes))
        combine.finish(x)
        yield ()
    else:
        bounds = bounds_of(x.size, operation.size)
        yield from combine_chunks(operation, cut(x, bounds), combine)
        yield from allgather(operation, x, bounds)


def reduce_scatter(operation: Operation, x: Array, bounds: Sequence[int], op: str,
                   combine: Combine) -> Schedule[None]:
    """Combine slice r of the vector `x` of all ranks on rank r, in place."""
    slices: Any = cut(x, bounds)
    if nccl.reduces(op, x.dtype):
        operation.nccl.reduce_scatter(slices, op)
        operation.count_sent(operation.least_sent(x.nbytes))
        combine.finish(slices[operation.rank])
        yield ()
    else:
        yield from combine_chunks(operation, slices, combine)


def allgather(operation: Operation, x: Array, bounds: Sequence[int]) -> Schedule[None]:
    """Copy slice r of the vector `x` of rank r to all ranks."""
    slices: Any = cut(x, bounds)
    operation.nccl.allgather(slices)
    operation.count_sent(operation.least_sent(x.nbytes))
    yield ()


def combine_chunks(operation: Operation, chunks: Sequence[Any],
                   combine: Combine) -> Schedule[None]:
    """Combine `chunks[r]` of all ranks on rank r, in place, in rank order; others are only read."""
    own = chunks[operation.rank]
    with operation.borrow((operation.size - 1) * own.size, own.dtype) as inbox:
        arriving: Any = cut(inbox, range(0, inbox.size + 1, max(own.size, 1)))
        others = [rank for rank in range(operation.size) if rank != operation.rank]
        receives = dict(zip(others, arriving)) if own.size else {}
        _exchange(operation, {rank: chunks[rank] for rank in others}, receives)
        if own.size:
            combine.combine([receives.get(rank, own) for rank in range(operation.size)], own)
    yield ()


def allgather_chunks(operation: Operation, chunks: Sequence[Any]) -> Schedule[None]:
    """Copy vector r of `chunks` of rank r, which may be anywhere, to all ranks."""
    operation.nccl.allgather_vectors(chunks)
    operation.count_sent(operation.least_sent(sum(x.nbytes for x in chunks)))
    yield ()


def broadcast(operation: Operation, x: Any, root: int) -> Schedule[None]:
    """Copy the vector `x` of rank `root` to all ranks."""
    operation.nccl.broadcast(x, root)
    operation.count_sent(operation.least_sent(x.nbytes))
    yield ()


def exchange(operation: Operation, sends: Mapping[int, Any],
             receives: Mapping[int, Any]) -> Schedule[None]:
    """Send `sends[r]` to rank r, and receive `receives[r]` from it; both may have this rank."""
    rank = operation.rank
    _exchange(operation, {other: x for other, x in sends.items() if other != rank},
              {other: x for other, x in receives.items() if other != rank})
    if rank in sends and rank in receives:
        copy_to(receives[rank], sends[rank])
    yield ()


def _exchange(operation: Operation, sends: Mapping[int, Any], receives: Mapping[int, Any]) -> None:
    operation.nccl.exchange(sends, receives)
    operation.count_sent(sum(
        x.nbytes for rank, x in sends.items() if rank not in operation.node.ranks))
