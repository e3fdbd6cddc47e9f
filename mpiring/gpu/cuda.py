"""Uses NVIDIA GPUs through CuPy, which only this file imports, when a GPU is first needed.

Any thread may call these functions, which leave its current device unchanged. There is one
exception: if a thread has not used a GPU before, the GPU used here stays current. Switching back
would open a context of several hundred MB on a GPU that may never be used.
"""

import functools
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import numpy as np

from ..errors import ConfigError, MissingDependencyError, TransportError
from ..memory.arrays import COMPLEX, FLOATING, Array, data_address, dtype_name
from ..remedies import pip_install_cupy
from . import kernels
from .device import Device
from .interface import Alarm, DeviceVector, Event, Flags, Gpu, Mark, Program, await_event, failed
from .kernels import Kernel
from .stream_memory import ALL_BITS, Barrier, driver
from .warps import WARP, WarpKernel

# cudaErrorNotReady, cudaHostRegisterPortable with cudaHostRegisterMapped, and
# cudaDevAttrCanUseHostPointerForRegisteredMem of CUDA's runtime, which CuPy does not name.
_NOT_READY, _PORTABLE_MAPPED, _SAME_ADDRESSES = 600, 3, 91
# cudaMalloc places smaller allocations in blocks of this size. Other processes can only open
# complete blocks, so each allocation has its own block.
_BLOCK_BYTES = 2 << 20
# Number of thread blocks that keep a multiprocessor busy; loops in the kernels do the rest.
_BLOCKS_EACH = 8

_UNCHANGED = nullcontext()

_devices: dict[int, Device] = {}
_opening = threading.Lock()


@functools.cache
def cupy() -> Any:
    """Return CuPy; raise MissingDependencyError if it, a GPU or the compiler is missing."""
    try:
        import cupy as package
    except ImportError as error:
        raise MissingDependencyError(
            f"a GPU's memory needs CuPy: {pip_install_cupy()}; {error}") from error
    try:
        package.cuda.runtime.getDeviceCount()
    except RuntimeError as error:
        raise MissingDependencyError(
            f"CuPy {package.__version__} finds no GPU: {error}; run nvidia-smi, which must list "
            f"one, and look at CUDA_VISIBLE_DEVICES") from error
    try:
        package.cuda.nvrtc.getVersion()
    except RuntimeError as error:
        raise MissingDependencyError(
            f"CuPy {package.__version__} cannot compile kernels: {pip_install_cupy('[ctk]')}; "
            f"{str(error).partition(chr(10))[0]}") from error
    return package


def versions() -> str:
    """Return the versions of CuPy, CUDA and the driver, or raise MissingDependencyError."""
    package = cupy()
    runtime = package.cuda.runtime
    return (f"CuPy {package.__version__}, CUDA {runtime.runtimeGetVersion()}, "
            f"driver {runtime.driverGetVersion()}")


def count() -> int:
    """Return the number of GPUs that this process sees, or raise MissingDependencyError."""
    return int(cupy().cuda.runtime.getDeviceCount())


def device(index: int) -> Device:
    """Return a GPU, the same object each time; for the number and errors, see Cuda."""
    with _opening:
        if index not in _devices:
            _devices[index] = Device(Cuda(index))
        return _devices[index]


class CudaEvent(Mark):
    """A mark in one of a GPU's streams; the GPU must be current."""

    def __init__(self, cuda: "Cuda", stream: int) -> None:
        self._cuda = cuda
        # CuPy destroys the event with this object, which may be before the GPU reaches the event.
        self._event = cuda.cupy.cuda.Event(block=False, disable_timing=True)
        cuda.runtime.eventRecord(self._event.ptr, stream)
        self.pointer = self._event.ptr

    def _query(self) -> bool:
        runtime = self._cuda.runtime
        # Otherwise, in a new thread, CUDA would open the first GPU.
        with self._cuda.current():
            status = runtime.eventQuery(self.pointer)
        if status not in (0, _NOT_READY):
            raise runtime.CUDARuntimeError(status)
        return bool(status == 0)


def _pointer_of(event: Event) -> Any:
    if not isinstance(event, CudaEvent):
        raise ConfigError(f"{event!r} is no event of CUDA's")
    return event.pointer


