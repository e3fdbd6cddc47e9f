"""Describes what the face's methods are called with, for comparison across ranks."""

import functools
import math
from typing import Any

import numpy as np

from .collectives.agreement import Call
from .memory.arrays import dtype_name, order_of
from .memory.device import DeviceVector


def described(x: Any, vector: Any) -> str:
    """Return dtype, shape, order and whereabouts of an array.

    Args:
        x: The array.
        vector: Its memory, see device.vector_of.
    """
    return f"{dtype_name(vector.dtype)} {tuple(x.shape)}{_more(x, vector)}"


def allreduce_call(op: str, x: Any, vector: Any, algorithm: str) -> Call:
    """Return what an allreduce is compared by."""
    return _allreduce_call(op, vector.dtype, tuple(x.shape), _more(x, vector), algorithm)


# Cached: a program makes the same few calls again and again.
@functools.lru_cache(maxsize=4096)
def _allreduce_call(
    op: str, dtype: np.dtype[Any], shape: tuple[int, ...], more: str, algorithm: str,
) -> Call:
    return Call("allreduce", f"{op} of {dtype_name(dtype)} {shape}{more}, algorithm {algorithm}",
                nbytes=dtype.itemsize * math.prod(shape))


def _more(x: Any, vector: Any) -> str:
    # Tensors, and what else has no flags, are seen in C's order only.
    in_order = x is vector or not hasattr(x, "flags") or order_of(x) == "C"
    order = "" if in_order else " in Fortran order"
    return order + " on a GPU" if isinstance(vector, DeviceVector) else order
