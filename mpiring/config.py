"""Holds every setting, and alone reads the environment."""

import contextlib
import dataclasses
import difflib
import math
import numbers
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import ConfigError

PREFIX = "MPIRING_"
ALGORITHMS = ("auto", "ring", "direct", "shared", "hierarchical", "native")
PROGRESS = ("auto", "thread", "inline")
DIGEST_ACTIONS = ("stop", "restore")
GPU_AWARE = ("auto", "yes", "no")
# Without these in common, ranks would not make the same calls.
AGREED = ("algorithm", "tuning", "shared_memory", "operations_in_flight", "digest_steps",
          "digest_action", "gpu_aware")
_KINDS = {bool: "True or False, in a variable 1 or 0", int: "a whole number",
          float: "a number", str: "text"}

# Variables that change how fast MPI and NumPy are.
SPEED_PREFIXES = (PREFIX, "MPI4PY_RC_", "MPICH_", "MPIR_CVAR_", "OMPI_MCA_", "UCX_", "FI_",
                  "OMP_", "OPENBLAS_", "MKL_", "HOROVOD_", "GLOO_")


@dataclass(frozen=True)
class Launcher:
    """What starts the ranks of a job, and the variables by which it tells them so.

    Attributes:
        name: In a word; where it comes with an MPI library, that of its maker.
        title: For sentences.
        size: The variable that holds how many ranks there are; "" where none does.
        rank, local_rank: Those that say which of them this is, in all and on its node.
        prefixes: Of variables that would mislead the ranks of another job.
        starts: The command that starts ranks of MPI, up to their number; "" where it starts
            processes that MPI knows nothing of.
        mark: A variable that must be there for the others to be this launcher's.
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
        """Return whether it has left its variables."""
        return (self.mark or self.size or self.rank) in environ and (
            self.name != "srun" or _is_task(environ))


def _is_task(environ: Mapping[str, str]) -> bool:
    """Return whether a step of Slurm's is one of ranks: batch scripts and shells have one, too."""
    step = environ.get("SLURM_STEP_ID", "")
    return not step.isdigit() or int(step) < _FIRST_SPECIAL_STEP


