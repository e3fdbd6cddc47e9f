"""Views arrays and tensors, in host memory and on GPUs, as vectors."""

import functools
import math
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ..errors import ConfigError, MissingDependencyError
from ..memory.arrays import flat
from ..memory.tensors import GPU_TYPES, array_of, is_tensor, numpy_dtype, refuse_gaps
from .device import Device
from .interface import DeviceVector, Event, Stream

if TYPE_CHECKING:
    import torch


def device_named(requested: "str | Device", local_rank: int) -> Device:
    """Return the GPU with this name.

    The name is "cuda", or "cuda:" and a number; "cuda" assigns the node's GPUs to ranks in turn.

    Raises:
        ConfigError: There is no such GPU.
        MissingDependencyError: CuPy is not installed.
    """
    if isinstance(requested, Device):
        return requested
    kind, index = gpu_named(requested)
    if kind != "cuda":
        raise ConfigError(f"device={str(requested)!r}: NumPy programs support only NVIDIA GPUs, "
                          f"through CuPy; expected cpu, cuda, or cuda: and a number")
    from . import cuda
    return cuda.device(local_rank % cuda.count() if index is None else index)


def gpu_named(requested: object) -> tuple[str, int | None]:
    """Return the kind and the number in a name like "cuda:1"; the number is None in "cuda".

    Raises ConfigError for an object that does not print as the name of a GPU.
    """
    match = re.fullmatch(rf"({'|'.join(GPU_TYPES)})(?::(\d+))?", str(requested), re.ASCII)
    if match is None:
        raise ConfigError(f"device={str(requested)!r}: expected cpu, cuda, or cuda: and a number; "
                          f"xpu for Intel GPUs")
    return match[1], int(match[2]) if match[2] else None


def vector_of(x: Any, *, writeable: bool = True) -> Any:
    """Return the elements of an array as a vector that shares its memory, on any device.

    A GPU's DeviceVector is ready after the work that is now queued on the user's stream. If
    `writeable`, arrays that cannot be written to are refused.

    Raises:
        ConfigError: As for `memory.arrays.flat`.
        MissingDependencyError: The array is on a GPU, and CuPy is not installed.
    """
    # NumPy arrays come first, because an allreduce on one node takes only 10 µs.
    if type(x) is not np.ndarray:
        if isinstance(x, DeviceVector):
            return x
        if is_tensor(x):
            if not is_gpu_tensor(x):
                return array_of(x)
            return replace(_ready(*on_stream(x)), stream=CurrentStream(x.device))
        if is_on_gpu(x):
            return vector_on_gpu(x, writeable=writeable)
    return flat(x, writeable=writeable)


def seen_on_gpu(x: Any) -> tuple[Any, ...] | None:
    """Return what a collective sees of a CuPy array, or of a tensor on a GPU.

    If it is equal for two arrays, calls on them are equal. Return None for other arrays.
    """
    if is_tensor(x):
        return (type(x), x.dtype, x.shape) if is_gpu_tensor(x) else None
    kind: Any = getattr(sys.modules.get("cupy"), "ndarray", ())
    return (type(x), x.dtype, x.shape, x.flags.c_contiguous) if isinstance(x, kind) else None


def on_stream(x: Any) -> tuple[DeviceVector, Stream]:
    """Return the elements of a CuPy array, or of a tensor on a GPU, and the user's stream.

    The vector shares the array's memory. The stream is the current one of CuPy or PyTorch. Raises
    ConfigError if the array is not contiguous.
    """
    if is_tensor(x):
        refuse_gaps(x)
        user = TorchStream(x.device)
        return user.vector(x), user.stream()
    from . import cuda
    _refuse_strides(x.shape, x.strides, x.flags.c_contiguous or x.flags.f_contiguous)
    device = cuda.device(x.device.id)
    return device.vector_at(x.data.ptr, x.size, x.dtype, x), device.gpu.user_stream()


def _ready(vector: DeviceVector, stream: Stream) -> DeviceVector:
    """Return a vector that is ready after the work that is now queued on a stream."""
    return replace(vector, ready=stream.record()) if vector.size else vector


def is_on_gpu(x: Any) -> bool:
    """Return whether `x` is on a GPU, as a CuPy array or with `__cuda_array_interface__`."""
    try:
        return hasattr(x, "__cuda_array_interface__")
    except RuntimeError:
        # Raised by a PyTorch tensor on a GPU that requires a gradient.
        return True


