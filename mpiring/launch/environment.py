"""Reads the variables that launchers set: this process's rank, the number of ranks, the deadline.

The functions read `environ`, by default the variables of this process. `launched_by_ancestors`
reads /proc instead.
"""

import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple
from pathlib import Path

from ..config import PREFIX

# Prefixes of variables that change the speed of MPI and NumPy.
SPEED_PREFIXES = (PREFIX, "MPI4PY_RC_", "MPICH_", "MPIR_CVAR_", "OMPI_MCA_", "UCX_", "FI_",
                  "OMP_", "OPENBLAS_", "MKL_", "HOROVOD_", "GLOO_", "THP_MEM_")

# Variable in which `mpiring lab run` passes its options to its ranks.
LAB_OPTIONS = "LAB_OPTIONS"

# Variable in which a rank passes the number of its process to the programs that it starts.
RANK_PROCESS = "_MPIRING_RANK_PROCESS"


class Launcher(NamedTuple):
    """A program that starts the ranks of a job, and the variables that it sets for them.

    Attributes:
        name: One word; for the launcher of an MPI library, the library's name.
        title: Name in messages.
        size: Variable with the number of ranks; "" if there is none.
        prefixes: Prefixes of variables that would mislead the ranks of another job.
        starts: Command that starts MPI ranks, without their number; "" if the launcher starts
            processes that are unknown to MPI.
        mark: Variable that identifies this launcher; "" if `size` or `rank` does.
    """

    name: str
    title: str
    size: str = ""
    rank: str = ""
    local_rank: str = ""
    prefixes: tuple[str, ...] = ()
    starts: str = ""
    mark: str = ""

    def is_here(self, environ: Mapping[str, str]) -> bool:
        """Return whether the variables of this launcher are set."""
        return (self.mark or self.size or self.rank) in environ and (
            self.name != "srun" or _is_task(environ))


def _is_task(environ: Mapping[str, str]) -> bool:
    """Return whether this Slurm step consists of ranks; batch scripts and shells are also steps."""
    step = environ.get("SLURM_STEP_ID", "")
    return not step.isdigit() or int(step) < _FIRST_SPECIAL_STEP


