"""Describes what the face's methods are called with, for comparison across ranks."""

import functools
import math
from typing import Any

import numpy as np

from .collectives.agreement import Call
from .memory.arrays import dtype_name
from .memory.device import DeviceVector, address_of


def described(x: Any, vector: Any) -> str:
    """Return dtype, shape, order and whereabouts of an array.

    Args:
        x: The array.
        vector: Its memory, see device.vector_of.
    """
    return f"{dtype_name(vector.dtype)} {_shape(x, vector)}{_more(x, vector)}"


def allreduce_call(op: str, x: Any, vector: Any, algorithm: str) -> Call:
    """Return what an allreduce is compared by."""
    return _allreduce_call(op, vector.dtype, _shape(x, vector), _more(x, vector), algorithm)


# Cached: a program makes the same few calls again and again.
@functools.lru_cache(maxsize=4096)
def _allreduce_call(
    op: str, dtype: np.dtype[Any], shape: tuple[int, ...], more: str, algorithm: str,
) -> Call:
    return Call("allreduce", f"{op} of {dtype_name(dtype)} {shape}{more}, algorithm {algorithm}",
                nbytes=dtype.itemsize * math.prod(shape))


def part_of(x: Any, vector: Any, chunk: Any) -> Any:
    """Return a part of an array's memory as an array of the same package.

    Args:
        x: The array.
        vector: Its memory.
        chunk: Part of that.

    Returns:
        A view of `x`, with one dimension. Where `x` is of a package that is not known here, one
        of CuPy's.
    """
    if x is vector or isinstance(x, np.ndarray):
        return chunk
    if not hasattr(x, "reshape"):
        return chunk.device.gpu.array(chunk, chunk.shape)
    start = (address_of(chunk) - address_of(vector)) // vector.itemsize
    return (x.T if _is_fortran(x) else x).reshape(-1)[start:start + chunk.size]


def _shape(x: Any, vector: Any) -> tuple[int, ...]:
    # Bare memory has none, such as a buffer of RAPIDS'.
    return tuple((x if hasattr(x, "shape") else vector).shape)


def _more(x: Any, vector: Any) -> str:
    order = " in Fortran order" if x is not vector and _is_fortran(x) else ""
    return order + " on a GPU" if isinstance(vector, DeviceVector) else order


def _is_fortran(x: Any) -> bool:
    # Whatever has not NumPy's and CuPy's flags is taken in C's order only.
    return not getattr(getattr(x, "flags", None), "c_contiguous", True)
