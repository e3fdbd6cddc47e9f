"""Agreement of the ranks that are left after a death, and their own communicator.

By ULFM (User-Level Failure Mitigation), which is an extension of MPI 4 and part of Open MPI.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, cast

from mpi4py import MPI

from ..errors import MpiringError, ProcessFailedError
from .base import Request, T, Task
from .mpi import failure, messages_of

# How long MPI may take to let go of the buffers of messages that are not waited for any more.
_SETTLING_S = 1.0
# How long MPI's news of a death may take.
_NEWS_S = 0.5
_PAUSE_S = 1e-3

# Of messages that it did not let go of: they must stay where they are, for ever.
_unsettled: list[Request] = []


class Survivors:
    """The ranks of an MPI communicator, any of which may die.

    Args:
        comm: All its ranks must call `agree` and `shrunk` in the same order, dead ones apart.

    Attributes:
        comm: The same.
        size: How many ranks it has, dead ones included.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm, self.size = comm, comm.size
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)

    def lost(self) -> bool:
        """Return whether a rank has died; wait a moment for news of it.

        Collective: no. Blocking: no.
        """
        deadline = time.monotonic() + _NEWS_S
        while time.monotonic() < deadline:
            try:
                # Other than the functions that ask for this, it listens to the launcher.
                self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
            except MPI.Exception as exc:
                return isinstance(failure("", exc), ProcessFailedError)
            time.sleep(_PAUSE_S)
        return False

    def leave(self, tasks: Sequence[Task[Any]] = ()) -> None:
        """Let no message of these ranks go on, so that all hear of a death.

        Args:
            tasks: Schedules that will not be resumed; MPI has let go of their buffers afterwards.

        Collective: no. Blocking: no.
        """
        self._called("revoke", self.comm.Revoke)
        _settle(tasks)

    def agree(self, answer: bool) -> bool:
        """Return whether all ranks that are left have answered True; the same on all of them.

        Works although ranks have died, and do so meanwhile.

        Collective: yes. Blocking: yes.
        """
        while True:
            try:
                # Otherwise a death that not all ranks know of yet would be an error.
                self.comm.Ack_failed()
                return bool(self.comm.Agree(int(answer)))
            except MPI.Exception as exc:
                error = failure("agreeing with the ranks that are left", exc)
                # All get this error, and all try anew.
                if not isinstance(error, ProcessFailedError):
                    raise error from exc

    def shrunk(self) -> "Survivors":
        """Return those that are left, in their order, on a communicator of their own.

        Collective: yes. Blocking: yes.
        """
        return Survivors(cast(MPI.Intracomm, self._called("shrink", self.comm.Shrink)))

    def _called(self, name: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except MPI.Exception as exc:
            raise failure(f"rank {self.comm.rank}: MPI_Comm_{name}", exc) from exc


def _settle(tasks: Sequence[Task[Any]]) -> None:
    """Wait for the messages of schedules: those on their way still arrive."""
    left = [message for task in tasks for request in task.requests()
            for message in messages_of(request)]
    deadline = time.monotonic() + _SETTLING_S
    while left and time.monotonic() < deadline:
        left = [request for request in left if not _is_over(request)]
        time.sleep(_PAUSE_S)
    _unsettled.extend(left)


def _is_over(request: Request) -> bool:
    try:
        return request.test()
    except MpiringError:
        return True
