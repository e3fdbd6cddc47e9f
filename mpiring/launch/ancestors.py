"""Asks the processes that have started this one whether it is one of several ranks.

For a process that has no launcher's variables: a program between the launcher and Python, such as
`env -i` or sudo, may have dropped them. Each rank would be a world of its own then.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from .environment import launched_size, launcher_of, variables_of

# Those that start ranks on their own node, by the names that Linux gives them. (srun's ranks are
# children of slurmstepd.)
_STARTERS = ("mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy", "pmi_proxy", "orterun",
             "orted", "prterun", "prted", "mpispawn", "slurmstepd", "flux-shell")
# Those that starters use to reach other nodes.
_MESSENGERS = ("ssh", "rsh", "srun")


def launched_by_ancestors(proc: Path = Path("/proc"), pid: int | None = None) -> tuple[int, str]:
    """Return how many ranks this process's ancestors have started, and a text that says where.

    A rank may start a program without the launcher's variables on purpose. So an ancestor in which
    an MPI library is loaded ends the search.

    Args:
        proc: Where the system shows its processes.
        pid: This process.

    Returns:
        Such as `(2, "mpirun (process 123) has started 2 processes on this node,")`; `(1, "")` where
        no ancestor has started several, or /proc does not show them, as in a container.
    """
    process = proc / str(os.getpid() if pid is None else pid)
    try:
        while (parent := _status(process)["PPid"]) != "0":
            process = proc / parent
            name = _status(process)["Name"]
            if name in _STARTERS:
                ranks = [child for child in _children(process)
                         if _status(proc / child)["Name"] not in _MESSENGERS]
                return (len(ranks), f"{name} (process {parent}) has started {len(ranks)} "
                                    f"processes on this node,") if len(ranks) > 1 else (1, "")
            try:
                runs_mpi = "libmpi" in (process / "maps").read_text(errors="replace")
                variables = variables_of(process)
            except PermissionError:
                # Another user's, such as sudo.
                continue
            if runs_mpi:
                break
            if launcher_of(variables):
                count, source = launched_size(variables)
                return count, f"{source} of process {parent} ({name}) promises {count} ranks,"
    except (OSError, KeyError):
        # A process has ended, or is not shown.
        pass
    return 1, ""


def _status(process: Path) -> Mapping[str, str]:
    rows = (line.split(":\t", 1) for line in (process / "status").read_text(
        errors="replace").splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 2}


def _children(process: Path) -> list[str]:
    # Any thread may have started some.
    return [child for thread in (process / "task").iterdir()
            for child in (thread / "children").read_text().split()]