class CudaStream:
    """A queue of a GPU's work; see gpu.Stream.

    By default, it is a new stream, separate from the default stream. With the `pointer` of a user's
    stream, only copies and marks can be queued.
    """

    def __init__(self, cuda: "Cuda", pointer: int | None = None) -> None:
        self._cuda = cuda
        self._user = pointer

    @functools.cached_property
    def _stream(self) -> Any:
        # CUDA runs the streams of a process in few hardware queues, so none is made in vain.
        with self._cuda.current():
            return self._cuda.cupy.cuda.Stream(non_blocking=True)

    @functools.cached_property
    def _pointer(self) -> Any:
        return self._stream.ptr if self._user is None else self._user

    def download(self, x: DeviceVector, out: Array) -> None:
        """Queue a copy to pinned host memory."""
        self._copy(data_address(out), x.address, out.nbytes)

    def upload(self, x: Array, out: DeviceVector) -> None:
        """Queue a copy from pinned host memory."""
        self._copy(out.address, data_address(x), x.nbytes)

    def combine(self, op: str, sources: Sequence[DeviceVector], divisor: float,
                outs: Sequence[DeviceVector], nonfinite: Alarm | None = None) -> None:
        """Queue an elementwise combination of vectors; see gpu.Stream."""
        with self._cuda.current():
            self._sum(op, sources, divisor, outs, nonfinite is not None)(nonfinite)

    def _sum(self, op: str, sources: Sequence[DeviceVector], divisor: float,
             outs: Sequence[DeviceVector], alarmed: bool) -> Callable[[Alarm | None], None]:
        """Return a function that queues a combination, with another alarm each time."""
        x = outs[0]
        if len(sources) == 1 and divisor == 1 and not alarmed:
            return functools.partial(self._copy_to, sources[0], outs)
        divides, by = kernels.division(x.dtype, divisor)
        alarmed = alarmed and dtype_name(x.dtype) in (*FLOATING, *COMPLEX)
        kernel = kernels.combine("sum" if op == "mean" else op, x.dtype, len(sources), len(outs),
                                 divides, alarmed)
        read, written = [[vector.address for vector in vectors] for vectors in (sources, outs)]
        cut = kernels.packing([*read, *written], x.size, x.itemsize)
        job = kernel.job(sources=read, outs=written, n=x.size, head=cut.head, packs=cut.packs,
                         divisor=by)
        launch = self._launcher(kernel, cut.work, job)

        def queue(nonfinite: Alarm | None) -> None:
            if alarmed and nonfinite is not None:
                word, number = nonfinite
                job["word"], job["number"] = data_address(word), number & ALL_BITS
            launch()

        return queue

    def meet(self, flags: Flags, number: int) -> None:
        """Queue a barrier of a node; see gpu.Stream. Raises TransportError if CUDA refuses it."""
        with self._cuda.current():
            self._meet(flags, number)

    def _meet(self, flags: Flags, number: int) -> None:
        cuda = self._cuda
        status = cuda.barrier(flags).queue(self._pointer, number)
        if status:
            error = cuda.runtime.CUDARuntimeError(status)
            raise TransportError(f"the GPU failed: cuStreamBatchMemOp, barrier {number} of "
                                 f"{len(flags.words)} ranks: {error}")

    def repeat(self, program: Program, ready: Sequence[Event], flags: Flags, number: int,
               nonfinite: Alarm) -> CudaEvent:
        """Queue the work of a program again; see gpu.Stream."""
        with self._cuda.current():
            if program.prepared is None:
                program.prepared = [
                    self._sum(*step) if isinstance(step, tuple) else
                    None if step is None else functools.partial(self._call, step)
                    for step in program.steps]
            for event in ready:
                self._cuda.runtime.streamWaitEvent(self._pointer, _pointer_of(event))
            for queue in program.prepared:
                if queue is None:
                    self._meet(flags, number)
                    number += 1
                else:
                    queue(nonfinite)
            return CudaEvent(self._cuda, self._pointer)

    def call(self, queue: Callable[[int], None]) -> None:
        """Call a function that queues work on the stream; see gpu.Stream."""
        with self._cuda.current():
            queue(self._pointer)

    def _call(self, queue: Callable[[int], None], _: object) -> None:
        queue(self._pointer)

    def clear(self, x: DeviceVector) -> None:
        """Queue filling a vector with zeros."""
        with self._cuda.current():
            self._cuda.runtime.memsetAsync(x.address, 0, x.nbytes, self._pointer)

    def launch(self, kernel: WarpKernel, function: Callable[..., None], *arguments: Any) -> None:
        """Queue a kernel; see gpu.Stream."""
        n = arguments[0].size
        values = [x.address if isinstance(x, DeviceVector) else x or 0 for x in arguments]
        job = kernel.job(n=n, **dict(zip(kernel.parameters.names or (), values)))
        with self._cuda.current():
            self._launcher(kernel, -(-n // kernel.block) * WARP, job)()

    def _launcher(self, kernel: Kernel, work: int, job: Array) -> Callable[[], None]:
        """Return a function that queues a kernel with a job.

        It has at most as many threads as there are units of work. The GPU must be current.
        """
        blocks = max(1, min(-(-work // kernels.THREADS), self._cuda.max_blocks))
        return functools.partial(
            kernels.built(kernel, self._cuda.cupy.cuda, self._cuda.index),
            (blocks,), (kernels.THREADS,), (kernel.opaque(job),), stream=self._stream)

    def record(self) -> CudaEvent:
        """Return a mark behind all queued work."""
        with self._cuda.current():
            return CudaEvent(self._cuda, self._pointer)

    def wait(self, event: Event) -> None:
        """Make work that is queued from now on wait for a CUDA event."""
        # CUDA's default stream belongs to the current device.
        with self._cuda.current():
            self._cuda.runtime.streamWaitEvent(self._pointer, _pointer_of(event))

    def synchronize(self) -> None:
        """Wait until all queued work is done; see gpu.Stream."""
        try:
            with self._cuda.current():
                self._cuda.runtime.streamSynchronize(self._pointer)
        except RuntimeError as error:
            raise failed(error) from error

    def _copy_to(self, x: DeviceVector, outs: Sequence[DeviceVector], _: object) -> None:
        for out in outs:
            if out.address != x.address:
                self._copy(out.address, x.address, out.nbytes)

    def _copy(self, to: int, source: int, nbytes: int) -> None:
        runtime = self._cuda.runtime
        with self._cuda.current():
            # CUDA recognizes GPU memory by its address.
            runtime.memcpyAsync(to, source, nbytes, runtime.memcpyDefault, self._pointer)


class _Memory:
    """A plain allocation, which other processes can open.

    Freeing it waits for all work queued on the GPU, so it should live long.
    """

    def __init__(self, cuda: "Cuda", nbytes: int) -> None:
        nbytes = max(1, -(-nbytes // _BLOCK_BYTES)) * _BLOCK_BYTES
        try:
            self.address = cuda.runtime.malloc(nbytes)
        except RuntimeError:
            # CuPy may cache memory of dead arrays.
            cuda.cupy.get_default_memory_pool().free_all_blocks()
            try:
                self.address = cuda.runtime.malloc(nbytes)
            except RuntimeError as error:
                raise MemoryError(f"{nbytes} bytes on {cuda.name}: {error}") from error
        weakref.finalize(self, cuda.free, self.address).atexit = False


class Cuda(Gpu):
    """An NVIDIA GPU; see gpu.Gpu.

    `index` is the number of the GPU among those that this process sees, as in CUDA. `runtime` is
    CuPy's module for CUDA's runtime. `max_blocks` is the largest number of blocks in one launch.

    Raises:
        MissingDependencyError: CuPy or a GPU is missing.
        ConfigError: There is no GPU with this index.
    """

    def __init__(self, index: int) -> None:
        self.cupy = cupy()
        self.runtime = self.cupy.cuda.runtime
        count = self.runtime.getDeviceCount()
        if not 0 <= index < count:
            raise ConfigError(f"GPU {index}: this process sees {count}, counted from 0")
        self.index = index
        properties = self.runtime.getDeviceProperties(index)
        self.name = f"GPU {index} ({properties['name'].decode()})"
        self.max_blocks = _BLOCKS_EACH * properties["multiProcessorCount"]
        self._barriers: weakref.WeakKeyDictionary[Flags, Barrier] = weakref.WeakKeyDictionary()
        self.unqueued = self._reason_unqueued()

    def _reason_unqueued(self) -> str:
        try:
            driver()
            if not self.runtime.deviceGetAttribute(_SAME_ADDRESSES, self.index):
                return "it sees host memory at other addresses than the host"
            # A barrier with itself, because some drivers have the function but refuse it.
            word = self.pinned(4).view(np.uint32)
            stream = self.stream()
            stream.meet(Flags([word, word], 0), 1)
            await_event(stream.record())
        except (OSError, TransportError) as error:
            return str(error)
        return ""

    @functools.cached_property
    def address(self) -> str:  # type: ignore[override]
        """The address on the PCI bus."""
        return str(self.cupy.cuda.Device(self.index).pci_bus_id)

    def barrier(self, flags: Flags) -> Barrier:
        """Return the barrier of a node's ranks, the same object each time."""
        barrier = self._barriers.get(flags)
        if barrier is None:
            barrier = self._barriers[flags] = Barrier(flags)
        return barrier

    def current(self) -> AbstractContextManager[None]:
        """Make it the thread's current device in a `with` block."""
        before = self.runtime.getDevice()
        return _UNCHANGED if before == self.index else self._switched(before)

    @contextmanager
    def _switched(self, before: int) -> Iterator[None]:
        used = self.cupy.cuda.driver.ctxGetCurrent() != 0
        self.runtime.setDevice(self.index)
        try:
            yield
        finally:
            if used:
                self.runtime.setDevice(before)

    def stream(self) -> CudaStream:
        """Return a new stream."""
        return CudaStream(self)

    def user_stream(self, stream: Any = None) -> CudaStream:
        """Return a PyTorch stream, a stream at a pointer, or CuPy's current stream."""
        return CudaStream(self, self._pointer_of(stream))

    # A bucket is marked and followed in each step, which these methods do in few calls.

    def mark(self, stream: Any = None) -> CudaEvent:
        """Return a mark on a user's stream; see gpu.Gpu."""
        with self.current():
            return CudaEvent(self, self._pointer_of(stream))

    def follow(self, event: Event, stream: Any = None) -> None:
        """Make work that is queued on a user's stream from now on wait; see gpu.Gpu."""
        with self.current():
            self.runtime.streamWaitEvent(self._pointer_of(stream), _pointer_of(event))

    def _pointer_of(self, stream: Any) -> Any:
        if stream is None:
            return self.cupy.cuda.get_current_stream(self.index).ptr
        return getattr(stream, "cuda_stream", stream)

    def array(self, x: DeviceVector, shape: Sequence[int]) -> Any:
        """Return a CuPy array of this shape that shares a vector's memory.

        Raises ConfigError if CuPy does not have the dtype.
        """
        if dtype_name(x.dtype) == "bfloat16" and int(self.cupy.__version__.partition(".")[0]) < 14:
            raise ConfigError(f"CuPy {self.cupy.__version__} has no bfloat16: "
                              f"{pip_install_cupy('>=14')}")
        memory = self.cupy.cuda.UnownedMemory(x.address, x.nbytes, x, self.index)
        pointer = self.cupy.cuda.MemoryPointer(memory, 0)
        return self.cupy.ndarray(tuple(shape), x.dtype, pointer)

    def is_finite(self, x: Any) -> bool:
        """Return whether a CuPy array is finite; wait for the work on CuPy's stream."""
        with self.current():
            return bool(self.cupy.isfinite(x).all())

    def allocate(self, nbytes: int, device: Device) -> DeviceVector:
        """Return memory of the GPU, by a plain allocation; see gpu.Gpu."""
        with self.current():
            memory = _Memory(self, nbytes)
        return DeviceVector(device, memory.address, nbytes, np.dtype(np.uint8), memory)

    def free(self, address: int) -> None:
        """Free an allocation."""
        # At the end of the process, CUDA may already be shut down.
        with suppress(RuntimeError), self.current():
            self.runtime.free(address)

    def pinned(self, nbytes: int) -> Array:
        """Return page-locked host memory, as bytes."""
        pinned_memory = self.cupy.cuda.pinned_memory
        with self.current():
            # CuPy's pool might lend the memory again while a copy is in flight.
            memory = pinned_memory.PinnedMemory(max(nbytes, 1), self.runtime.hostAllocPortable)
        return np.frombuffer(pinned_memory.PinnedMemoryPointer(memory, 0), np.uint8, nbytes)

    def _register(self, address: int, nbytes: int) -> tuple[int, str]:
        try:
            with self.current():
                self.runtime.hostRegister(address, nbytes, _PORTABLE_MAPPED)
        except self.runtime.CUDARuntimeError as error:
            return error.status, str(error)
        return 0, ""

    def _unregister(self, address: int) -> None:
        # At the end of the process, CUDA may already be shut down.
        with suppress(RuntimeError), self.current():
            self.runtime.hostUnregister(address)

    def export(self, x: DeviceVector) -> tuple[int, ...]:
        """Return eight numbers by which other processes open memory; see gpu.Gpu."""
        try:
            with self.current():
                return struct.unpack("<8q", self.runtime.ipcGetMemHandle(x.address))
        except RuntimeError as error:
            raise OSError(str(error)) from error

    def open(self, handle: Sequence[int], nbytes: int, device: Device) -> DeviceVector:
        """Return the memory that another process has exported, as bytes; see gpu.Gpu."""
        try:
            with self.current():
                address = self.runtime.ipcOpenMemHandle(struct.pack("<8q", *handle))
        except RuntimeError as error:
            raise OSError(str(error)) from error
        return DeviceVector(device, address, nbytes, np.dtype(np.uint8))

    def close(self, x: DeviceVector) -> None:
        """Close memory from `open`; see gpu.Gpu."""
        with self.current():
            self.runtime.ipcCloseMemHandle(x.address)
