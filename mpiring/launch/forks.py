"""Keeps children of a rank away from MPI, which works only in the process that started it.

A fork, for example a data loader's worker, inherits copies of communicators, handlers and open
files, and the memory shared with other ranks. The other ranks cannot distinguish the fork from its
parent.
"""

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Set
from typing import NoReturn, Protocol

from ..errors import ClosedError, ConfigError, LaunchError
from .environment import (
    RANK_PROCESS, has_default_action, set_variables, starting_rank)


class Gate(Protocol):
    """An object to change in a fork; a gate can stop fast calls, see record.counter."""

    def fork(self) -> None:
        """Close the gate in a fork permanently."""


class OfRank:
    """An object that works only in the process of its rank, and is neither pickled nor copied."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            f"a {type(self).__name__} cannot be pickled or copied: MPI works only in the process "
            f"of the rank. Keep it out of what other processes receive or load, such as the "
            f"dataset of a data loader; pass comm.rank and comm.size to them")


# Whether this process is a fork of a process that has started MPI.
in_fork = False
# Number of the process that has started MPI; 0 if MPI has not been started.
_mpi_pid = 0
# Signals that forks ignore, unless they or the rank handle them. Nobody sends them to end a fork.
_STOPPING = signal.SIGUSR1, signal.SIGUSR2
# Exit status of a fork.
_status = 0


class _Blocked(threading.local):
    """Signals that this thread had blocked before it forked."""

    signals: Set[int] = frozenset()


_blocked = _Blocked()
# Gates to close in a fork. Fast calls check them instead of `in_fork`.
gates: "weakref.WeakSet[Gate]" = weakref.WeakSet()


def guard(is_finalized: Callable[[], bool]) -> None:
    """Record that MPI was started in this process; `is_finalized` is MPI_Finalized."""
    global _mpi_pid
    if not _mpi_pid:
        _mpi_pid = os.getpid()
        set_variables({RANK_PROCESS: str(_mpi_pid)})
        os.register_at_fork(
            before=_hold_signals, after_in_parent=_release_signals, after_in_child=_begin)
        atexit.register(_end, is_finalized)


def refuse_start() -> None:
    """Raise LaunchError in a fork or child of a rank, where MPI cannot be started."""
    if in_fork:
        raise LaunchError(
            f"this process ({os.getpid()}) is a fork of a rank ({_mpi_pid}), and cannot be one, "
            f"too; communicate in the main process")
    rank = starting_rank()
    if rank is not None:
        raise LaunchError(
            f"this process ({os.getpid()}) was started by a rank (process {rank}) with the "
            f"variables of the rank's launcher, and cannot be a rank, too. Communicate in the "
            f"rank. If multiprocessing or a data loader has started this process, it has imported "
            f"the main program again: call mpiring.init() in a function, and call this function "
            f"below `if __name__ == \"__main__\":`. To start other ranks, run mpirun")


def refuse_calls(rank: int) -> None:
    """Raise ClosedError in a fork of rank `rank`."""
    if in_fork:
        raise ClosedError(
            f"this process ({os.getpid()}) is a fork of rank {rank} ({_mpi_pid}), and MPI works "
            f"only there; communicate in the main process")


def _hold_signals() -> None:
    """Block all signals until a fork has begun.

    CPython forgets those that arrive in a fork before that, such as SIGTERM from `terminate()`,
    for which it has a handler in the rank.
    """
    _blocked.signals = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def _release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _blocked.signals)


def _begin() -> None:
    """Set up a fork: close its gates, and record its exit status."""
    global in_fork
    in_fork = True
    for gate in gates:
        gate.fork()
    # Launchers send the signals that stop a rank (resilience.Stopping) also to its forks.
    for number in _STOPPING:
        if number not in _blocked.signals and has_default_action(
                number, os.getpid(), can_block=False):
            signal.signal(number, signal.SIG_IGN)
    original_exit = sys.exit

    def exit_(status: str | int | None = None, /) -> None:
        global _status
        _status = status & 0xff if isinstance(status, int) else int(status is not None)
        original_exit(status)

    sys.exit = exit_    # type: ignore[assignment]
    _release_signals()


def _end(is_finalized: Callable[[], bool]) -> None:
    """End a fork before mpi4py calls MPI_Finalize, which would wait for the parent.

    Exit handlers cannot read the exit status. It is the argument of `sys.exit`, or 1 after an
    uncaught exception.
    """
    if in_fork and not is_finalized():
        leave(1 if hasattr(sys, "last_value") else _status)


def leave(status: int) -> None:
    """Flush the output and end this process at once, without MPI_Finalize."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)
