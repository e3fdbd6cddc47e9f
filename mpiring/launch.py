"""Finds the launcher, starts MPI, checks the world of ranks, and ends the job when one fails."""

import contextlib
import os
import shutil
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from .config import launched_size
from .errors import ClosedError, LaunchError, MissingDependencyError, StallError
from .flight import Recorder

# What a shell reports for a process that Ctrl-C ended.
_INTERRUPTED = 130

# Launchers kill at once, and were seen to drop what they had not yet forwarded.
_FORWARD_S = 0.3

# How many operations a rank that fails tells of.
_LAST = 4

Abort = Callable[[int], None]


def load_mpi() -> Any:
    """Return the module mpi4py.MPI, with MPI started.

    Raises:
        MissingDependencyError: There is no MPI library.
        ClosedError: MPI is finalised already.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as exc:
        raise MissingDependencyError(
            f"mpi4py cannot load an MPI library ({exc}); load your cluster's MPI module, "
            f"or install one: pip install 'mpiring[mpich]'") from exc
    if MPI.Is_finalized():
        raise ClosedError("MPI is finalised; make communicators before MPI.Finalize()")
    if not MPI.Is_initialized():
        MPI.Init_thread()
    return MPI


def find_mpiexec() -> str | None:
    """Return the mpiexec beside this Python, else the first on the path, else None."""
    beside = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    return beside or shutil.which("mpiexec")


def refuse_singleton(size: int) -> None:
    """Raise where the launcher was asked for several ranks but each is a world of its own.

    Args:
        size: Of the MPI world.

    Raises:
        LaunchError: Says which variable gave it away, and how to launch instead.
    """
    wanted, source = launched_size()
    if size == 1 and wanted > 1:
        raise LaunchError(
            f"{source} says that {wanted} ranks were asked for, but this process on "
            f"{socket.gethostname()} is alone in its MPI world. Either the script was started "
            f"without a launcher: use srun or mpirun; or the launcher belongs to another MPI "
            f"library than mpi4py loads: use the mpirun that came with it, or the matching "
            f"srun --mpi=pmi2 (MPICH) or --mpi=pmix (Open MPI). If one rank is what you want, "
            f"set MPIRING_ALLOW_SINGLETON=1.")


class JobEnder:
    """Prints an error with its rank, and ends the whole MPI job.

    Args:
        rank, size: Printed, so that one finds the rank among many.
        abort: MPI_Abort; takes the exit status.
        recorder: Tells what this rank did last; nothing by default.
    """

    def __init__(self, rank: int, size: int, abort: Abort,
                 recorder: Recorder | None = None) -> None:
        self._recorder = recorder or Recorder(rank)
        self._where = f"rank {rank} of {size} on {socket.gethostname()}"
        self._abort = abort

    def __call__(self, error: BaseException) -> None:
        """Print the traceback of `error` and end the job."""
        self.end(error, "".join(traceback.format_exception(error)))

    def end(self, error: BaseException, text: str = "") -> None:
        """Print `text` and a last line, and end the job because of `error`."""
        last = self._last_words(error)
        # Who has wrapped the excepthook may hold back what it prints, as PyTorch does after
        # init_process_group, and would never come to show it.
        held_back = sys.stderr is not sys.__stderr__
        for stream in (sys.stderr, sys.__stderr__) if held_back else (sys.stderr,):
            # On a full disk nobody can be told, but the other ranks must end all the same.
            with contextlib.suppress(Exception):
                # One write (print makes two), so that the launcher does not mix ranks' lines.
                stream.write(f"{text}{last}\n")  # type: ignore[union-attr]
                stream.flush()  # type: ignore[union-attr]
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        time.sleep(_FORWARD_S)
        code = _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        self._abort(code)
        # MPICH's MPI_Abort was seen to return, and this process must do nothing more.
        os._exit(code)

    def _last_words(self, error: BaseException) -> str:
        last, told = f"mpiring: {self._where} failed with {type(error).__name__}: the job ends", ""
        # Nothing that goes wrong here may keep the job from ending.
        with contextlib.suppress(Exception):
            # A stall's report has told of them.
            told = self._recorder.report(0 if isinstance(error, StallError) else _LAST)
        return "\n".join(filter(None, [told, last]))


class _Hook:
    """An excepthook that ends the job after the traceback is printed."""

    def __init__(self, ender: JobEnder) -> None:
        self._ender = ender
        self._previous = sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException,
                 trace: TracebackType | None) -> None:
        if self._previous is sys.__excepthook__:
            self._ender(error)
        try:
            self._previous(kind, error, trace)
        finally:
            self._ender.end(error)


def end_job_on_exceptions(ender: JobEnder) -> None:
    """Make an uncaught exception of this process end the job, instead of leaving it to hang.

    Without this, MPI_Finalize would wait for the other ranks, which wait for this one.
    """
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(ender)
