"""Starts MPI, checks the world of ranks, and ends the job when a rank fails."""

import atexit
import contextlib
import functools
import os
import shlex
import shutil
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import ClosedError, LaunchError, MissingDependencyError, StallError
from . import forks
from .environment import launched_by_ancestors, launched_size, launchers
from .first_report import FirstReport

# The exit status of a process that Ctrl-C ended, by the convention of shells.
_INTERRUPTED = 130
# Launchers kill at once, and were seen to drop output that they had not yet forwarded.
_FORWARD_S = 0.3
# The last words of a rank show this many operations.
_LAST = 4
# Of an error that another rank has reported, so many characters are printed.
_LINE = 300

Abort = Callable[[int], None]


def load_mpi() -> Any:
    """Return the module mpi4py.MPI, with MPI started.

    Raises:
        MissingDependencyError: There is no MPI library.
        ClosedError: MPI is finalised already.
        LaunchError: This process is a fork of one in which MPI runs.
    """
    forks.refuse_start()
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
    forks.guard(MPI.Is_finalized)
    return MPI


def thread_level(mpi: Any) -> str:
    """Return the thread level of a started MPI, as "multiple"; `mpi` is mpi4py.MPI."""
    names = ("single", "funneled", "serialized", "multiple")
    return next(name for name in names
                if getattr(mpi, f"THREAD_{name.upper()}") == mpi.Query_thread())


def find_mpiexec() -> str | None:
    """Return the mpiexec beside this Python, else the first on the path, else None."""
    return (shutil.which("mpiexec", path=str(Path(sys.executable).parent))
            or shutil.which("mpiexec"))


def mpi_world(*, allow_singleton: bool) -> Any:
    """Start MPI unless it runs, and return the world of all its ranks.

    Args:
        allow_singleton: Accept a world of one rank where the launcher was asked for more.

    Raises:
        LaunchError: The launcher was asked for several ranks, but this process is alone; or it
            is a fork of a rank.
        MissingDependencyError: There is no MPI library.
        ClosedError: MPI is finalised already.
    """
    forks.refuse_start()
    wanted, source = launched_size()
    by_mpi, known_by = launched_size(by_mpi=True)
    if not allow_singleton and known_by and wanted > 1 and wanted != by_mpi:
        # MPI's own start may die of this: torchrun closes the files that mpirun has opened.
        raise refusal(wanted, f"{source} says that {wanted} ranks were asked for, but {known_by} "
                              f"that MPI's world has {by_mpi}")
    world = load_mpi().COMM_WORLD
    if not allow_singleton and wanted > 1 and world.Get_size() == 1:
        raise refusal(wanted, f"{source} says that {wanted} ranks were asked for, but this "
                              f"process on {socket.gethostname()} is alone in its MPI world")
    if not allow_singleton and world.Get_size() == 1 and not launchers():
        _refuse_dropped_variables()
    return world


def _refuse_dropped_variables() -> None:
    """Raise LaunchError if a launcher has started several ranks, of which this is one."""
    count, source = launched_by_ancestors()
    if count > 1:
        _linger()
        raise LaunchError(
            f"{source} but this process on {socket.gethostname()} is alone in its MPI world and "
            f"has none of the launcher's variables. A program between the launcher and Python has "
            f"dropped them, such as env -i, sudo, or a container with a clean environment: let it "
            f"keep the environment (sudo -E), or start the launcher inside it. If one rank is what "
            f"you want, set MPIRING_ALLOW_SINGLETON=1, also inside it.")


def refusal(wanted: int, problem: str) -> LaunchError:
    """Return the error of a launch that went wrong, with the right command.

    Args:
        wanted: How many ranks were asked for.
        problem: What is wrong.
    """
    _linger()
    all_launchers = launchers()
    innermost = next(iter(all_launchers), None)
    starts = next((launcher.starts for launcher in all_launchers if launcher.starts), "mpirun -n")
    right = f"`{starts} {wanted} {_command()}`"
    if innermost and not innermost.starts:
        why = (f": {innermost.title} starts processes that MPI does not know. Start the ranks by "
               f"MPI instead: {right}")
    elif innermost and innermost.name == "srun":
        why = (". srun did not offer the PMI of the library that mpi4py loads: use the matching "
               "srun --mpi=pmi2 (MPICH) or --mpi=pmix (Open MPI); or, in a batch script, the "
               "mpirun that came with the library, as for pip's MPICH on several nodes")
    else:
        why = (f". Either the script was started without a launcher: use {right}; or the launcher "
               f"belongs to another MPI library than mpi4py loads: use the mpirun that came with "
               f"it, or the matching srun --mpi=pmi2 (MPICH) or --mpi=pmix (Open MPI)")
    return LaunchError(f"{problem}{why}. If one rank is what you want, "
                       f"set MPIRING_ALLOW_SINGLETON=1.")


