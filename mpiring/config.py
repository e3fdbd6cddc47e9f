"""Settings: the values of Config, from arguments, MPIRING_* variables or defaults."""

import contextlib
import dataclasses
import math
import numbers
import os
from dataclasses import dataclass, field
from typing import Any

from .errors import ConfigError
from .names import CONFIG, REDUCERS, AlgorithmName, explaining, reducer_named

PREFIX = "MPIRING_"
# Ranks that disagree on these settings would not make the same calls.
AGREED = ("algorithm", "tuning", "shared_memory", "operations_in_flight", "digest_steps",
          "digest_action", "gpu_aware", "nccl", "autotune", "reducer")
_KINDS = {bool: "True or False, in a variable 1 or 0", int: "a whole number",
          float: "a number", str: "text"}


def _setting(default: Any, *others: str) -> Any:
    """Declare a Config field by its default and, if only some values are allowed, the others."""
    return field(default=None, metadata={"default": default, "others": others})


@dataclass(frozen=True)
class Config:
    """Settings of a Communicator.

    A field that is not given has the value of its environment variable: `stall_timeout_s` is
    `MPIRING_STALL_TIMEOUT_S`. Without the variable it has the default.

    Attributes:
        algorithm: Algorithm of an allreduce that is called with algorithm="auto". If it does not
            support the op or dtype, the fastest algorithm is used.
        shared_memory: If true, the ranks of a node reduce directly from node-shared memory.
            Otherwise they exchange messages, as if each rank had a separate node.
        tuning: If true, measure which algorithm is the fastest for each size, or load the
            measurement of an earlier job. This happens before the first allreduce between nodes for
            which all ranks wait.
        tuning_folder: Folder in which rank 0 saves measurements, and every rank saves code that
            numba has compiled; "" saves nothing.
        autotune: If true, each DataParallel tries bucket lengths, algorithms and numbers of
            operations in flight in its first steps. It keeps the fastest, also for later jobs.
        reducer: Reducer of gradients between nodes, for models whose program names none: "mean",
            "bf16", "float16", "int8", "onebit", "powersgd" or "topk". A rank or a density may
            follow, as in "powersgd:4" or "topk:0.01"; "" is the plain mean.
        machine_code: If true, use code that numba compiles, if numba is installed. Otherwise NumPy
            computes bitwise identical results, which takes longer.
        progress: Method by which nonblocking operations advance: "thread" in the background,
            "inline" only inside mpiring calls that wait or poll. "auto" is "thread" if MPI
            supports threads.
        operations_in_flight: Number of nonblocking operations that advance at a time; later ones
            queue.
        rounds: Fast calls, which run short operations on a node in the caller's thread. "auto"
            uses compiled code if available, "python" does not, "off" disables fast calls. The
            value may differ between ranks.
        max_pause_s: Longest sleep of the progress thread between two checks of MPI, in seconds,
            while no caller waits.
        stall_warning_s: Seconds without progress after which a report is printed; 0 for never.
        stall_timeout_s: Seconds without progress after which StallError is raised and the job is
            aborted; 0 for never.
        digest_steps: Number of steps of a DataParallel after which ranks compare digests of their
            parameters and optimizer state; 0 for never.
        digest_action: Reaction to replicas that differ. "stop" ends the job with ReplicaError;
            "restore" copies the data of a rank of the majority to the others.
        gpu_aware: Permission to pass pointers to GPU memory to MPI: "yes", "no", or "auto", which
            tests in separate processes whether MPI supports them.
        nccl: Use of NCCL for vectors in GPU memory: "yes", "no", or "auto". "auto" uses it if
            ranks do not see each other's GPU memory. Each rank then needs its own GPU, and all
            ranks need the same version.
        abort_on_exception: If true, an exception that ends a rank ends the whole job. A rank that
            ends with incomplete operations always ends the job.
        full_tracebacks: If true, an error that ends the job prints the complete traceback of each
            rank. If false, one rank reports an error that several ranks raise, without the frames
            of mpiring.
        allow_singleton: If true, accept a world of one rank if the launcher was asked for more.
        trace: Folder in which each rank writes a trace for `python -m mpiring trace`; "" for none.

    The ranks must agree on all fields except paths, seconds, `machine_code`, `progress`, `rounds`,
    `abort_on_exception`, `full_tracebacks` and `allow_singleton`.

    Raises:
        ConfigError: A value has the wrong type or range, or an MPIRING_* variable is unknown.
    """

    algorithm: AlgorithmName = _setting("auto")
    shared_memory: bool = _setting(True)
    tuning: bool = _setting(True)
    tuning_folder: str = _setting("~/.cache/mpiring")
    autotune: bool = _setting(False)
    reducer: str = _setting("")
    machine_code: bool = _setting(True)
    progress: str = _setting("auto", "thread", "inline")
    operations_in_flight: int = _setting(2)
    rounds: str = _setting("auto", "python", "off")
    max_pause_s: float = _setting(2e-3)
    stall_warning_s: float = _setting(60.0)
    stall_timeout_s: float = _setting(600.0)
    digest_steps: int = _setting(1000)
    digest_action: str = _setting("stop", "restore")
    gpu_aware: str = _setting("auto", "yes", "no")
    nccl: str = _setting("auto", "yes", "no")
    abort_on_exception: bool = _setting(True)
    full_tracebacks: bool = _setting(False)
    allow_singleton: bool = _setting(False)
    trace: str = _setting("")

    def __post_init__(self) -> None:
        if unknown := _unknown_variables():
            raise ConfigError(f"unknown environment variable {'; '.join(unknown)}")
        for entry in dataclasses.fields(self):
            value = default = entry.metadata["default"]
            variable = PREFIX + entry.name.upper()
            given, source = getattr(self, entry.name), f"Config.{entry.name}"
            if given is None and variable in os.environ:
                given, source = os.environ[variable], variable
            if given is not None:
                value = _converted(given, type(default), source)
                _check_range(entry.name, value, source, (default, *entry.metadata["others"]))
            object.__setattr__(self, entry.name, value)


