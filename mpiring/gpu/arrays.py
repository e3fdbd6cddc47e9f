"""Sees arrays and tensors on NVIDIA's GPUs as vectors."""

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike

from ..errors import ConfigError
from .arrays import dtype_name
from .cuda import Cuda, CudaEvent, cupy, device
from .device import DeviceVector


def vector_of(x: Any, *, writeable: bool = True) -> DeviceVector:
    """Return the elements of an array on a GPU as a vector that shares its memory.

    It is ready when what is now queued on the producer's stream is done: on the current one for
    a CuPy array, on that which the interface names for any other.

    Args:
        x: A CuPy array, C- or Fortran-contiguous; or what has `__cuda_array_interface__`,
            C-contiguous: ranks could not compare the orders of others.
        writeable: Refuse arrays that cannot be written to.

    Raises:
        ConfigError: Not such an array, masked, not contiguous, or read-only.
        MissingDependencyError: There is no CuPy or no GPU.

    Source: CUDA Array Interface, version 3 (Numba's documentation).
    """
    package = cupy()
    if isinstance(x, package.ndarray):
        _refuse_gaps(x.shape, x.strides, x.flags.c_contiguous or x.flags.f_contiguous)
        stream = package.cuda.get_current_stream(x.device.id).ptr
        return vector_at(x.data.ptr, x.size, x.dtype, x.device.id, stream, x)
    interface = _interface_of(x)
    if interface is None:
        raise ConfigError(
            f"expected a cupy.ndarray, got {type(x).__module__}.{type(x).__qualname__}; "
            f"convert it with cupy.asarray, or send it with broadcast_object")
    if interface.get("mask") is not None:
        raise ConfigError("masked arrays would lose their mask; pass x.filled(...) instead")
    shape, dtype = tuple(interface["shape"]), np.dtype(interface["typestr"])
    strides = interface.get("strides")
    # Without strides it is C-contiguous.
    _refuse_gaps(shape, strides, strides is None or _is_dense(shape, strides, dtype.itemsize))
    address, read_only = interface["data"]
    if writeable and read_only:
        raise ConfigError(f"array of shape {shape} is read-only; pass a copy: x.copy()")
    runtime = package.cuda.runtime
    index = runtime.pointerGetAttributes(address).device if address else runtime.getDevice()
    return vector_at(address, math.prod(shape), dtype, index, interface.get("stream"), x)


def _interface_of(x: Any) -> Any:
    """Return how an array describes itself; None if it is none."""
    try:
        interface = getattr(x, "__cuda_array_interface__", None)
    except RuntimeError as error:
        raise ConfigError(f"{type(x).__module__}.{type(x).__qualname__}: {error}") from error
    if interface is not None and interface["version"] < 3:
        raise ConfigError(
            f"{type(x).__module__}.{type(x).__qualname__} does not tell on which stream it was "
            f"written; for a tensor of PyTorch, import mpiring.torch; else pass cupy.asarray(x)")
    return interface


def vector_at(address: int, n: int, dtype: DTypeLike, index: int, stream: int | None,
              owner: object) -> DeviceVector:
    """Return memory of a GPU as a vector.

    Args:
        address: Of the first of `n` elements; 0 where there are none.
        dtype: Of NumPy's, or bfloat16 of ml_dtypes.
        index: Of the GPU.
        stream: CUDA's pointer of the stream on which it was written last, as the CUDA Array
            Interface has it: 1 is the default stream; None where that is done.
        owner: Keeps the memory alive.

    Raises:
        ConfigError: The dtype cannot travel, or there is no such GPU.
        MissingDependencyError: There is no CuPy or no GPU.
    """
    dtype_name(dtype)
    on = device(index)
    ready = None
    if stream is not None and n:
        cuda = cast(Cuda, on.gpu)
        with cuda.current():
            ready = CudaEvent(cuda, stream)
    return DeviceVector(on, address, n, np.dtype(dtype), owner, ready)


def _refuse_gaps(shape: Sequence[int], strides: object, dense: bool) -> None:
    if not dense:
        raise ConfigError(
            f"array of shape {shape} with strides {strides} is not contiguous, so it cannot "
            f"be combined in place; pass a contiguous array: y = cupy.ascontiguousarray(x), "
            f"and afterwards x[...] = y")


def _is_dense(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Return whether elements lie one behind the other, in C's order."""
    expected = [itemsize * math.prod(shape[axis + 1:]) for axis in range(len(shape))]
    return not all(shape) or all(
        length == 1 or stride == right for length, stride, right in zip(shape, strides, expected))
