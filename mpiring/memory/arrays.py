"""Views a user's array as a flat vector, or refuses it with a reason; cuts vectors into chunks."""

import ctypes
import functools
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..errors import ConfigError, MissingDependencyError
from ..remedies import pip_install

Array = NDArray[Any]
# In CPython, the first field of an array object is the address of its data.
_FIELDS_BYTES = object.__basicsize__
_word_at = ctypes.c_size_t.from_address

# NumPy has no bfloat16. The dtype of that name comes from the package ml_dtypes, which registers
# the arithmetic. Only its name is needed here.
FLOATING = ("float16", "bfloat16", "float32", "float64", "longdouble")
COMPLEX = ("complex64", "complex128", "clongdouble")
INTEGER = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
SIXTEEN_BIT = ("float16", "bfloat16")
CACHE_LINE_BYTES = 64
# Bits of Inf.
INFINITY_BITS = {"float16": 0x7c00, "bfloat16": 0x7f80}


@functools.cache
def _has_known_fields() -> bool:
    # In other implementations of Python, `id` need not be an address.
    x = np.empty(2)
    return sys.implementation.name == "cpython" and (
        _word_at(id(x) + _FIELDS_BYTES).value == x.ctypes.data)


def data_address(x: Array) -> int:
    """Return `x.ctypes.data`, in a fifth of the time."""
    if _has_known_fields():
        return _word_at(id(x) + _FIELDS_BYTES).value
    return int(x.ctypes.data)


def dtype_name(dtype: DTypeLike) -> str:
    """Return mpiring's name of a dtype, the same on every platform, or raise ConfigError."""
    return _name(np.dtype(dtype))


def dtype_named(name: str, names: Sequence[str]) -> np.dtype[Any]:
    """Return the dtype of an allowed name: a NumPy dtype, or bfloat16 of ml_dtypes.

    Raises ConfigError for other names, and MissingDependencyError if ml_dtypes is missing.
    """
    if name not in names:
        raise ConfigError(f"dtype {name!r} cannot be reduced; expected one of {', '.join(names)}")
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise MissingDependencyError(
            f"bfloat16 needs ml_dtypes: {pip_install('ml_dtypes')}") from error
    bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return bfloat16


# Cached, because NumPy composes a dtype's name each time, which takes 5 µs.
@functools.cache
def _name(dtype: np.dtype[Any]) -> str:
    if not dtype.isnative:
        raise ConfigError(
            f"dtype {dtype.str!r} has foreign byte order; convert with "
            f"x.astype({dtype.newbyteorder('=').str!r})")
    # NumPy's names, float128 and complex256 on most machines, depend on the width.
    if dtype.char in "gG":
        return "longdouble" if dtype.char == "g" else "clongdouble"
    if dtype.name in (*FLOATING, *COMPLEX, *INTEGER, "bool"):
        return str(dtype.name)
    raise ConfigError(
        f"dtype {dtype.name!r} cannot travel; use bool, an integer, floating or complex "
        f"dtype, bfloat16 of ml_dtypes, or broadcast_object for Python objects")


def refuse_unusable(x: Any, *, writeable: bool) -> None:
    """Raise ConfigError unless `x` is an array without a mask that can be written to as needed."""
    if not isinstance(x, np.ndarray):
        raise ConfigError(
            f"expected a numpy.ndarray, got {type(x).__module__}.{type(x).__qualname__}; "
            f"convert it with numpy.asarray, or send it with broadcast_object")
    if isinstance(x, np.ma.MaskedArray):
        raise ConfigError("masked arrays would lose their mask; pass x.filled(...) instead")
    if writeable and not x.flags.writeable:
        raise ConfigError(f"array of shape {x.shape} is read-only; pass a copy: x.copy()")


