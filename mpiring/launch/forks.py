"""Keeps forks of a rank away from MPI, which works only in the process that started it.

A fork, for example a data loader's worker, has a copy of everything: communicators, handlers, open
files, and memory shared with other ranks. The other ranks would mistake its actions for those of
its parent.
"""

import atexit
import contextlib
import logging
import os
import sys
import weakref
from collections.abc import Callable
from typing import Protocol

from ..errors import ClosedError, LaunchError


class Gate(Protocol):
    """A gate that can stop fast calls; see record.counter."""

    def fork(self) -> None:
        """Close the gate in a fork, for good."""


# Whether this process is a fork of the one in which MPI was started, and that process's number.
in_fork = False
_home = 0
# Exit status of a fork.
_status = 0
# Gates to close in a fork, because fast calls do not check `in_fork`.
gates: "weakref.WeakSet[Gate]" = weakref.WeakSet()


def guard(is_finalized: Callable[[], bool]) -> None:
    """Record that MPI was started in this process.

    Args:
        is_finalized: Function MPI_Finalized.
    """
    global _home
    if not _home:
        _home = os.getpid()
        os.register_at_fork(after_in_child=_begin)
        atexit.register(_end, is_finalized)


def refuse_start() -> None:
    """Raise LaunchError in a fork, where MPI cannot be started."""
    if in_fork:
        raise LaunchError(
            f"this process ({os.getpid()}) is a fork of a rank ({_home}), and cannot be one, too; "
            f"communicate in the main process")


def refuse_calls(rank: int) -> None:
    """Raise ClosedError in a fork of rank `rank`."""
    if in_fork:
        raise ClosedError(
            f"this process ({os.getpid()}) is a fork of rank {rank} ({_home}), and MPI works only "
            f"there; communicate in the main process")


def _begin() -> None:
    """Begin a fork: from now on refuse its calls, and record its exit status."""
    global in_fork
    in_fork = True
    for gate in gates:
        gate.fork()
    exit_ = sys.exit

    def noting(status: str | int | None = None, /) -> None:
        global _status
        _status = status & 0xff if isinstance(status, int) else int(status is not None)
        exit_(status)

    sys.exit = noting    # type: ignore[assignment]


def _end(is_finalized: Callable[[], bool]) -> None:
    """End a fork here, before mpi4py calls MPI_Finalize, which would wait for its parent.

    An exit handler does not see the exit status. It is the argument of `sys.exit`, or 1 after an
    exception.
    """
    if in_fork and not is_finalized():
        leave(1 if hasattr(sys, "last_value") else _status)


def leave(status: int) -> None:
    """End this process at once, without MPI_Finalize; flush its output."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)