# Slurm's numbers of steps that srun has not started: batch, interactive, extern (slurm.h).
_FIRST_SPECIAL_STEP = 0xfffffff0
_SLURM = ("SLURM_PROCID", "SLURM_LOCALID", ("SLURM_",), "srun -n")
_PMI = ("PMI_", "MPI_LOCAL", "HYDI_")
_TORCH = ("RANK", "LOCAL_RANK", (
    "TORCHELASTIC_", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
_NO_MPI = "another launcher than MPI's"

# Launchers start each other; the one that most probably was the last stands first, and is
# believed. What only grants ranks, or may be left over from elsewhere, stands last.
LAUNCHERS = (
    Launcher("torchrun", "torchrun", "WORLD_SIZE", *_TORCH, mark="TORCHELASTIC_RUN_ID"),
    # DeepSpeed's, Accelerate's and others that start several processes on a node.
    Launcher("WORLD_SIZE", _NO_MPI, "WORLD_SIZE", *_TORCH, mark="LOCAL_RANK"),
    Launcher("Open MPI", "Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK",
             "OMPI_COMM_WORLD_LOCAL_RANK", (
                 "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "OMPI_WORLD_", "OMPI_NUM_APP_CTX",
                 "OMPI_APP_CTX_", "OMPI_FIRST_RANKS", "OMPI_ARGV", "OMPI_COMMAND",
                 "OMPI_FILE_LOCATION", "OMPI_MCA_num_procs", "OMPI_MCA_initial_wdir",
                 "OMPI_MCA_ess", "OMPI_MCA_orte", "OMPI_MCA_pmix"), "mpirun -n"),
    Launcher("MVAPICH", "MVAPICH's mpirun_rsh", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK",
             "MV2_COMM_WORLD_LOCAL_RANK", ("MV2_COMM_WORLD_",), "mpirun_rsh -np"),
    Launcher("MVAPICH", "MVAPICH's mpirun_rsh", "MVP_COMM_WORLD_SIZE", "MVP_COMM_WORLD_RANK",
             "MVP_COMM_WORLD_LOCAL_RANK", ("MVP_COMM_WORLD_",), "mpirun_rsh -np"),
    # Hydra: also Intel MPI's.
    Launcher("MPICH", "MPICH's mpirun", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", _PMI,
             "mpirun -n", mark="MPI_LOCALNRANKS"),
    # HPE's mpiexec and aprun; the older aprun.
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

# What says how a process was launched and bound, and which networks and GPUs it gets: variables
# and beginnings of such, named closely, since Slurm's and others' may hold secrets.
LAUNCH_PREFIXES = (
    *filter(None, (variable for one in LAUNCHERS
                   for variable in (one.size, one.rank, one.local_rank, one.mark))),
    "PMI_", "PMIX_NAMESPACE", "PALS_", "MPI_LOCAL", "OMPI_COMM_WORLD_", "OMPI_VERSION",
    "I_MPI_", "MV2_", "MVP_", "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_STEP_ID", "SLURM_CPU",
    "SLURM_MPI_TYPE", "SRUN_CPUS_PER_TASK", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES", "IBV_FORK_SAFE", "RDMAV_FORK_SAFE", "MPI4PY_")


def _setting(default: Any) -> Any:
    """Declare a Config field whose default its MPIRING_* variable may replace."""
    return field(default=None, metadata={"default": default})


@dataclass(frozen=True)
class Config:
    """Settings of a Communicator.

    A field that is not given takes the value of its environment variable
    (`stall_timeout_s` is `MPIRING_STALL_TIMEOUT_S`), else the default.

    Attributes:
        algorithm: How allreduce runs where the call says "auto"; the same names. "auto"
            takes over where the configured one cannot be used.
        shared_memory: Let the ranks of a node reduce out of each other's memory; without,
            each rank is a node of its own.
        tuning: Before the first allreduce between nodes, measure which algorithm is the
            fastest for which size, or take what an earlier job has found.
        tuning_folder: Where rank 0 keeps what was measured or tried; "" keeps nothing.
        progress: "thread" advances operations in the background, "inline" only
            inside mpiring's calls; "auto" takes the thread where MPI allows it.
        operations_in_flight: How many nonblocking operations advance at a time;
            later ones queue. Must be the same on every rank.
        max_pause_s: Longest sleep of the progress thread between two looks at MPI,
            in seconds, while nobody waits.
        stall_warning_s: Seconds without progress after which a report is printed.
        stall_timeout_s: Seconds without progress after which StallError is
            raised and the job is aborted; 0 waits for ever.
        digest_steps: Steps of a DataParallel after which ranks compare digests of their
            parameters and optimiser state; 0 for never. Must be the same on every rank.
        digest_action: "stop" ends the job with ReplicaError where they differ; "restore" copies
            what differs from a rank of the majority. Must be the same on every rank.
        gpu_aware: Hand pointers of GPU memory to MPI. "auto" does where a trial in processes of
            its own has shown that MPI takes them. Must be the same on every rank.
        abort_on_exception: End the whole job when one rank dies of an exception. A
            rank that ends with operations it cannot complete always ends the job.
        allow_singleton: Accept a world of one rank where the launcher was asked for more.
        trace: A folder in which each rank writes what it does, to be looked at as a picture;
            see `python -m mpiring trace`. "" for none.

    Raises:
        ConfigError: A value has the wrong type or range, or an MPIRING_* variable is unknown.
    """

    algorithm: str = _setting("auto")
    shared_memory: bool = _setting(True)
    tuning: bool = _setting(True)
    tuning_folder: str = _setting("~/.cache/mpiring")
    progress: str = _setting("auto")
    operations_in_flight: int = _setting(2)
    max_pause_s: float = _setting(2e-3)
    stall_warning_s: float = _setting(60.0)
    stall_timeout_s: float = _setting(600.0)
    digest_steps: int = _setting(1000)
    digest_action: str = _setting("stop")
    gpu_aware: str = _setting("auto")
    abort_on_exception: bool = _setting(True)
    allow_singleton: bool = _setting(False)
    trace: str = _setting("")

    def __post_init__(self) -> None:
        _refuse_unknown_variables()
        for entry in dataclasses.fields(self):
            value = default = entry.metadata["default"]
            variable = PREFIX + entry.name.upper()
            given, source = getattr(self, entry.name), f"Config.{entry.name}"
            if given is None and variable in os.environ:
                given, source = os.environ[variable], variable
            if given is not None:
                value = _converted(given, type(default), source)
                _check_range(entry.name, value, source)
            object.__setattr__(self, entry.name, value)


def _refuse_unknown_variables() -> None:
    for name, hint in unknown_variables().items():
        raise ConfigError(f"unknown environment variable {name}={os.environ[name]!r}; {hint}")


def unknown_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the MPIRING_* variables that are no setting, each with what may have been meant.

    Args:
        environ: Variables to look at; the process's own by default.
    """
    environ = os.environ if environ is None else environ
    known = {PREFIX + entry.name.upper() for entry in dataclasses.fields(Config)}
    unknown = {}
    for name in environ:
        if name.startswith(PREFIX) and name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            unknown[name] = (f"did you mean {close[0]}?" if close
                             else f"known: {', '.join(sorted(known))}")
    return unknown


def _converted(value: Any, kind: type, name: str) -> Any:
    """Turn a variable's text, or a Python number, into the field's type."""
    if kind is bool and isinstance(value, str):
        value = {"1": True, "true": True, "0": False, "false": False}.get(value.lower(), value)
    elif kind in (int, float) and isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = kind(value)
    elif kind is float and isinstance(value, numbers.Real) and not isinstance(value, bool):
        value = float(value)
    elif kind is int and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        value = int(value)
    if type(value) is not kind:
        raise ConfigError(f"{name}={value!r}: expected {_KINDS[kind]}")
    return value


def _check_range(name: str, value: Any, source: str) -> None:
    allowed = {"algorithm": ALGORITHMS, "progress": PROGRESS,
               "digest_action": DIGEST_ACTIONS, "gpu_aware": GPU_AWARE}.get(name)
    expected = ""
    if allowed and value not in allowed:
        expected = f"one of {', '.join(allowed)}"
    elif name.endswith("_s") and not 0 <= value < math.inf:
        expected = "a finite number of seconds, 0 or more"
    elif name == "tuning_folder" and value and value[0] not in "/~":
        expected = "an absolute path, or ''"
    elif name == "trace" and value.lower() in ("0", "1", "true", "false"):
        expected = "a folder, or '' for no trace"
    elif name == "operations_in_flight" and value < 1:
        expected = "1 or more"
    elif name == "digest_steps" and value < 0:
        expected = "0 or more"
    if expected:
        raise ConfigError(f"{source}={value!r}: expected {expected}")


def relevant_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that change how fast a program runs, for the record.

    Args:
        environ: Variables to look at; the process's own by default.
    """
    environ = os.environ if environ is None else environ
    return {name: environ[name] for name in sorted(environ) if name.startswith(SPEED_PREFIXES)}


def launch_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that change how fast a program runs, or tell how it was launched.

    Args:
        environ: Variables to look at; the process's own by default.
    """
    environ = os.environ if environ is None else environ
    prefixes = SPEED_PREFIXES + LAUNCH_PREFIXES
    return {name: environ[name] for name in sorted(environ) if name.startswith(prefixes)}


def variables_for_another_job(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables without those that a launcher has set for this process.

    Args:
        environ: Variables to look at; the process's own by default.
    """
    environ = os.environ if environ is None else environ
    prefixes = tuple(prefix for one in LAUNCHERS for prefix in one.prefixes)
    return {name: value for name, value in environ.items() if not name.startswith(prefixes)}


def launchers(environ: Mapping[str, str] | None = None) -> list[Launcher]:
    """Return the launchers that have left their variables, the one to believe first.

    Args:
        environ: Variables to look at; the process's own by default.
    """
    environ = os.environ if environ is None else environ
    return [one for one in LAUNCHERS if one.is_here(environ)]


def launcher_of(environ: Mapping[str, str] | None = None) -> str:
    """Return the name of what has started a process as one of several.

    Args:
        environ: Variables to look at; the process's own by default.

    Returns:
        As in LAUNCHERS; "" where nothing has. In an allocation of Slurm's, but not started by
        srun, a process is alone.
    """
    return next((one.name for one in launchers(environ) if one.name != "Slurm"), "")


def launched_rank(environ: Mapping[str, str] | None = None, *, local: bool = False) -> int | None:
    """Return which rank the launcher's variables say that this process is.

    Args:
        environ: Variables to look at; the process's own by default.
        local: Among the ranks of its node.

    Returns:
        None where no launcher has left a trace.
    """
    environ = os.environ if environ is None else environ
    names = [one.local_rank if local else one.rank for one in LAUNCHERS
             if not one.mark or one.mark in environ]
    return next((int(environ[name]) for name in names if environ.get(name, "").isdigit()), None)


def launched_size(environ: Mapping[str, str] | None = None, *,
                  by_mpi: bool = False) -> tuple[int, str]:
    """Return how many ranks the launcher's variables speak of, and which one says so.

    The innermost launcher is believed: `mpirun -n 1` inside a Slurm allocation of four tasks
    asked for one rank, and torchrun inside `mpirun -n 1` for as many as it was told. Where a
    launcher tells only which rank this is, that one and those before it.

    Args:
        environ: Variables to look at; the process's own by default.
        by_mpi: Believe the innermost one that starts ranks of MPI, if it tells how many.

    Returns:
        The count and a text such as "SLURM_NTASKS=4 (Slurm)"; `(1, "")` where
        no launcher left a trace.
    """
    environ = os.environ if environ is None else environ
    for one in launchers(environ):
        if by_mpi and not one.starts:
            continue
        counts = [(int(environ[name]) + more, f"{name}={environ[name]} ({one.title})")
                  for name, more in ((one.size, 0), ("" if by_mpi else one.rank, 1))
                  if environ.get(name, "").isdigit()]
        if counts or by_mpi:
            return max(counts, key=lambda found: found[0], default=(1, ""))
    return 1, ""


def job_end(environ: Mapping[str, str] | None = None) -> float | None:
    """Return when Slurm will end this job, in seconds since 1970; None where it does not tell.

    Args:
        environ: Variables to look at; the process's own by default.
    """
    environ = os.environ if environ is None else environ
    text = environ.get("SLURM_JOB_END_TIME", "")
    return float(text) if text.isdigit() and int(text) else None


def survives_deaths(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether the launcher lets the other ranks go on when one dies.

    Open MPI's `mpirun --with-ft ulfm` does, and tells its processes so.

    Args:
        environ: Variables to look at; the process's own by default.
    """
    environ = os.environ if environ is None else environ
    return environ.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes", "enabled")


def threads_are_set(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether the user, or the launcher, has said how many threads a rank may use.

    Args:
        environ: Variables to look at; the process's own by default.
    """
    environ = os.environ if environ is None else environ
    return any(environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))


def set_variables(variables: Mapping[str, str]) -> None:
    """Set environment variables of this process, and of those that it starts."""
    os.environ.update(variables)
