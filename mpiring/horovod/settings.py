"""Settings from HOROVOD_* variables, and the list of ignored variables."""

from dataclasses import dataclass
from typing import Any

from .. import Config, ConfigError
from ..provisional import launch

# Fused results are views of one copy. One result keeps the memory of the complete copy.
_FUSION_BYTES = 8 << 20
# Variables without effect, and the reason.
_IGNORED = {
    "HOROVOD_AUTOTUNE": "algorithms are measured without it, once per cluster",
    "HOROVOD_AUTOTUNE_LOG": "`python -m mpiring tune` prints what it measures",
    "HOROVOD_CACHE_CAPACITY": "there is no cache of responses",
    "HOROVOD_CONTROLLER": "mpiring always uses MPI",
    "HOROVOD_CPU_OPERATIONS": "mpiring always uses MPI",
    "HOROVOD_CYCLE_TIME": "there are no cycles",
    "HOROVOD_HIERARCHICAL_ALLGATHER": "ranks of a node share memory without it",
    "HOROVOD_HIERARCHICAL_ALLREDUCE": "set MPIRING_ALGORITHM=hierarchical",
    "HOROVOD_THREAD_AFFINITY": "bind ranks by the launcher",
    "HOROVOD_TIMELINE_MARK_CYCLES": "there are no cycles",
}
# Variables that request the default behavior, or concern a build or horovodrun.
_NEEDLESS = ("HOROVOD_DYNAMIC_PROCESS_SETS", "HOROVOD_WITH", "HOROVOD_GPU", "HOROVOD_LOG_",
             "HOROVOD_ELASTIC", "HOROVOD_STALL_CHECK_DISABLE")


@dataclass(frozen=True)
class HorovodSettings:
    """Settings of a program that calls Horovod's functions.

    Attributes:
        fusion_bytes: Largest size in bytes of the messages into which tensors are fused.
        bucket_bytes: The same size for gradients; None if no variable sets it.
        ignored: Variables without effect, each with the reason.
    """

    config: Config
    fusion_bytes: int
    bucket_bytes: int | None
    ignored: list[str]


def settings() -> HorovodSettings:
    """Return the settings from HOROVOD_* variables; MPIRING_* variables take precedence.

    Raises ConfigError if a variable is not a number.
    """
    given = launch.horovod_variables()
    fields: dict[str, Any] = {}
    threshold = _number(given, "HOROVOD_FUSION_THRESHOLD")
    warning = _number(given, "HOROVOD_STALL_CHECK_TIME_SECONDS")
    if given.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
        warning = 0.0
    timeout = _number(given, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")
    timeline = given.pop("HOROVOD_TIMELINE", "")
    for name, value in {"stall_warning_s": warning, "stall_timeout_s": timeout or None,
                        "trace": timeline if timeline.upper() != "DYNAMIC" else None}.items():
        if value is not None and f"MPIRING_{name.upper()}" not in launch.relevant_variables():
            fields[name] = value
    ignored = [f"{name}={value} ({_IGNORED.get(name, 'unknown')})" for name, value in given.items()
               if not name.startswith(_NEEDLESS)]
    return HorovodSettings(
        Config(**fields), _FUSION_BYTES if threshold is None else int(threshold),
        int(threshold) if threshold else None, ignored)


def _number(given: dict[str, str], name: str) -> float | None:
    """Remove a variable from `given`, and return its value as a number."""
    text = given.pop(name, "")
    try:
        return float(text) if text else None
    except ValueError:
        raise ConfigError(f"{name}={text!r}: expected a number") from None
