"""Sees what the face's methods are called with: ops by name, and calls as ranks compare them."""

import functools
import math
import sys
from typing import Any

import numpy as np

from ..config import ALGORITHMS
from ..errors import ConfigError
from ..gpu.base import DeviceVector, address_of
from ..memory.arrays import dtype_name
from ..memory.reduction import OPS
from .agreement import Call

# What mpi4py calls the ops, and what they are here. The logical ones mean the same on bool only:
# on numbers MPI leaves 0 and 1.
_OF_MPI = {"SUM": "sum", "PROD": "prod", "MAX": "max", "MIN": "min",
           "BAND": "band", "BOR": "bor", "BXOR": "bxor"}
_LOGICAL_OF_MPI = {"LAND": "band", "LOR": "bor", "LXOR": "bxor"}


def described(x: Any, vector: Any) -> str:
    """Return dtype, shape, order and whereabouts of an array.

    Args:
        x: The array.
        vector: Its memory, see device.vector_of.
    """
    return f"{dtype_name(vector.dtype)} {_shape(x, vector)}{_more(x, vector)}"


def op_named(op: Any, dtype: "np.dtype[Any]") -> str:
    """Return the name of an op that may be one of mpi4py's, such as `MPI.SUM`.

    Args:
        dtype: Of what is combined.

    Raises:
        ConfigError: It is neither a text nor an op that has a name here; says what to write.
    """
    if isinstance(op, str):
        return op
    # Who has such an op has imported mpi4py.
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and isinstance(op, mpi.Op):
        for theirs, name in (_OF_MPI | _LOGICAL_OF_MPI).items():
            if op == getattr(mpi, theirs):
                if theirs in _OF_MPI or dtype.kind == "b":
                    return name
                raise ConfigError(f"op=MPI.{theirs} on {dtype_name(dtype)}: it is taken on bool "
                                  f"only; combine x != 0 with op={name!r}")
    raise ConfigError(f"op={op!r}: expected one of {', '.join(OPS)}, or one of mpi4py's "
                      f"MPI.{', MPI.'.join(_OF_MPI)}")


def allreduce_call(op: str, x: Any, vector: Any, algorithm: str) -> Call:
    """Return what an allreduce is compared by."""
    if not isinstance(algorithm, str):
        raise ConfigError(f"algorithm={algorithm!r}: expected one of {', '.join(ALGORITHMS)}")
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
