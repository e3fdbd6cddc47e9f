"""Agreement of the surviving ranks after a death, and a communicator for them.

It uses ULFM (User-Level Failure Mitigation), an extension of MPI 4 that is part of Open MPI.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, cast

from mpi4py import MPI

from ..errors import MpiringError, ProcessFailedError
from .base import Request, T, Task
from .mpi import failure, messages_of

# Seconds that MPI may take to release the buffers of messages that are no longer waited for.
_SETTLING_S = 1.0
# Seconds that MPI's news of a death may take.
_NEWS_S = 0.5
_PAUSE_S = 1e-3

# Messages that MPI did not release: their buffers must stay in place forever.
_unsettled: list[Request] = []


class Survivors:
    """The ranks of an MPI communicator, any of which may die.

    Args:
        comm: MPI communicator. All its living ranks must call `agree` and `shrunk` in the same
            order.

    Attributes:
        comm: The argument of the same name.
        size: Number of its ranks, including dead ones.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm, self.size = comm, comm.size
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)

    def lost(self) -> bool:
        """Return whether a rank has died; wait a moment for news of a death.

        Collective: no. Blocking: no.
        """
        deadline = time.monotonic() + _NEWS_S
        while time.monotonic() < deadline:
            try:
                # Unlike the functions meant for this, it listens to the launcher.
                self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
            except MPI.Exception as exc:
                return isinstance(failure("", exc), ProcessFailedError)
            time.sleep(_PAUSE_S)
        return False

    def leave(self, tasks: Sequence[Task[Any]] = ()) -> None:
        """Stop all messages of these ranks, so that all ranks learn of a death.

        Args:
            tasks: Schedules that will not be resumed; MPI releases their buffers.

        Collective: no. Blocking: no.
        """
        self._called("revoke", self.comm.Revoke)
        _settle(tasks)

    def agree(self, answer: bool) -> bool:
        """Return whether all surviving ranks have answered True; the same on all of them.

        It works after deaths of ranks, also during the call.

        Collective: yes. Blocking: yes.
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

    def shrunk(self) -> "Survivors":
        """Return the surviving ranks, in their order, on a new communicator.

        Collective: yes. Blocking: yes.
        """
        return Survivors(cast(MPI.Intracomm, self._called("shrink", self.comm.Shrink)))

    def _called(self, name: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except MPI.Exception as exc:
            raise failure(f"rank {self.comm.rank}: MPI_Comm_{name}", exc) from exc


def _settle(tasks: Sequence[Task[Any]]) -> None:
    """Wait for the messages of schedules; messages in flight still arrive."""
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