def flat(x: Any, *, writeable: bool = True) -> Array:
    """Return the elements of `x` as a vector that shares its memory.

    Raises ConfigError unless `x` is a NumPy array, C- or Fortran-contiguous and without a mask,
    that can be written to as needed.
    """
    is_plain = type(x) is np.ndarray
    if not is_plain:
        refuse_unusable(x, writeable=False)
    flags = x.flags
    if not (flags.c_contiguous or flags.f_contiguous):
        raise ConfigError(
            f"array of shape {x.shape} with strides {x.strides} is not contiguous, so it cannot "
            f"be combined in place; pass a contiguous array: y = numpy.ascontiguousarray(x), "
            f"and afterwards x[...] = y")
    if writeable and not flags.writeable:
        refuse_unusable(x, writeable=True)
    # A new view would take twice as long as these checks.
    return x if is_plain and x.ndim == 1 else np.asarray(x).ravel(order="K")


def may_overlap(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Return whether elements of an array may share memory; false only if they do not.

    The strides are in the unit of `itemsize`.
    """
    if 0 in shape:
        return False
    reach = itemsize
    for stride, n in sorted((abs(stride), n) for stride, n in zip(strides, shape) if n > 1):
        if stride < reach:
            return True
        reach += stride * (n - 1)
    return False


def chunks_of(x: Array, parts: int) -> list[Array]:
    """Cut a vector into `parts` views whose lengths differ by at most one."""
    # Equal to `cut(x, bounds_of(x.size, parts))`, in half the time: a short ring calls it 4 times.
    bounds = [i * x.size // parts for i in range(parts + 1)]
    return [x[start:stop] for start, stop in zip(bounds, bounds[1:])]


def bounds_of(n: int, parts: int, alignment: int = 1) -> list[int]:
    """Return the `parts` + 1 offsets that cut n elements into slices of about equal length.

    Each slice starts at a multiple of `alignment` elements.
    """
    blocks = -(-n // alignment)
    return [min(i * blocks // parts * alignment, n) for i in range(parts + 1)]


# Cached, because it takes 0.1 ms for 1,000 parts, and each step needs the bounds of each bucket.
@functools.lru_cache(maxsize=1024)
def aligned_bounds(n: int, itemsize: int, parts: int) -> Sequence[int]:
    """Return the offsets of slices that start on cache lines, if the memory does."""
    return tuple(bounds_of(n, parts, max(1, CACHE_LINE_BYTES // itemsize)))


def slices(bounds: Sequence[int]) -> list[slice]:
    """Return the slices between successive offsets."""
    return list(map(slice, bounds, bounds[1:]))


def cut(x: Array, bounds: Sequence[int]) -> list[Array]:
    """Cut a vector into the views `x[bounds[i]:bounds[i + 1]]`."""
    return [x[part] for part in slices(bounds)]


def slice_of(x: Array, part: int, parts: int) -> Array:
    """Return number `part` of the views that `chunks_of` returns."""
    return x[part * x.size // parts:(part + 1) * x.size // parts]


def pieces_of(x: Array, piece_bytes: int) -> list[Array]:
    """Cut a vector into views of at most `piece_bytes` bytes; an empty vector into one view."""
    return chunks_of(x, max(1, math.ceil(x.nbytes / piece_bytes)))


def as_bytes(x: Array) -> Array:
    """View a contiguous vector as bytes, so that MPI need not know its dtype."""
    return x.view(np.uint8)


def is_finite(x: Array) -> bool:
    """Return whether a floating or complex vector contains neither Inf nor NaN."""
    name = dtype_name(x.dtype)
    if name not in INFINITY_BITS:
        return bool(np.isfinite(x).all())
    # For 16 bits NumPy's isfinite takes fifty times as long.
    return x.size == 0 or peak(x) < INFINITY_BITS[name]


def peak(x: Array) -> int:
    """Return the bits of the largest magnitude in a nonempty vector of 16-bit floats.

    The bits of Inf and NaN are larger than those of any finite number.
    """
    positive = np.maximum.reduce(x.view(np.int16))
    negative = np.maximum.reduce(x.view(np.uint16))
    return max(int(positive), int(negative) - 0x8000)
