"""Fills the arrays that are summed, and checks the sums.

The values differ within an array and between ranks, because memory that holds a single value
is faster. An allreduce in place multiplies its input by about the number of ranks, so values
would soon overflow, and infinities are faster than other numbers. Therefore the values of a
timed array start near the smallest normal number of its dtype. The array is summed until they
approach the largest number, and is then filled again. The next call is not timed, because the
cache is not in the same state as for later calls.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np

from ...provisional import Array, gpu, memory
from .world import World


class _Range(NamedTuple):
    """The range of the values of a dtype, and the number of bits that sums keep exactly.

    Attributes:
        first: Binary exponent of the first values of a series of sums.
        last: All sums of a series stay below 2**last.
        digits: Number of exact bits: integers up to 2**digits, times any power of two, are exact.
    """

    first: int
    last: int
    digits: int


_RANGES = {
    "float16": _Range(-14, 15, 11), "bfloat16": _Range(-126, 127, 8),
    "float32": _Range(-126, 127, 24), "float64": _Range(-1022, 1023, 53),
    "int32": _Range(8, 30, 30), "int64": _Range(8, 62, 62),
}
DTYPES = tuple(_RANGES)

# Number of elements after which data repeats; a prime, so that no two slices are equal.
_PERIOD = 65_521
_SEED = 20_261_121
_LONGEST_SERIES = 1000


class WrongAnswerError(Exception):
    """A contender's result is not the sum."""


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype with a name in DTYPES."""
    return memory.dtype_named(name, DTYPES)


def series_length(dtype: np.dtype[Any], size: int) -> int:
    """Return the number of sums over `size` ranks after which an array must be filled again."""
    numbers = _RANGES[dtype.name]
    if size == 1:
        return _LONGEST_SERIES
    # The first numbers are below 2**(first + 1).
    room = numbers.last - numbers.first - 1
    return max(1, min(_LONGEST_SERIES, int(room / math.log2(size))))


def fill(x: Array, rank: int, size: int) -> None:
    """Fill an array with a rank's first values of a series, which are always the same.

    The array, of NumPy or CuPy, has shape (n,) and a dtype in DTYPES. At each offset, the values of
    all ranks have the same sign.
    """
    if gpu.is_on_gpu(x):
        host = np.empty(x.shape, x.dtype)
        fill(host, rank, size)
        cast(Any, x).set(host)
        return
    numbers = _first_numbers(x.dtype, rank, size)
    for start in range(0, x.size, _PERIOD):
        piece = x[start:start + _PERIOD]
        np.copyto(piece, numbers[:piece.size])


def series(world: World, x: Array, call: Callable[[], object]) -> dict[str, Any]:
    """Return arguments `prepare` and `every` for `timing`, which keep the sums of `x` finite."""
    def prepare() -> None:
        fill(x, world.rank, world.size)
        call()

    return {"prepare": prepare, "every": max(1, series_length(x.dtype, world.size) - 1)}


@functools.lru_cache(maxsize=8)
def _first_numbers(dtype: np.dtype[Any], rank: int, size: int) -> Array:
    """Return a period of random values with magnitudes from 2**first to 2**(first + 1)."""
    first, _, digits = _RANGES[dtype.name]
    if dtype.kind == "i":
        bits = first
    else:
        # Few enough for an exact sum over the ranks, if the dtype has enough bits.
        bits = max(1, digits - 1 - math.ceil(math.log2(size)))
    signs = np.random.default_rng([0, _SEED]).choice([-1, 1], _PERIOD)
    integers = np.random.default_rng([1 + rank, _SEED]).integers(1 << bits, 2 << bits, _PERIOD)
    return np.ldexp((signs * integers).astype(np.float64), first - bits).astype(dtype)


@functools.lru_cache(maxsize=1)
def _sums(dtype: np.dtype[Any], size: int) -> Array:
    """Return a period of the sums in float64; they are exact if sums in `dtype` are."""
    total = np.zeros(_PERIOD)
    for rank in range(size):
        total += _first_numbers(dtype, rank, size).astype(np.float64)
    return total


def first_wrong(x: Array, size: int) -> int | None:
    """Return the first index where `x` is not the sum of all arrays from `fill`, or None."""
    right = _sums(x.dtype, size)
    digits = _RANGES[x.dtype.name].digits
    # All values at an offset have the same sign, and at least 2 bits, of which 1 is random. With
    # too many ranks for exact sums, each addition rounds by at most half a bit of the sum.
    exact = x.dtype.kind == "i" or 4 * size <= 2 ** digits
    tolerance = np.zeros(1) if exact else np.abs(right) * (size - 1) * 2.0 ** -digits
    for start in range(0, x.size, _PERIOD):
        piece = x[start:start + _PERIOD].astype(np.float64)
        # A comparison with `>` would accept NaN.
        good = np.abs(piece - right[:piece.size]) <= tolerance[:piece.size]
        if not good.all():
            return start + int(good.argmin())
    return None


def check(world: World, x: Array, contender: str) -> None:
    """Raise WrongAnswerError on all ranks if `x` on any is not the sum of the filled arrays."""
    if gpu.is_on_gpu(x):
        x = cast(Any, x).get()
    refuse_wrong(world, x, first_wrong(x, world.size), contender, "the sum")


def refuse_wrong(world: World, x: Array, index: int | None, contender: str, right: str) -> None:
    """Raise WrongAnswerError on all ranks if a contender's result is wrong on any rank.

    The error names the contender, and the first rank and element that are wrong. On this rank,
    `index` is the first wrong element of `x`, or None; `right` describes the right result.
    """
    report = "" if index is None else (
        f"{contender} on rank {world.rank}: element {index} of {x.size} {x.dtype.name} is "
        f"{x[index]}, which is not {right}")
    wrong = [text for text in world.raw.allgather(report) if text]
    if wrong:
        raise WrongAnswerError(wrong[0])