Config.__init__ = explaining(CONFIG)(Config.__init__)  # type: ignore[method-assign]


def _unknown_variables() -> list[str]:
    """Return the MPIRING_* variables that are no settings, each with a hint at the right name."""
    known = {PREFIX + entry.name.upper() for entry in dataclasses.fields(Config)}
    unknown = []
    for name, value in os.environ.items():
        if name.startswith(PREFIX) and name not in known:
            import difflib
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            hint = (f"did you mean {close[0]}?" if close
                    else f"known: {', '.join(sorted(known))}")
            unknown.append(f"{name}={value!r}; {hint}")
    return unknown


def _converted(value: Any, kind: type, name: str) -> Any:
    """Convert a variable's string, or a Python number, to the field's type."""
    number: Any = {int: numbers.Integral, float: numbers.Real}.get(kind)
    if kind is bool and isinstance(value, str):
        value = {"1": True, "true": True, "0": False, "false": False}.get(value.lower(), value)
    elif number and isinstance(value, (str, number)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            value = kind(value)
    if type(value) is not kind:
        raise ConfigError(f"{name}={value!r}: expected {_KINDS[kind]}")
    return value


def _check_range(name: str, value: Any, source: str, allowed: tuple[Any, ...]) -> None:
    expected = ""
    if len(allowed) > 1 and value not in allowed:
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
    elif name == "reducer" and not _names_reducer(value):
        expected = "one of " + ", ".join(
            f"{each}[:{number}]" if number else each for each, number in REDUCERS.items())
    if expected:
        raise ConfigError(f"{source}={value!r}: expected {expected}")


def _names_reducer(value: str) -> bool:
    with contextlib.suppress(ValueError):
        return not value or bool(reducer_named(value))
    return False


def config_or_default(config: Config | None) -> Config:
    """Return the settings that an argument stands for; None stands for the default settings."""
    if config is None:
        return Config()
    if not isinstance(config, Config):
        raise ConfigError(f"config={config!r}: pass mpiring.Config(...)")
    return config