def vector_on_gpu(x: Any, *, writeable: bool = True) -> DeviceVector:
    """Return the elements of an array on a GPU as a vector that shares its memory.

    The vector is ready after the work that is now queued on the producer's stream: CuPy's current
    stream, or the stream that the array's interface names.

    The array is a CuPy array, C- or Fortran-contiguous, or an object with
    `__cuda_array_interface__`, C-contiguous. If `writeable`, it must not be read-only.

    Raises:
        ConfigError: The object is not such an array, or is masked, not contiguous, or read-only.
        MissingDependencyError: CuPy or a GPU is missing.

    Source: CUDA Array Interface, version 3 (Numba's documentation).
    """
    from . import cuda
    package = cuda.cupy()
    if isinstance(x, package.ndarray):
        return _ready(*on_stream(x))
    interface = _interface_of(x)
    if interface is None:
        raise ConfigError(
            f"expected a cupy.ndarray, got {type(x).__module__}.{type(x).__qualname__}; "
            f"convert it with cupy.asarray, or send it with broadcast_object")
    if interface.get("mask") is not None:
        raise ConfigError("masked arrays would lose their mask; pass x.filled(...) instead")
    shape, dtype = tuple(interface["shape"]), np.dtype(interface["typestr"])
    strides = interface.get("strides")
    # Without strides, the array is C-contiguous.
    _refuse_strides(shape, strides, strides is None or as_strided(
        np.empty((), dtype), shape, strides).flags.c_contiguous)
    address, read_only = interface["data"]
    if writeable and read_only:
        raise ConfigError(f"array of shape {shape} is read-only; pass a copy: x.copy()")
    runtime = package.cuda.runtime
    device = cuda.device(
        runtime.pointerGetAttributes(address).device if address else runtime.getDevice())
    vector, stream = device.vector_at(address, math.prod(shape), dtype, x), interface.get("stream")
    # Without a stream, the memory is ready. 1 is the default stream.
    return vector if stream is None else _ready(vector, device.gpu.user_stream(stream))


def _interface_of(x: Any) -> Any:
    try:
        interface = getattr(x, "__cuda_array_interface__", None)
    except RuntimeError as error:
        raise ConfigError(f"{type(x).__module__}.{type(x).__qualname__}: {error}") from error
    if interface is not None and interface["version"] < 3:
        raise ConfigError(
            f"{type(x).__module__}.{type(x).__qualname__} does not say on which stream it was "
            f"written; pass cupy.asarray(x)")
    return interface


def is_gpu_tensor(x: "torch.Tensor") -> bool:
    """Return whether a tensor is in a GPU's memory."""
    return x.device.type in OPENERS


@functools.cache
def device_of(where: "torch.device") -> Device:
    """Return a PyTorch device as a Device; the same object each time."""
    return OPENERS[where.type](where)


def _by_pytorch(where: "torch.device", unshared: str = "by CuPy, and on NVIDIA's GPUs, only",
                ) -> Device:
    from . import accelerator
    return accelerator.device(where, unshared)


def _by_cupy(where: "torch.device") -> Device:
    """Open an NVIDIA GPU through CuPy if it is installed, and other GPUs through PyTorch."""
    if sys.modules["torch"].version.hip is not None:
        return _by_pytorch(where)
    from . import cuda
    try:
        return cuda.device(where.index)
    except MissingDependencyError as error:
        return _by_pytorch(where, str(error))


# Functions that open a GPU, by the type of the PyTorch device.
OPENERS: "dict[str, Callable[[torch.device], Device]]" = {"cuda": _by_cupy, "xpu": _by_pytorch}


class TorchStream:
    """The stream that PyTorch uses on this thread; in an autograd hook, the tensor's stream."""

    def __init__(self, where: "torch.device") -> None:
        self._where = where
        self._stream = sys.modules["torch"].get_device_module(where).current_stream(where)

    def device(self) -> Device:
        """Return the GPU."""
        return device_of(self._where)

    def vector(self, x: "torch.Tensor") -> DeviceVector:
        """Return a contiguous tensor's elements, which are ready when a `mark` is done."""
        return self.device().vector_at(x.data_ptr(), x.numel(), numpy_dtype(x.dtype), x)

    def stream(self) -> Stream:
        """Return the stream, to queue copies on it."""
        return self.device().gpu.user_stream(self._stream)

    def mark(self) -> Event:
        """Return a mark behind all work queued on it."""
        return self.stream().record()

    def follow(self, event: Event) -> None:
        """Make work that is queued on it from now on wait for an event."""
        self.device().gpu.follow(event, self._stream)

    def in_use(self) -> AbstractContextManager[Any]:
        """Make it the current stream of this thread in a `with` block."""
        context: AbstractContextManager[Any] = self._stream
        return context


class CurrentStream:
    """The stream that PyTorch uses on the calling thread at the time of a call."""

    def __init__(self, where: "torch.device") -> None:
        self._where = where

    def mark(self) -> Event:
        """Return a mark behind all work queued on it."""
        return TorchStream(self._where).mark()

    def follow(self, event: Event) -> None:
        """Make work that is queued on it from now on wait for an event."""
        TorchStream(self._where).follow(event)


def stream_of(x: "torch.Tensor") -> TorchStream | None:
    """Return the current stream of a tensor's GPU; None for a tensor in host memory."""
    return TorchStream(x.device) if is_gpu_tensor(x) else None


def _refuse_strides(shape: Sequence[int], strides: object, dense: bool) -> None:
    if not dense:
        raise ConfigError(
            f"array of shape {shape} with strides {strides} is not contiguous, so it cannot "
            f"be combined in place; pass a contiguous array: y = cupy.ascontiguousarray(x), "
            f"and afterwards x[...] = y")
