"""Agreement of the surviving ranks after a death, a communicator for them, and new ranks.

It uses ULFM (User-Level Failure Mitigation), an extension of MPI 4 that is part of Open MPI.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

from mpi4py import MPI

from ..errors import MpiringError, ProcessFailedError, TransportError
from .base import Request, T, Task
from .mpi import failure, messages_of

# Seconds that MPI may take to release the buffers of abandoned messages.
_SETTLING_S = 1.0
# Seconds that MPI may take to report the death of a rank.
_REPORT_S = 0.5
_PAUSE_S = 1e-3

# Messages that MPI did not release: their buffers must stay in place forever.
_unsettled: list[Request] = []


class Survivors:
    """The ranks of an MPI communicator, any of which may die; `size` includes dead ones.

    All living ranks must call `agree` and `shrink` in the same order.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm, self.size = comm, comm.size
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)

    def has_lost_rank(self) -> bool:
        """Return whether a rank has died; wait briefly until MPI reports it."""
        deadline = time.monotonic() + _REPORT_S
        while time.monotonic() < deadline:
            try:
                # Unlike MPI's functions for this purpose, Iprobe also handles launcher messages.
                self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
            except MPI.Exception as exc:
                return isinstance(failure("", exc), ProcessFailedError)
            time.sleep(_PAUSE_S)
        return False

    def leave(self, tasks: Sequence[Task[Any]] = ()) -> None:
        """Stop all communication of these ranks, so that each rank learns of a death.

        MPI releases the buffers of `tasks`, schedules that will not be resumed. Not collective.
        """
        self._call("revoke", self.comm.Revoke)
        _settle(tasks)

    def agree(self, answer: bool) -> bool:
        """Return whether all surviving ranks have answered True; the same on all of them.

        It works after deaths of ranks, also during the call. Collective and blocking.
        """
        while True:
            try:
                # Otherwise a death that is not known to all ranks would be an error.
                self.comm.Ack_failed()
                return bool(self.comm.Agree(int(answer)))
            except MPI.Exception as exc:
                error = failure("agreeing with the ranks that are left", exc)
                # All ranks get this error, and all try again.
                if not isinstance(error, ProcessFailedError):
                    raise error from exc

    def shrink(self) -> "Survivors":
        """Return the survivors, in their order, on a new communicator; collective and blocking."""
        return Survivors(cast(MPI.Intracomm, self._call("shrink", self.comm.Shrink)))

    def grow(self, number: int, size: int,
             command: Callable[[Sequence[int]], Sequence[str]]) -> "Survivors":
        """Start new ranks, which must call `join`; return all ranks on a new communicator.

        Args:
            number: Number of this rank on the new communicator, less than `size`.
            command: Function that returns the command of new ranks, given their numbers.

        Raises:
            TransportError: MPI cannot start new ranks, or a rank died. It is raised on all ranks,
                which can continue on this communicator.

        It never returns if a new rank dies before it has started MPI. Collective and blocking.
        """
        new, problem = None, "another rank could not start them"
        try:
            numbers = sorted({*range(size)} - {*self.comm.allgather(number)})
            name, *arguments = command(numbers)
            between = self.comm.Spawn(name, arguments, len(numbers))
            new = cast(MPI.Intracomm, between.Merge().Split(0, number))
        except MPI.Exception as exc:
            problem = f"MPI_Comm_spawn: {exc.Get_error_string()}"
        complete = self.agree(new is not None)
        if new is None or not complete:
            if new is not None:
                # This ends the new ranks that already have this communicator.
                Survivors(new).leave()
            raise TransportError(f"rank {self.comm.rank}: {problem}")
        if self.comm.rank == 0:
            for other in numbers:
                # A death is noticed later.
                with contextlib.suppress(MPI.Exception):
                    new.send(None, other)
        return Survivors(new)

    def _call(self, name: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except MPI.Exception as exc:
            raise failure(f"rank {self.comm.rank}: MPI_Comm_{name}", exc) from exc


def join(numbers: Sequence[int]) -> Survivors:
    """Join the ranks that have started this process by `grow`; collective and blocking.

    The numbers are those of all ranks that were started with this one, in the order of
    MPI_COMM_WORLD.
    """
    merged = MPI.Comm.Get_parent().Merge(high=True)
    new = cast(MPI.Intracomm, merged.Split(0, numbers[MPI.COMM_WORLD.rank]))
    # Rank 0 sends this once all other ranks also have the communicator.
    new.recv()
    return Survivors(new)


def _settle(tasks: Sequence[Task[Any]]) -> None:
    """Wait for the messages of schedules; messages in flight still arrive."""
    left = [message for task in tasks for request in task.requests()
            for message in messages_of(request)]
    deadline = time.monotonic() + _SETTLING_S
    while left and time.monotonic() < deadline:
        left = [request for request in left if not _is_complete(request)]
        time.sleep(_PAUSE_S)
    _unsettled.extend(left)


def _is_complete(request: Request) -> bool:
    try:
        return request.test()
    except MpiringError:
        return True
