"""Checks arguments that are numbers, bools, paths or states; errors say what was expected."""

import contextlib
import math
import numbers
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from .errors import ConfigError

# Largest C int, the type that MPI uses for ranks, colors and keys.
MAX_INT32 = 2**31 - 1


def whole_number(name: str, value: Any, least: float = -math.inf, most: float = math.inf) -> int:
    """Return an argument as a whole number; it may be a NumPy array of one element.

    Raises ConfigError if it is out of range or no whole number, like True and False.
    """
    try:
        number = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        limits = (f" from {least} to {most}" if math.isfinite(least) and math.isfinite(most)
                  else f" of at least {least}" if math.isfinite(least) else "")
        raise ConfigError(f"{name}={value!r:.200}: expected a whole number{limits}")
    return number


def number(name: str, value: Any, fits: Callable[[float], bool], expected: str) -> float:
    """Return an argument as a real number; raise ConfigError unless it fits.

    `fits` is false for NaN; `expected` completes the message "expected ...".
    """
    plain = value.item() if isinstance(value, np.generic | np.ndarray) and not value.ndim else value
    real = math.nan
    if isinstance(plain, numbers.Real) and not isinstance(plain, bool):
        # An integer of more than 1024 bits is too large for a float.
        with contextlib.suppress(OverflowError):
            real = float(plain)
    if not fits(real):
        raise ConfigError(f"{name}={value!r:.200}: expected {expected}")
    return real


def truth(name: str, value: Any) -> bool:
    """Return an argument as a bool; raise ConfigError unless it is True or False.

    0, 1 and strings are refused, because the string "no" would be true.
    """
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(f"{name}={value!r:.200}: expected True or False")
    return bool(value)


def refuse_other_state(state: Any, names: Iterable[str], whose: str, *,
                       only: bool = False) -> None:
    """Raise ConfigError unless a state is a mapping with all these names.

    `whose` completes the message "the state ...", such as "of a LossScaler". If `only`, other names
    are refused.
    """
    names = list(names)
    if not isinstance(state, Mapping):
        raise ConfigError(f"the state {whose} is a {type(state).__name__}: pass what "
                          f"state_dict() has returned")
    missing = [name for name in names if name not in state]
    unknown = [str(name) for name in state if name not in names] if only else []
    problems = [f"lacks {', '.join(missing)}"] if missing else []
    if unknown:
        problems.append(f"has {', '.join(unknown)} besides")
    if problems:
        raise ConfigError(f"the state {whose} {' and '.join(problems)}: pass what state_dict() has "
                          f"returned{' for the same model' * only}")


def path(name: str, value: Any) -> str:
    """Return an argument that is a path, as a string; raise ConfigError for anything else."""
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"{name}={value!r:.200}: expected a path, as text or pathlib.Path")
    return os.fsdecode(value)
