"""Settings by the HOROVOD_* variables, and which of these are ignored."""

from dataclasses import dataclass
from typing import Any

from ..config import Config, given_variables
from ..errors import ConfigError
from ..launch.environment import horovod_variables

# Results of what is fused are views of one copy: whoever keeps one, keeps it whole.
_FUSION_BYTES = 8 << 20
# Those that change nothing here, and why.
_IGNORED = {
    "HOROVOD_AUTOTUNE": "algorithms are measured without it, once per cluster",
    "HOROVOD_AUTOTUNE_LOG": "`python -m mpiring tune` prints what it measures",
    "HOROVOD_CACHE_CAPACITY": "there is no cache of responses",
    "HOROVOD_CONTROLLER": "MPI carries all",
    "HOROVOD_CPU_OPERATIONS": "MPI carries all",
    "HOROVOD_CYCLE_TIME": "there are no cycles",
    "HOROVOD_HIERARCHICAL_ALLGATHER": "ranks of a node share memory without it",
    "HOROVOD_HIERARCHICAL_ALLREDUCE": "set MPIRING_ALGORITHM=hierarchical",
    "HOROVOD_THREAD_AFFINITY": "bind ranks by the launcher",
    "HOROVOD_TIMELINE_MARK_CYCLES": "there are no cycles",
}
# These ask for what is so anyway; or they are for a build, or for horovodrun.
_NEEDLESS = ("HOROVOD_DYNAMIC_PROCESS_SETS", "HOROVOD_WITH", "HOROVOD_GPU", "HOROVOD_LOG_",
             "HOROVOD_ELASTIC", "HOROVOD_STALL_CHECK_DISABLE")


@dataclass(frozen=True)
class HorovodSettings:
    """Settings of a program that calls Horovod's functions.

    Attributes:
        config: Of the communicators.
        fusion_bytes: Tensors are fused into messages of at most so many bytes.
        bucket_bytes: The same for gradients; None where no variable says so.
        ignored: Variables that change nothing, each with why.
    """

    config: Config
    fusion_bytes: int
    bucket_bytes: int | None
    ignored: list[str]


def settings() -> HorovodSettings:
    """Return the settings by the HOROVOD_* variables; MPIRING_* variables come before them.

    Raises:
        ConfigError: A variable is no number.
    """
    given = horovod_variables()
    fields: dict[str, Any] = {}
    threshold = _number(given, "HOROVOD_FUSION_THRESHOLD")
    warning = _number(given, "HOROVOD_STALL_CHECK_TIME_SECONDS")
    if given.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
        warning = 0.0
    timeout = _number(given, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")
    timeline = given.pop("HOROVOD_TIMELINE", "")
    for name, value in {"stall_warning_s": warning, "stall_timeout_s": timeout or None,
                        "trace": timeline if timeline.upper() != "DYNAMIC" else None}.items():
        if value is not None and name not in given_variables():
            fields[name] = value
    ignored = [f"{name}={value} ({_IGNORED.get(name, 'unknown')})" for name, value in given.items()
               if not name.startswith(_NEEDLESS)]
    return HorovodSettings(
        Config(**fields), _FUSION_BYTES if threshold is None else int(threshold),
        int(threshold) if threshold else None, ignored)


def _number(given: dict[str, str], name: str) -> float | None:
    """Take a variable out of those that are given, as a number."""
    text = given.pop(name, "")
    try:
        return float(text) if text else None
    except ValueError:
        raise ConfigError(f"{name}={text!r}: expected a number") from None