# Number of the first Slurm step that srun did not start: batch, interactive, extern (slurm.h).
_FIRST_SPECIAL_STEP = 0xfffffff0
_SLURM = ("SLURM_PROCID", "SLURM_LOCALID", ("SLURM_",), "srun -n")
_PMI = ("PMI_", "MPI_LOCAL", "HYDI_")
_TORCH = ("RANK", "LOCAL_RANK", (
    "TORCHELASTIC_", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
_NO_MPI = "another launcher than MPI's"

# A launcher may start another one. The first launcher in this table whose variables are set is most
# probably the innermost. The last ones only reserve ranks, or their variables may be left over.
LAUNCHERS = (
    Launcher("torchrun", "torchrun", "WORLD_SIZE", *_TORCH, mark="TORCHELASTIC_RUN_ID"),
    # DeepSpeed, Accelerate and others that start several processes on a node.
    Launcher("WORLD_SIZE", _NO_MPI, "WORLD_SIZE", *_TORCH, mark="LOCAL_RANK"),
    Launcher("Open MPI", "Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK",
             "OMPI_COMM_WORLD_LOCAL_RANK", (
                 "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "OMPI_WORLD_", "OMPI_NUM_APP_CTX",
                 "OMPI_APP_CTX_", "OMPI_FIRST_RANKS", "OMPI_ARGV", "OMPI_COMMAND",
                 "OMPI_FILE_LOCATION", "OMPI_MCA_num_procs", "OMPI_MCA_initial_wdir",
                 "OMPI_MCA_ess", "OMPI_MCA_orte", "OMPI_MCA_pmix"), "mpirun -n"),
    *(Launcher("MVAPICH", "MVAPICH's mpirun_rsh", f"{world}SIZE", f"{world}RANK",
               f"{world}LOCAL_RANK", (world,), "mpirun_rsh -np")
      for world in ("MV2_COMM_WORLD_", "MVP_COMM_WORLD_")),
    Launcher("Intel MPI", "Intel MPI's mpirun", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID",
             (*_PMI, "I_MPI_HYDRA_UUID", "HYDRA_"), "mpirun -n", mark="I_MPI_HYDRA_UUID"),
    Launcher("MPICH", "MPICH's mpirun", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", _PMI,
             "mpirun -n", mark="MPI_LOCALNRANKS"),
    # HPE's PALS (mpiexec and aprun), and Cray's older ALPS (aprun).
    Launcher("PALS", "Cray's mpiexec", "", "PALS_RANKID", "PALS_LOCAL_RANKID", ("PALS_",),
             "mpiexec -n"),
    Launcher("ALPS", "Cray's aprun", "", "ALPS_APP_PE", "", ("ALPS_",), "aprun -n"),
    Launcher("Flux", "flux run", "FLUX_JOB_SIZE", "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID",
             ("FLUX_JOB_", "FLUX_TASK_"), "flux run -n"),
    Launcher("jsrun", "IBM's jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK",
             "JSM_NAMESPACE_LOCAL_RANK", ("JSM_",), "jsrun -n"),
    Launcher("srun", "srun", "SLURM_STEP_NUM_TASKS", *_SLURM, mark="SLURM_STEP_NUM_TASKS"),
    Launcher("MPICH", "a launcher with MPICH's PMI", "PMI_SIZE", "PMI_RANK", "PMI_LOCAL_RANK",
             _PMI, "mpirun -n"),
    Launcher("PMIx", "prterun, or another launcher with PMIx", "", "PMIX_RANK", "",
             ("PMIX_", "PRTE_LAUNCHED"), "mpirun -n"),
    Launcher("Slurm", "Slurm", "SLURM_NTASKS", *_SLURM),
    # Kubernetes' PyTorchJob, or a user's own export.
    Launcher("WORLD_SIZE", _NO_MPI, "WORLD_SIZE", *_TORCH))

# Launchers whose variables may be left over in a shell that is no rank.
_LEFT_OVER = LAUNCHERS[-2:]

# Variables that container runtimes set in the container, and the runtimes. Apptainer also sets
# Singularity's variable. By a systemd convention, any runtime may set the last one.
CONTAINERS = {
    "APPTAINER_CONTAINER": "Apptainer", "SINGULARITY_CONTAINER": "Apptainer",
    "KUBERNETES_SERVICE_HOST": "Kubernetes", "container": ""}
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE",
                "MVP_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")

# Programs that start ranks on their node, by process name. (slurmstepd starts the ranks of srun.)
_STARTERS = ("mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy", "pmi_proxy", "orterun",
             "orted", "prterun", "prted", "mpispawn", "slurmstepd", "flux-shell")
# Programs with which launchers reach other nodes.
_REMOTE_SHELLS = ("ssh", "rsh", "srun")

# Prefixes of variables about the launch and binding of a process, and about the networks and GPUs
# that it uses. They are narrow, because other Slurm variables may contain secrets.
LAUNCH_PREFIXES = (
    *filter(None, (name for launcher in LAUNCHERS for name in (
        launcher.size, launcher.rank, launcher.local_rank, launcher.mark))),
    "PMI_", "PMIX_NAMESPACE", "PALS_", "MPI_LOCAL", "OMPI_COMM_WORLD_", "OMPI_VERSION",
    "PMIX_VERSION", "PMIX_SERVER_TMPDIR", "CRAY_MPICH_VERSION", *CONTAINERS,
    "I_MPI_", "MV2_", "MVP_", "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_STEP_ID", "SLURM_CPU",
    "SLURM_MPI_TYPE", "SRUN_CPUS_PER_TASK", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES", "IBV_FORK_SAFE", "RDMAV_FORK_SAFE", "MPI4PY_")


def relevant_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that change the speed of a program, for benchmark records."""
    return {name: environ[name] for name in sorted(environ) if name.startswith(SPEED_PREFIXES)}


def horovod_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables with Horovod's settings."""
    return {name: environ[name] for name in sorted(environ) if name.startswith("HOROVOD_")}


def lab_options(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the options of the lab that runs this process; None outside of a lab."""
    return environ.get(LAB_OPTIONS)


def launch_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that change the speed of a program or describe its launch."""
    prefixes = SPEED_PREFIXES + LAUNCH_PREFIXES
    return {name: environ[name] for name in sorted(environ) if name.startswith(prefixes)}


def variables_for_another_job(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return all variables except those that a launcher sets for this process."""
    prefixes = RANK_PROCESS, *(prefix for launcher in LAUNCHERS for prefix in launcher.prefixes)
    return {name: value for name, value in environ.items() if not name.startswith(prefixes)}


def launchers(environ: Mapping[str, str] = os.environ) -> list[Launcher]:
    """Return the launchers whose variables are set, the most probable first."""
    return [launcher for launcher in LAUNCHERS if launcher.is_here(environ)]


def launcher_of(environ: Mapping[str, str] = os.environ) -> str:
    """Return the name, as in LAUNCHERS, of the launcher that started this process as a rank.

    It is "" without a launcher, as in a Slurm allocation without srun.
    """
    return next((launcher.name for launcher in launchers(environ)
                 if launcher.name != "Slurm"), "")


def launched_rank(environ: Mapping[str, str] = os.environ, *, local: bool = False) -> int | None:
    """Return this rank (if `local`, within the node) by the launcher; None if unknown."""
    return _number(environ, [launcher.local_rank if local else launcher.rank
                             for launcher in LAUNCHERS
                             if not launcher.mark or launcher.mark in environ])


def prints_for_job(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process prints messages that all ranks of its job would print.

    Return False if the launcher's variables contain a rank other than 0. Return True without a
    launcher, and for a program that a rank has started.
    """
    innermost = next(iter(launchers(environ)), _LEFT_OVER[0])
    return (innermost in _LEFT_OVER or not launched_rank(environ)
            or starting_rank(environ) is not None)


def launched_here(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of ranks that the launcher started on this node; None if unknown."""
    return _number(environ, _LOCAL_SIZES)


def _number(environ: Mapping[str, str], names: Iterable[str]) -> int | None:
    """Return the value of the first variable that is a number; None if there is none."""
    return next((int(environ[name]) for name in names if environ.get(name, "").isdigit()), None)


def launched_first(environ: Mapping[str, str], proc: Path) -> bool:
    """Return whether process 1 was launched as a rank, as in a container of a single rank."""
    innermost = next(iter(launchers(environ)), None)
    try:
        return innermost is not None and innermost.rank in variables_of(proc / "1")
    except OSError:
        return False


def variables_of(process: Path) -> Mapping[str, str]:
    """Return the initial environment variables of a process, given its folder in /proc.

    Raises:
        OSError: The process has ended or belongs to another user.
    """
    pairs = (text.partition("=") for text in (process / "environ").read_text(
        errors="replace").split("\0"))
    return {name: value for name, _, value in pairs}


def launched_size(environ: Mapping[str, str] = os.environ, *,
                  by_mpi: bool = False) -> tuple[int, str]:
    """Return the number of ranks from the launcher's variables, and the source of the number.

    The innermost launcher counts. For example, `mpirun -n 1` inside a Slurm allocation of four
    tasks starts one rank. If a launcher sets the rank but not the number of ranks, the number is at
    least the rank plus 1. If `by_mpi`, use the innermost launcher of MPI ranks, if it sets their
    number.

    Returns:
        A pair like `(4, "SLURM_NTASKS=4 (Slurm)")`; `(1, "")` if no launcher's variables are set.
    """
    for launcher in launchers(environ):
        if by_mpi and not launcher.starts:
            continue
        counts = [(int(environ[name]) + more, f"{name}={environ[name]} ({launcher.title})")
                  for name, more in ((launcher.size, 0), ("" if by_mpi else launcher.rank, 1))
                  if environ.get(name, "").isdigit()]
        if counts or by_mpi:
            return max(counts, key=lambda count: count[0], default=(1, ""))
    return 1, ""


def launched_by_ancestors(proc: Path = Path("/proc"), pid: int | None = None) -> tuple[int, str]:
    """Return the number of ranks that a launcher among this process's ancestors started.

    Use it for a process without a launcher's variables. A program between the launcher and Python,
    such as `env -i` or sudo, may have dropped the variables. Each rank would then be a separate
    world.

    A rank may start another program without these variables on purpose. Therefore the search stops
    at an ancestor that has loaded an MPI library.

    Returns:
        A pair like `(2, "mpirun (process 123) has started 2 processes on this node,")`. It is `(1,
        "")` if no ancestor has started several ranks, or if /proc hides the ancestors, as in a
        container.
    """
    process = proc / str(os.getpid() if pid is None else pid)
    try:
        while (parent := _status(process)["PPid"]) != "0":
            process = proc / parent
            name = _status(process)["Name"]
            if name in _STARTERS:
                ranks = [child for child in _children(process)
                         if _status(proc / child)["Name"] not in _REMOTE_SHELLS]
                return (len(ranks), f"{name} (process {parent}) has started {len(ranks)} "
                                    f"processes on this node,") if len(ranks) > 1 else (1, "")
            try:
                runs_mpi = "libmpi" in (process / "maps").read_text(errors="replace")
                variables = variables_of(process)
            except PermissionError:
                # The process belongs to another user, like sudo.
                continue
            if runs_mpi:
                break
            if launcher_of(variables):
                count, source = launched_size(variables)
                return count, f"{source} of process {parent} ({name}) promises {count} ranks,"
    except (OSError, KeyError):
        # A process has ended or is hidden.
        pass
    return 1, ""


def children_of(pid: int, proc: Path = Path("/proc")) -> list[int]:
    """Return the numbers of the children of a process; [] if /proc hides them."""
    try:
        return [*map(int, _children(proc / str(pid)))]
    except OSError:
        return []


def has_default_action(number: int, pid: int, proc: Path = Path("/proc"), *,
                       can_block: bool = True) -> bool:
    """Return whether a process neither blocks nor ignores nor handles a signal.

    If `can_block` is false, it does not matter whether the process blocks the signal.

    Python's `signal.getsignal` does not know the handlers of C code, such as faulthandler's.
    """
    try:
        status = _status(proc / str(pid))
        masks = [int(status[name], 16) for name in ("SigIgn", "SigCgt", *["SigBlk"] * can_block)]
    except (OSError, KeyError):
        # The process has ended or is hidden.
        return False
    return not any(mask >> number - 1 & 1 for mask in masks)


def starting_rank(environ: Mapping[str, str] = os.environ, proc: Path = Path("/proc"),
                  pid: int | None = None) -> int | None:
    """Return the number of the rank's process that started this process without a launcher.

    It is None if a launcher has started this process, or if /proc hides it. It is also None without
    a launcher's variables, because MPI can then start in this process.
    """
    if not any(launcher.starts and launcher.name != "Slurm" for launcher in launchers(environ)):
        return None
    process = proc / str(os.getpid() if pid is None else pid)
    try:
        while (parent := _status(process)["PPid"]) != "0":
            process = proc / parent
            if parent == environ.get(RANK_PROCESS):
                return int(parent)
            if _status(process)["Name"] in _STARTERS:
                break
    except (OSError, KeyError):
        # A process has ended or is hidden.
        pass
    return None


def _status(process: Path) -> Mapping[str, str]:
    rows = (line.split(":\t", 1) for line in (process / "status").read_text(
        errors="replace").splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 2}


def _children(process: Path) -> list[str]:
    # Any thread may have started children.
    return [child for thread in (process / "task").iterdir()
            for child in (thread / "children").read_text().split()]


def job_end(environ: Mapping[str, str] = os.environ) -> float | None:
    """Return the time at which Slurm will end this job, in seconds since 1970; None if unknown."""
    return _number(environ, ["SLURM_JOB_END_TIME"]) or None


def survives_deaths(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the launcher lets ranks survive another's death: `mpirun --with-ft ulfm`."""
    return environ.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes", "enabled")


def threads_are_set(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the user or the launcher has set the number of threads of a rank."""
    return any(environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))


def heap_is_set(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the user has configured how glibc's malloc returns freed memory."""
    return bool(environ.get("MALLOC_TRIM_THRESHOLD_") or environ.get("MALLOC_MMAP_THRESHOLD_")
                or "glibc.malloc." in environ.get("GLIBC_TUNABLES", ""))


def set_variables(variables: Mapping[str, str]) -> None:
    """Set environment variables of this process and its future children."""
    os.environ.update(variables)


def set_default(name: str, value: str) -> None:
    """Set an environment variable of this process and its future children, unless it is set."""
    os.environ.setdefault(name, value)
