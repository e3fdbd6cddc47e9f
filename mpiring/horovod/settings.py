"""Heard and unheard HOROVOD_* variables."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config import Config
from ..errors import ConfigError
from ..launch.environment import horovod_variables

# Results of what is fused are views of one copy: whoever keeps one, keeps it whole.
_FUSION_BYTES = 8 << 20
# Those that change nothing here, and why.
_UNHEARD = {
    "HOROVOD_CYCLE_TIME": "there are no cycles",
    "HOROVOD_AUTOTUNE": "algorithms are measured without it; `python -m mpiring tune` does it now",
    "HOROVOD_AUTOTUNE_LOG": "`python -m mpiring tune` prints what it measures",
    "HOROVOD_CACHE_CAPACITY": "there is no cache of responses",
    "HOROVOD_HIERARCHICAL_ALLREDUCE": "set MPIRING_ALGORITHM=hierarchical",
    "HOROVOD_HIERARCHICAL_ALLGATHER": "ranks of a node share memory without it",
    "HOROVOD_CPU_OPERATIONS": "MPI carries all",
    "HOROVOD_CONTROLLER": "MPI carries all",
    "HOROVOD_TIMELINE_MARK_CYCLES": "there are no cycles",
    "HOROVOD_THREAD_AFFINITY": "bind by the launcher",
}
# Those that say what is so anyway, or are set by horovodrun for its own processes.
_SILENT = ("HOROVOD_DYNAMIC_PROCESS_SETS", "HOROVOD_WITH", "HOROVOD_WITHOUT", "HOROVOD_GPU",
           "HOROVOD_LOG_", "HOROVOD_ELASTIC")


@dataclass(frozen=True)
class Settings:
    """Settings of a program that calls Horovod's functions.

    Attributes:
        config: Of the communicators.
        fusion_bytes: Tensors are fused into messages of at most so many bytes.
        bucket_bytes: The same for gradients; None where no variable says so.
        unheard: Variables that change nothing, each with why.
    """

    config: Config
    fusion_bytes: int
    bucket_bytes: int | None
    unheard: list[str]


def settings() -> Settings:
    """Return the settings by the HOROVOD_* variables, where no MPIRING_* variable says more.

    Raises:
        ConfigError: A variable is no number.
    """
    given = dict(horovod_variables())
    fields: dict[str, Any] = {}
    warning = _number(given, "HOROVOD_STALL_CHECK_TIME_SECONDS")
    if given.pop("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
        warning = 0.0
    timeout = _number(given, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")
    return _settings(given, fields, warning, timeout)


def _settings(given: dict[str, str], fields: dict[str, Any], warning: float | None,
              timeout: float | None) -> Settings:
    if warning is not None:
        fields["stall_warning_s"] = warning
    if timeout:
        fields["stall_timeout_s"] = timeout
    timeline = given.pop("HOROVOD_TIMELINE", "")
    if timeline and timeline.upper() != "DYNAMIC":
        fields["trace"] = timeline
    threshold = _number(given, "HOROVOD_FUSION_THRESHOLD")
    unheard = [f"{name}={value} ({_UNHEARD.get(name, 'unknown here')})"
               for name, value in given.items() if not name.startswith(_SILENT)]
    return Settings(Config(**fields), _FUSION_BYTES if threshold is None else int(threshold),
                    int(threshold) if threshold else None, unheard)


def _number(given: Mapping[str, str], name: str) -> float | None:
    text = given.pop(name, "")  # type: ignore[attr-defined]
    try:
        return float(text) if text else None
    except ValueError:
        raise ConfigError(f"{name}={text!r}: expected a number") from None
