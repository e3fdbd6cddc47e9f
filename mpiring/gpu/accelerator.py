"""Uses PyTorch accelerators, including GPUs that are not from NVIDIA, without CuPy.

Copies and sums are PyTorch operations on separate streams. There are no other kernels, and
processes do not open each other's memory; data is sent through pinned host memory. GPUs of NVIDIA
and AMD appear as "cuda", GPUs of Intel as "xpu".

Any thread may call these functions, which leave its current device and stream unchanged.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import numpy as np
import torch

from ..errors import ConfigError, MissingDependencyError
from ..memory.arrays import SIXTEEN_BIT, Array, dtype_name
from ..memory.tensors import GPU_TYPES, torch_dtype
from ..remedies import pip_install_cupy
from .device import Device
from .interface import Alarm, DeviceVector, Event, Flags, Gpu, Mark, Program, failed
from .warps import WarpKernel

# cudaHostRegisterPortable; HIP uses the same value.
_PORTABLE = 1
_OPS = {"sum": torch.add, "mean": torch.add, "prod": torch.mul,
        "max": torch.maximum, "min": torch.minimum,
        "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}
# PyTorch computes these as signed integers. Sums, products and bits are the same; so is the order
# after the sign bits are inverted.
_UNSIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}

_devices: dict[torch.device, Device] = {}
_opening = threading.Lock()


def available(kind: str = "") -> torch.device:
    """Return the accelerator that PyTorch finds, of kind "cuda" or "xpu" if given.

    Raises MissingDependencyError if PyTorch finds none of that kind.
    """
    where = torch.accelerator.current_accelerator(check_available=True)
    if where is None or where.type not in ((kind,) if kind else GPU_TYPES):
        raise MissingDependencyError(
            f"PyTorch {torch.__version__} finds no GPU{kind and f' of kind {kind}'}: install a "
            f"build for it, as https://pytorch.org/get-started says, and run nvidia-smi (rocm-smi, "
            f"xpu-smi), which must list one")
    return where


def in_use(stream: torch.Stream) -> AbstractContextManager[Any]:
    """Make a stream the current one of this thread, in a `with` block."""
    # The object remembers the previous stream, so each use, in any thread, needs a separate object.
    same: AbstractContextManager[Any] = torch.Stream(
        stream.stream_id, stream.device_index, stream.device_type)
    return same


def device(where: torch.device, unshared: str) -> Device:
    """Return a PyTorch device as a Device; the same object each time.

    `unshared` is the reason why processes cannot share its memory, for messages.
    """
    with _opening:
        if where not in _devices:
            _devices[where] = Device(Accelerator(where, unshared))
        return _devices[where]


class AcceleratorEvent(Mark):
    """A mark in a PyTorch stream, after what is queued on it now."""

    def __init__(self, stream: torch.Stream) -> None:
        self._index = stream.device_index
        # `record_event` of a torch.cuda stream would return an event for torch.cuda streams only.
        self.event = torch.Event(stream.device)
        with torch.accelerator.device_index(self._index):
            self.event.record(stream)

    def _query(self) -> bool:
        # Otherwise, in a new thread, CUDA would open the first GPU.
        with torch.accelerator.device_index(self._index):
            return bool(self.event.query())


class AcceleratorStream:
    """A queue of work, which is a PyTorch stream; see gpu.Stream.

    Only one thread may call it at a time.
    """

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream
        # With a stream of another GPU alone, a thread would keep contexts on both GPUs.
        self._index = stream.device_index
        self._divisors: dict[tuple[torch.dtype, float], torch.Tensor] = {}

    def download(self, x: DeviceVector, out: Array) -> None:
        """Queue a copy to pinned host memory."""
        with torch.accelerator.device_index(self._index), self._stream:
            torch.from_numpy(out.view(np.uint8)).copy_(_bytes_of(x), non_blocking=True)

    def upload(self, x: Array, out: DeviceVector) -> None:
        """Queue a copy from pinned host memory."""
        with torch.accelerator.device_index(self._index), self._stream:
            _bytes_of(out).copy_(torch.from_numpy(x.view(np.uint8)), non_blocking=True)

    def combine(self, op: str, sources: Sequence[DeviceVector], divisor: float,
                outs: Sequence[DeviceVector], nonfinite: Alarm | None = None) -> None:
        """Queue an elementwise combination of vectors; see gpu.Stream."""
        dtype = torch_dtype(outs[0].dtype)
        xs, results = [[_elements_of(x, _UNSIGNED.get(dtype, dtype)) for x in vectors]
                       for vectors in (sources, outs)]
        function = _OPS[op]
        if op in ("max", "min") and dtype in _UNSIGNED:
            function = functools.partial(_with_signs_swapped, function)
        wide = dtype_name(outs[0].dtype) in SIXTEEN_BIT and (len(xs) > 2 or divisor != 1)
        # The first result is written before the third and later sources are read.
        overwrites = any(results[0].data_ptr() == x.data_ptr() for x in xs[2:])
        with torch.accelerator.device_index(self._index), self._stream:
            total = torch.empty_like(results[0], dtype=torch.float32 if wide else None) if (
                wide or overwrites) else results[0]
            if wide or len(xs) == 1:
                _copy(total, xs[0])
            else:
                function(xs[0], xs[1], out=total)
            for x in xs[1 if wide else 2:]:
                function(total, x, out=total)
            if divisor != 1:
                torch.div(total, self._number(divisor, total.dtype), out=total)
            for result in results:
                _copy(result, total)

    def _number(self, value: float, dtype: torch.dtype) -> torch.Tensor:
        """Return a number on the GPU; for a number on the host, PyTorch multiplies by 1 / x."""
        if (dtype, value) not in self._divisors:
            self._divisors[dtype, value] = torch.full(
                (), value, dtype=dtype, device=self._stream.device)
        return self._divisors[dtype, value]

    def meet(self, flags: Flags, number: int) -> None:
        """Raise MissingDependencyError, because PyTorch has no such operation."""
        raise MissingDependencyError(f"barriers of streams need CuPy: {pip_install_cupy()}")

    def repeat(self, program: Program, ready: Sequence[Event], flags: Flags, number: int,
               nonfinite: Alarm) -> Event:
        """Raise MissingDependencyError, as `meet` does."""
        self.meet(flags, number)
        return self.record()

    def call(self, queue: Callable[[int], None]) -> None:
        """Call a function that queues work on the stream, which is one of CUDA or HIP."""
        stream = torch.cuda.Stream(
            stream_id=self._stream.stream_id, device_index=self._index,
            device_type=self._stream.device_type)
        with torch.accelerator.device_index(self._index):
            queue(stream.cuda_stream)

    def clear(self, x: DeviceVector) -> None:
        """Queue filling a vector with zeros."""
        with torch.accelerator.device_index(self._index), self._stream:
            _bytes_of(x).zero_()

    def launch(self, kernel: WarpKernel, function: Callable[..., None], *arguments: Any) -> None:
        """Raise MissingDependencyError, because kernels need CuPy."""
        raise MissingDependencyError(f"{kernel.name} needs CuPy: {pip_install_cupy()}")

    def record(self) -> AcceleratorEvent:
        """Return a mark behind all queued work."""
        return AcceleratorEvent(self._stream)

    def wait(self, event: Event) -> None:
        """Make work that is queued from now on wait for a PyTorch event."""
        with torch.accelerator.device_index(self._index):
            self._stream.wait_event(_of_pytorch(event))

    def synchronize(self) -> None:
        """Wait until all queued work is done; see gpu.Stream."""
        try:
            with torch.accelerator.device_index(self._index):
                self._stream.synchronize()
        except RuntimeError as error:
            raise failed(error) from error


class Accelerator(Gpu):
    """A PyTorch accelerator; see gpu.Gpu."""

    programmable = False
    unqueued = "by CuPy, on NVIDIA's GPUs, only"

    def __init__(self, where: torch.device, unshared: str) -> None:
        self._where, self.unshared = where, unshared
        self.index = where.index
        self.name = f"GPU {where} ({torch.get_device_module(where).get_device_name(where)})"
        # PyTorch's allocator reuses blocks only for callers that allocate on the same stream.
        self._home = torch.Stream(where)
        self._streams: list[torch.Stream] = []
        self._lock = threading.Lock()

    @functools.cached_property
    def address(self) -> str:  # type: ignore[override]
        """The number by which NCCL's users know it; "" if it is no GPU of CUDA or HIP."""
        if self._where.type != "cuda":
            return ""
        return str(torch.cuda.get_device_properties(self._where).uuid)

    def current(self) -> AbstractContextManager[Any]:
        """Make it the thread's current GPU in a `with` block."""
        context: AbstractContextManager[Any] = torch.accelerator.device_index(self.index)
        return context

    def stream(self) -> AcceleratorStream:
        """Return a new stream."""
        stream = torch.Stream(self._where)
        self._streams.append(stream)
        return AcceleratorStream(stream)

    def user_stream(self, stream: Any = None) -> AcceleratorStream:
        """Return a PyTorch stream, by default the current one."""
        return AcceleratorStream(stream or torch.accelerator.current_stream(self._where))

    def array(self, x: DeviceVector, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor of this shape that shares a vector's memory, for the current stream."""
        x.owner.record_stream(torch.accelerator.current_stream(self._where))
        return _elements_of(x, torch_dtype(x.dtype)).view(shape)

    def is_finite(self, x: torch.Tensor) -> bool:
        """Return whether a tensor is finite; wait for the work on the user's stream."""
        return bool(torch.isfinite(x).all())

    def allocate(self, nbytes: int, device: Device) -> DeviceVector:
        """Return memory of the GPU; see gpu.Gpu."""
        try:
            with (torch.inference_mode(False), torch.accelerator.device_index(self.index),
                  self._lock, self._home):
                memory = torch.empty(nbytes, dtype=torch.uint8, device=self._where)
                # With deterministic algorithms, PyTorch fills the memory asynchronously.
                self._home.synchronize()
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"{nbytes} bytes on {self.name}: {error}") from error
        # After the tensor is freed, PyTorch waits for these streams before it reuses the block.
        for stream in self._streams:
            memory.record_stream(stream)
        return DeviceVector(device, memory.data_ptr(), nbytes, np.dtype(np.uint8), memory)

    def pinned(self, nbytes: int) -> Array:
        """Return page-locked host memory, as bytes."""
        with torch.inference_mode(False), torch.accelerator.device_index(self.index):
            memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        array: Array = memory.numpy()
        return array

    def _register(self, address: int, nbytes: int) -> tuple[int, str]:
        if self._where.type != "cuda":
            return -1, f"PyTorch cannot do that for {self._where.type}"
        with torch.accelerator.device_index(self.index):
            status = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))
            if status:
                # CUDA keeps an error until the next call, which must not be the user's kernel.
                with suppress(RuntimeError):
                    torch.zeros(1, device=self._where)
        return status, f"cudaHostRegister's status {status}"

    def _unregister(self, address: int) -> None:
        # At the end of the process, CUDA may already be shut down.
        with suppress(RuntimeError), torch.accelerator.device_index(self.index):
            torch.cuda.cudart().cudaHostUnregister(address)