@functools.cache
def _linger() -> None:
    """Let this process end a moment later, once its launcher has passed on what it has printed.

    srun, which ends all at the first bad exit, was seen to cut a traceback after its first line.
    """
    atexit.register(time.sleep, _FORWARD_S)


def _command() -> str:
    """Return the command that started this program, for a shell."""
    words = sys.orig_argv[1:]
    # torchrun adds -u.
    words = words[1:] if words[:1] == ["-u"] else words
    return shlex.join(["python", *words]) if words and words[0] != "-c" else "python train.py"


class JobEnder:
    """Prints an error with its rank, and ends the whole MPI job.

    Args:
        rank, size: Printed, so that the rank is found among many.
        abort: MPI_Abort; takes the exit status.
        report: Returns lines about this number of last operations of this rank.

    Attributes:
        first: Asked whether this rank reports in full; None: it does.
    """

    def __init__(self, rank: int, size: int, abort: Abort,
                 report: Callable[[int], str] = lambda last: "") -> None:
        self._report = report
        self._where = f"rank {rank} of {size} on {socket.gethostname()}"
        self._abort = abort
        self.first: FirstReport | None = None

    def __call__(self, error: BaseException) -> None:
        """Print the traceback of `error` and end the job.

        If another rank of the node has, a line will do: all of them raise the same.
        """
        is_due = True
        with contextlib.suppress(Exception):
            is_due = self.first is None or self.first.is_due(error)
        if is_due:
            self.end(error, "".join(traceback.format_exception(error)))
        else:
            line = str(error).partition("\n")[0][:_LINE]
            self._end(error, f"mpiring: {self._where} failed with {type(error).__name__}: {line}")

    def end(self, error: BaseException, text: str = "") -> None:
        """Print `text` and last words, and end the job because of `error`."""
        self._end(error, f"{text}{self._last_words(error)}")

    def _end(self, error: BaseException, text: str) -> None:
        # A program that wraps the excepthook may hold back what it prints, as PyTorch does after
        # init_process_group, and would never come to show it.
        held_back = sys.stderr is not sys.__stderr__
        for stream in (sys.stderr, sys.__stderr__) if held_back else (sys.stderr,):
            # Also where nothing can be printed, as on a full disk, the other ranks must end.
            with contextlib.suppress(Exception):
                # One write (print makes two), so that the launcher does not mix ranks' lines.
                stream.write(f"{text}\n")  # type: ignore[union-attr]
                stream.flush()  # type: ignore[union-attr]
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        with contextlib.suppress(Exception):
            if self.first is not None:
                self.first.printed()
        time.sleep(_FORWARD_S)
        code = _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        self._abort(code)
        # MPICH's MPI_Abort was seen to return, and this process must do nothing more.
        os._exit(code)

    def _last_words(self, error: BaseException) -> str:
        report = ""
        # Nothing that goes wrong here may keep the job from ending.
        with contextlib.suppress(Exception):
            # A StallError shows the last operations itself.
            report = self._report(0 if isinstance(error, StallError) else _LAST)
        end = f"mpiring: {self._where} failed with {type(error).__name__}: the job ends"
        return f"{report}\n{end}" if report else end


class _Hook:
    """An excepthook that ends the job after the traceback is printed."""

    def __init__(self, ender: JobEnder) -> None:
        self._ender = ender
        self._previous = sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException,
                 trace: TracebackType | None) -> None:
        if forks.in_fork:
            # No rank waits for it: it ends alone.
            self._previous(kind, error, trace)
            return
        if self._previous is sys.__excepthook__:
            self._ender(error)
        try:
            self._previous(kind, error, trace)
        finally:
            self._ender.end(error)


def end_job_on_exceptions(ender: JobEnder) -> None:
    """Make an uncaught exception of this process end the job.

    Otherwise MPI_Finalize would wait for the other ranks, which wait for this one.
    """
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(ender)
