"""MPI's own nonblocking allreduce as a schedule: the reference, and best for small arrays.

MPI matches collectives by their order on a communicator, but schedules start at times that the
network determines. Native calls are therefore posted strictly in turn.
"""

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import DTypeLike

from ..memory.arrays import Array, dtype_name, pieces_of
from ..memory.reduction import Reduction
from ..transport.base import Request, Schedule

# Length of the longest piece given to one MPI call: Open MPI refuses counts beyond a C int.
_PIECE_BYTES = 1 << 30

# MPI has no 16-bit floating types. Its MAX and MIN drop NaN (measured with MPICH and Open MPI),
# but mpiring's propagate it.
_NAN_SAFE_OPS = ("sum", "mean", "prod")
_NO_MPI_TYPE = ("float16", "bfloat16", "longdouble", "clongdouble")


def supports(dtype: DTypeLike, op: str) -> bool:
    """Return whether MPI's own allreduce gives the right result for a dtype and an op."""
    name = dtype_name(dtype)
    return name not in _NO_MPI_TYPE and (op in _NAN_SAFE_OPS or not name.startswith("float"))


class Turns:
    """The order in which a communicator's operations may call MPI's own collectives."""

    def __init__(self) -> None:
        self._queue: deque[int] = deque()
        self._newest = -1

    def join(self, sequence: int) -> "Turn":
        """Queue behind all earlier operations.

        Raises:
            RuntimeError: A later operation is already in the queue. Request native calls when the
                operation is created, not from inside a running schedule.
        """
        if sequence < self._newest:
            raise RuntimeError(
                f"operation #{sequence} wants a native collective after #{self._newest} did; "
                f"use algorithm='ring' inside a schedule")
        self._newest = sequence
        self._queue.append(sequence)
        return Turn(self._queue, sequence)

    @property
    def idle(self) -> bool:
        """Whether no operation is in the queue."""
        return not self._queue

    def forget(self, sequence: int) -> None:
        """Remove the newest operation, which did not start, from the queue."""
        while self._queue and self._queue[-1] == sequence:
            self._queue.pop()


class Turn:
    """A request that is complete once this operation is the oldest in the queue."""

    def __init__(self, queue: deque[int], sequence: int) -> None:
        self._queue, self._sequence = queue, sequence

    def test(self) -> bool:
        """Return whether it is this operation's turn."""
        return not self._queue or self._queue[0] >= self._sequence

    def leave(self) -> None:
        """Let the next operation proceed."""
        self._queue.popleft()


def allreduce(
    iallreduce: Callable[[Array, str], Request], turn: Turn, x: Array, reduction: Reduction,
) -> Schedule[None]:
    """Combine `x`, of a dtype that `supports` accepts, in place, by MPI_Iallreduce."""
    yield (turn,)
    op = "sum" if reduction.op == "mean" else reduction.op
    # mpi4py has no MPI type for unaligned elements, and MPI could not add them.
    aligned = x if x.flags.aligned else x.copy()
    reduction.prepare(aligned)
    for piece in pieces_of(aligned, _PIECE_BYTES):
        yield (iallreduce(piece, op),)
    turn.leave()
    reduction.finish(aligned)
    if aligned is not x:
        np.copyto(x, aligned)