def _of_pytorch(event: Event) -> torch.Event:
    if not isinstance(event, AcceleratorEvent):
        raise ConfigError(f"{event!r} is no event of PyTorch's")
    return event.event


def _bytes_of(x: DeviceVector) -> torch.Tensor:
    return _tensor_at(x, torch.uint8, x.dtype.itemsize * x.size)


def _elements_of(x: DeviceVector, dtype: torch.dtype) -> torch.Tensor:
    """Return a vector's memory as a tensor, of a PyTorch dtype with the vector's item size."""
    return _tensor_at(x, dtype, x.size)


def _tensor_at(x: DeviceVector, dtype: torch.dtype, n: int) -> torch.Tensor:
    # The owner cannot be viewed, because it may have any shape and dtype, and require a gradient.
    storage = x.owner.untyped_storage()
    start = (x.address - storage.data_ptr()) // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=x.owner.device).set_(storage, start, (n,), (1,))


def _copy(out: torch.Tensor, x: torch.Tensor) -> None:
    if out.data_ptr() != x.data_ptr():
        out.copy_(x)


def _with_signs_swapped(function: Callable[..., torch.Tensor], a: torch.Tensor, b: torch.Tensor,
                        out: torch.Tensor) -> None:
    """Apply a function that orders signed numbers to unsigned numbers."""
    a, b = (_sign_swapped(x, torch.empty_like(x)) for x in (a, b))
    _sign_swapped(function(a, b, out=a), out)


def _sign_swapped(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return torch.bitwise_xor(x, torch.iinfo(x.dtype).min, out=out)
