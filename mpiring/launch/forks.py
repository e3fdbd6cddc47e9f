"""Keeps forks of a rank away from MPI, which works in the process alone that has started it.

A data loader's worker, or what `os.fork` returns 0 in, has a copy of everything: communicators,
handlers, open files, and memory that MPI shares with other ranks. What it did with them would
reach its parent's partners in its parent's name.
"""

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Callable

from ..errors import ClosedError, LaunchError

# The process in which MPI was started, and whether this one is a fork of it.
_home = 0
_is_fork = False
# With which status a fork ends, if it says so.
_status = 0


def guard(is_finalized: Callable[[], bool]) -> None:
    """Take this process for the one in which MPI works; called once MPI is started.

    Args:
        is_finalized: MPI's own answer.
    """
    global _home
    if not _home:
        _home = os.getpid()
        os.register_at_fork(after_in_child=_begin)
        atexit.register(_end, is_finalized)


def is_fork() -> bool:
    """Return whether this process is a fork of the one in which MPI works."""
    return _is_fork


def refuse_start() -> None:
    """Raise LaunchError in a fork, where MPI cannot be started."""
    if _is_fork:
        raise LaunchError(
            f"this process ({os.getpid()}) is a fork of a rank ({_home}), and cannot be one, too; "
            f"communicate in the main process")


def refuse_calls(rank: int) -> None:
    """Raise ClosedError in a fork.

    Args:
        rank: That of the main process.
    """
    if _is_fork:
        raise ClosedError(
            f"this process ({os.getpid()}) is a fork of rank {rank} ({_home}), and MPI works only "
            f"there; communicate in the main process")


def _begin() -> None:
    """Begin a fork: from now on its calls are refused, and what it exits with is noted."""
    global _is_fork
    _is_fork = True
    leave = sys.exit

    def noting(status: str | int | None = None, /) -> None:
        global _status
        _status = status & 0xff if isinstance(status, int) else int(status is not None)
        leave(status)

    sys.exit = noting    # type: ignore[assignment]


def _end(is_finalized: Callable[[], bool]) -> None:
    """End a fork here, before mpi4py calls MPI_Finalize, in which its parent would be waited for.

    What `sys.exit` was told is its status, and 1 after an exception; an exit handler sees neither.
    """
    if not _is_fork or is_finalized():
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(1 if hasattr(sys, "last_value") else _status)
