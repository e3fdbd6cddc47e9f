"""Fills the arrays that are summed, and checks the sums.

An allreduce in place makes its input p times as large, so values would soon
overflow, and infinities do not cost what numbers do. Zeros would stay zeros, but
some processors skip writing them. So a timed array starts from the smallest
normal number of its dtype, is summed until it comes near the largest, and is
only then written anew. The call after that is not timed: it finds the array in
the cache as writing has left it, and leaves it as every later call finds it.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, MissingDependencyError
from .world import World

# By dtype: the binary exponents of the first value, and of the last that is safe.
_EXPONENTS = {
    "float16": (-14, 15), "bfloat16": (-126, 127), "float32": (-126, 127),
    "float64": (-1022, 1023), "int32": (0, 30), "int64": (0, 62),
}
DTYPES = tuple(_EXPONENTS)
# Sums of whole numbers are exact up to here; beyond, each of p additions may round.
_EXACT = {"float16": 2.0 ** 11, "bfloat16": 2.0 ** 8}

_PERIOD = 7
_RANK_PERIOD = 3
_LONGEST_SERIES = 1000

Array = NDArray[Any]


class WrongAnswerError(Exception):
    """A contender's result is not the sum."""


def dtype_of(name: str) -> np.dtype[Any]:
    """Return NumPy's dtype of a name in DTYPES.

    Raises:
        ConfigError: Another name.
        MissingDependencyError: bfloat16 without the package ml_dtypes.
    """
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r}: expected one of {', '.join(DTYPES)}")
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as exc:
        raise MissingDependencyError("bfloat16 needs ml_dtypes: pip install ml_dtypes") from exc
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def series_length(dtype: np.dtype[Any], size: int) -> int:
    """Return after how many sums over `size` ranks an array must be filled anew."""
    first, last = _EXPONENTS[dtype.name]
    if size == 1:
        return _LONGEST_SERIES
    return max(1, min(_LONGEST_SERIES, int((last - first) / math.log2(size))))


def fill(x: Array) -> None:
    """Write the first value of a series."""
    first, _ = _EXPONENTS[x.dtype.name]
    x.fill(2.0 ** first)


def fill_to_check(x: Array, rank: int) -> None:
    """Write small whole numbers from 1 that differ from rank to rank and place to place."""
    x[...] = np.resize((1 + np.arange(_PERIOD) + rank % _RANK_PERIOD).astype(x.dtype), x.shape)


def first_wrong(x: Array, size: int) -> int | None:
    """Return the place of the first element that is not the sum, or None if all are right."""
    of_ranks = sum(rank % _RANK_PERIOD for rank in range(size))
    right = size * np.arange(1, 1 + _PERIOD, dtype=np.float32) + of_ranks
    exact = np.float32(_EXACT.get(x.dtype.name, np.inf))
    tolerance = np.where(right <= exact, 0, right * size / exact)
    # Written so that NaN is wrong, too.
    difference = np.abs(x.astype(np.float32) - np.resize(right, x.shape))
    good = difference <= np.resize(tolerance, x.shape)
    return None if good.all() else int(good.argmin())


def check(world: World, x: Array, contender: str) -> None:
    """Raise on all ranks if on any of them `x` is not the sum of what `fill_to_check` wrote.

    Raises:
        WrongAnswerError: Names the contender, and the first rank and place that are wrong.

    Collective: yes. Blocking: yes.
    """
    place = first_wrong(x, world.size)
    report = "" if place is None else (
        f"{contender} on rank {world.rank}: element {place} of {x.size} {x.dtype.name} is "
        f"{x[place]}, which is not the sum")
    wrong = [text for text in world.raw.allgather(report) if text]
    if wrong:
        raise WrongAnswerError(wrong[0])
