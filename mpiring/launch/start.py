"""Starts MPI, and checks the world of ranks."""

import atexit
import functools
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from ..errors import ClosedError, LaunchError, MissingDependencyError
from ..remedies import get_mpi
from . import forks
from .ending import FORWARD_S
from .environment import launched_by_ancestors, launched_size, launchers


def load_mpi() -> Any:
    """Return the module mpi4py.MPI, with MPI started.

    Raises:
        MissingDependencyError: There is no MPI library.
        ClosedError: MPI is finalized already.
        LaunchError: This process is a fork of a process that has started MPI.
    """
    forks.refuse_start()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as exc:
        raise MissingDependencyError(
            f"mpi4py cannot load an MPI library ({exc}); {get_mpi()}") from exc
    if MPI.Is_finalized():
        raise ClosedError("MPI is finalized; make communicators before MPI.Finalize()")
    if not MPI.Is_initialized():
        MPI.Init_thread()
    forks.guard(MPI.Is_finalized)
    return MPI


def thread_level(mpi: Any) -> str:
    """Return the thread level of MPI, such as "multiple"; `mpi` is the started mpi4py.MPI."""
    names = ("single", "funneled", "serialized", "multiple")
    return next(name for name in names
                if getattr(mpi, f"THREAD_{name.upper()}") == mpi.Query_thread())


def find_mpiexec() -> str | None:
    """Return the mpiexec in the folder of this Python, or the first one in PATH, or None."""
    import shutil
    return (shutil.which("mpiexec", path=str(Path(sys.executable).parent))
            or shutil.which("mpiexec"))


def required_mpiexec() -> str:
    """Return what `find_mpiexec` finds.

    Raises:
        MissingDependencyError: There is no mpiexec.
    """
    mpiexec = find_mpiexec()
    if mpiexec is None:
        raise MissingDependencyError(f"there is no mpiexec; {get_mpi()}")
    return mpiexec


def mpi_world(*, allow_singleton: bool) -> Any:
    """Start MPI if necessary, and return the communicator of all ranks.

    Args:
        allow_singleton: If true, accept a world of one rank if the launcher was asked for more.

    Raises:
        LaunchError: The launcher was asked for several ranks, but this process is alone.
        MpiringError: As for `load_mpi`.
    """
    if allow_singleton:
        return load_mpi().COMM_WORLD
    wanted, source = launched_size()
    by_mpi, known_by = launched_size(by_mpi=True)
    if known_by and wanted > 1 and wanted != by_mpi:
        # Do not start MPI, which may crash: torchrun closes the files that mpirun has opened.
        raise refusal(wanted, f"{source} says that {wanted} ranks were asked for, but {known_by} "
                              f"that MPI's world has {by_mpi}")
    world = load_mpi().COMM_WORLD
    if wanted > 1 and world.Get_size() == 1:
        raise refusal(wanted, f"{source} says that {wanted} ranks were asked for, but this "
                              f"process on {os.uname().nodename} is alone in its MPI world")
    if world.Get_size() == 1 and not launchers():
        _refuse_dropped_variables()
    return world


def _refuse_dropped_variables() -> None:
    """Raise LaunchError if a launcher has started this process as one of several ranks."""
    count, source = launched_by_ancestors()
    if count > 1:
        _linger()
        raise LaunchError(
            f"{source} but this process on {os.uname().nodename} is alone in its MPI world and "
            f"has none of the launcher's variables. A program between the launcher and Python has "
            f"dropped them, such as env -i, sudo, or a container with a clean environment: let it "
            f"keep the environment (sudo -E), or start the launcher inside it. If one rank is what "
            f"you want, set MPIRING_ALLOW_SINGLETON=1, also inside it.")


def refusal(wanted: int, problem: str) -> LaunchError:
    """Return an error about a launch of fewer than the `wanted` ranks, with the correct command."""
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
    """Delay the end of this process until its launcher has forwarded the output.

    srun ends all ranks when one fails, and sometimes drops a traceback after its first line.
    """
    atexit.register(time.sleep, FORWARD_S)


def _command() -> str:
    """Return the shell command that started this program."""
    words = sys.orig_argv[1:]
    # torchrun adds -u.
    words = words[1:] if words[:1] == ["-u"] else words
    return shlex.join(["python", *words]) if words and words[0] != "-c" else "python train.py"
