"""Fills the arrays that are summed, and checks the sums.

The numbers differ within an array and between ranks, since memory that holds one value
everywhere is faster. An allreduce in place makes its input p times as large, so values
would soon overflow, and infinities cost less than numbers. So a timed array starts near
the smallest normal number of its dtype, is summed until it comes near the largest, and is
then written again. The next call is not timed: it finds the array in the cache as writing
has left it, and leaves it as later calls find it.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np

from ...gpu.arrays import is_on_gpu
from ...memory.arrays import Array, dtype_named
from .world import World


class _Range(NamedTuple):
    """The range of numbers of a dtype that is used, and the bits that are summed exactly.

    Attributes:
        first: The binary exponent of the first numbers of a series.
        last: All sums of a series stay below 2**last.
        digits: Whole numbers up to 2**digits, and their multiples by powers of two, are exact.
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

# Data repeats only after so many elements; a prime, so that no two slices of an array are equal.
_PERIOD = 65_521
_SEED = 20_261_121
_LONGEST_SERIES = 1000


class WrongAnswerError(Exception):
    """A contender's result is not the sum."""


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype of a name in DTYPES; see arrays.dtype_named."""
    return dtype_named(name, DTYPES)


def series_length(dtype: np.dtype[Any], size: int) -> int:
    """Return after how many sums over `size` ranks an array must be filled again."""
    numbers = _RANGES[dtype.name]
    if size == 1:
        return _LONGEST_SERIES
    # The first numbers are below 2**(first + 1).
    room = numbers.last - numbers.first - 1
    return max(1, min(_LONGEST_SERIES, int(room / math.log2(size))))


def fill(x: Array, rank: int, size: int) -> None:
    """Write a rank's first numbers of a series, the same ones each time.

    Args:
        x: Shape (n,), of a dtype in DTYPES; also of CuPy.
        rank, size: Rank and number of ranks; at each offset their numbers have one sign.
    """
    if is_on_gpu(x):
        host = np.empty(x.shape, x.dtype)
        fill(host, rank, size)
        cast(Any, x).set(host)
        return
    numbers = _first_numbers(x.dtype, rank, size)
    for start in range(0, x.size, _PERIOD):
        piece = x[start:start + _PERIOD]
        np.copyto(piece, numbers[:piece.size])


def series(world: World, x: Array, call: Callable[[], object]) -> dict[str, Any]:
    """Return what keeps the sums of calls on `x` finite: arguments `prepare` and `every` of timing.

    Args:
        call: Sums `x` over the ranks.
    """
    def prepare() -> None:
        fill(x, world.rank, world.size)
        call()

    return {"prepare": prepare, "every": max(1, series_length(x.dtype, world.size) - 1)}


@functools.lru_cache(maxsize=8)
def _first_numbers(dtype: np.dtype[Any], rank: int, size: int) -> Array:
    """Return a period of random numbers of magnitudes from 2**first up to 2**(first + 1)."""
    first, _, digits = _RANGES[dtype.name]
    if dtype.kind == "i":
        bits = first
    else:
        # So few that the sum over ranks is exact, where the dtype allows for that.
        bits = max(1, digits - 1 - math.ceil(math.log2(size)))
    signs = np.random.default_rng([0, _SEED]).choice([-1, 1], _PERIOD)
    integers = np.random.default_rng([1 + rank, _SEED]).integers(1 << bits, 2 << bits, _PERIOD)
    return np.ldexp((signs * integers).astype(np.float64), first - bits).astype(dtype)


@functools.lru_cache(maxsize=1)
def _sums(dtype: np.dtype[Any], size: int) -> Array:
    """Return a period of the sums over all ranks; exact in float64, where they are in `dtype`."""
    total = np.zeros(_PERIOD)
    for rank in range(size):
        total += _first_numbers(dtype, rank, size).astype(np.float64)
    return total


def first_wrong(x: Array, size: int) -> int | None:
    """Return the index of the first element that is not the sum, or None if all are right.

    Args:
        x: The sum of `size` ranks' arrays, as `fill` writes them.
    """
    right = _sums(x.dtype, size)
    digits = _RANGES[x.dtype.name].digits
    # The ranks' numbers have at least 2 bits each, 1 of them free, and one sign. With too many
    # ranks to be exact, each addition rounds by half a bit of the sum at most.
    exact = x.dtype.kind == "i" or 4 * size <= 2 ** digits
    tolerance = np.zeros(1) if exact else np.abs(right) * (size - 1) * 2.0 ** -digits
    for start in range(0, x.size, _PERIOD):
        piece = x[start:start + _PERIOD].astype(np.float64)
        # Written so that NaN is also wrong.
        good = np.abs(piece - right[:piece.size]) <= tolerance[:piece.size]
        if not good.all():
            return start + int(good.argmin())
    return None


def check(world: World, x: Array, contender: str) -> None:
    """Raise on all ranks if on any of them `x` is not the sum of what `fill` wrote.

    Raises:
        WrongAnswerError: Names the contender, and the first rank and element that are wrong.

    Collective: yes. Blocking: yes.
    """
    if is_on_gpu(x):
        x = cast(Any, x).get()
    refuse_wrong(world, x, first_wrong(x, world.size), contender, "the sum")


def refuse_wrong(world: World, x: Array, index: int | None, contender: str, right: str) -> None:
    """Raise on all ranks if on any of them a contender's result is wrong.

    Args:
        index: Index of this rank's first wrong element; None if all are right.
        right: Text of the right result.

    Raises:
        WrongAnswerError: Names the contender, and the first rank and element that are wrong.

    Collective: yes. Blocking: yes.
    """
    report = "" if index is None else (
        f"{contender} on rank {world.rank}: element {index} of {x.size} {x.dtype.name} is "
        f"{x[index]}, which is not {right}")
    wrong = [text for text in world.raw.allgather(report) if text]
    if wrong:
        raise WrongAnswerError(wrong[0])
