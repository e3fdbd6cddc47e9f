"""The interfaces of a GPU, which CuPy and PyTorch implement: memory, vectors, streams, events."""

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import DTypeLike

from ..errors import ConfigError, TransportError
from ..memory.arrays import Array, data_address, dtype_name
from ..memory.window import PAGE_BYTES
from .warps import WarpKernel

if TYPE_CHECKING:
    from .device import Device

# Pause between two tests of an event that a caller waits for.
_PAUSE_S = 20e-6
# cudaSuccess and cudaErrorHostMemoryAlreadyRegistered of CUDA's runtime; HIP uses the same values.
_SUCCESS, _ALREADY = 0, 712

T = TypeVar("T")

_log = logging.getLogger("mpiring")
# Addresses of the host memory that `Gpu.pin` has locked.
_pinned: set[int] = set()
_pinning = threading.Lock()


@dataclass(frozen=True, eq=False)
class Flags:
    """Numbers by which streams of the ranks of a node wait for each other.

    `words` are arrays of one uint32 in pinned memory, one per rank, which all ranks see. Each rank
    writes its own.
    """

    words: Sequence[Array]
    rank: int


class Event(Protocol):
    """A mark in a GPU's stream; schedules may yield it as a request."""

    def test(self) -> bool:
        """Return whether all work queued before it is done; once True, it stays True."""


# A word, an array of one uint32 in pinned memory, and the number to write to it.
Alarm = tuple[Array, int]


@dataclass(eq=False)
class Program:
    """Work that is queued again and again.

    Attributes:
        steps: Sums, as arguments of Stream.combine, with a truth value for its alarm. Barriers are
            None, and calls of libraries are functions for Stream.call.
        prepared: Data that a stream keeps to repeat the work faster.
    """

    steps: list[tuple[Any, ...] | Callable[[int], None] | None] = field(default_factory=list)
    prepared: Any = None


class UserStream(Protocol):
    """The stream on which the calling thread queues work at the moment."""

    def mark(self) -> Event:
        """Return a mark behind all work that is queued on it."""

    def follow(self, event: Event) -> None:
        """Make work that is queued on it from now on wait for an event."""


@dataclass(frozen=True)
class Queued(Generic[T]):
    """A result in memory of a GPU that is complete after an event, which the host need not await.

    `stream` is the stream of the caller, which then uses the result. The function `check` raises
    TransportError if the work has failed. `alarm` is given if the result is not finite; None if
    the work does not tell that.
    """

    result: T
    event: Event
    stream: UserStream
    check: Callable[[], None]
    alarm: Alarm | None = None

    @property
    def is_over(self) -> bool:
        """Whether the GPU has done the work; raises TransportError if it has failed."""
        if self.event.test():
            return True
        self.check()
        return False

    @property
    def is_finite(self) -> bool:
        """Whether no alarm was given, when the work `is_over`."""
        word, number = cast(Alarm, self.alarm)
        return int(word[0]) != number & 0xFFFFFFFF

    def settled(self) -> T:
        """Return the result for work that is queued on the caller's stream from now on."""
        self.stream.follow(self.event)
        return self.result


def settled(result: Any) -> Any:
    """Return a result for later work of the caller; see Queued."""
    return result.settled() if type(result) is Queued else result


class Stream(Protocol):
    """A queue of a GPU's work, done in order, asynchronously, and concurrently with other streams.

    Host memory is read and written when a copy runs, not when it is queued.
    """

    def download(self, x: "DeviceVector", out: Array) -> None:
        """Queue a copy to pinned host memory."""

    def upload(self, x: Array, out: "DeviceVector") -> None:
        """Queue a copy from pinned host memory."""

    def combine(self, op: str, sources: "Sequence[DeviceVector]", divisor: float,
                outs: "Sequence[DeviceVector]", nonfinite: Alarm | None = None) -> None:
        """Queue an elementwise combination of vectors, a division, and stores of the result.

        All vectors have one dtype and length; an out may be one of the sources. 16-bit sums and
        products are computed in float32. `op` is a name, see Reduction; a divisor of 1 is none. If
        an element of the result is NaN or Inf, write the number of `nonfinite`, modulo 2**32, to
        its word. A GPU that is `unqueued` accepts no `nonfinite`.
        """

    def meet(self, flags: Flags, number: int) -> None:
        """Queue a barrier of a node, unless `unqueued`; the numbers of a rank increase by 1.

        It writes `number`, modulo 2**32, to this rank's word. Then work that is queued from now on
        waits until all ranks' words have reached the number.
        """

    def clear(self, x: "DeviceVector") -> None:
        """Queue filling a vector with zeros."""

    def launch(self, kernel: WarpKernel, function: Callable[..., None], *arguments: Any) -> None:
        """Queue a kernel, if the GPU is programmable.

        The arguments are vectors, numbers, or None; the first one is a vector. A simulated GPU
        calls the function, which computes the same with NumPy arrays.
        """

    def call(self, queue: Callable[[int], None]) -> None:
        """Call a function that queues work on the stream, whose CUDA pointer is its argument."""

    def repeat(self, program: Program, ready: Sequence[Event], flags: Flags, number: int,
               nonfinite: Alarm) -> Event:
        """Queue the work of a program again, after events, and a mark; see Device.repeat."""

    def record(self) -> Event:
        """Return a mark behind all queued work."""

    def wait(self, event: Event) -> None:
        """Make work that is queued from now on wait for an event of any stream of this GPU."""

    def synchronize(self) -> None:
        """Wait until all queued work is done; other threads can run Python meanwhile.

        Raises TransportError if the GPU has failed.
        """


class Mark(Event, Protocol):
    """An event of CuPy or PyTorch."""

    _done: bool = False

    def __repr__(self) -> str:
        return "work queued on a GPU"

    def test(self) -> bool:
        """Return whether all work queued before it is done.

        Raises TransportError if the GPU has failed.
        """
        if not self._done:
            try:
                self._done = self._query()
            except RuntimeError as error:
                raise failed(error) from error
        return self._done

    def _query(self) -> bool:
        """Query the event; raise RuntimeError if the GPU has failed."""


def failed(error: RuntimeError) -> TransportError:
    """Return what to raise if CuPy or PyTorch has raised an error of the GPU."""
    return TransportError(f"the GPU failed: {error}")


class Gpu(Protocol):
    """A GPU, used through CuPy or PyTorch.

    `index` is its number among the GPUs that this process sees. The streams of a programmable GPU
    launch kernels. `unshared` is the reason why processes cannot share its memory,
    `unqueued` the reason why its streams cannot use words in host memory. `address` distinguishes
    it from the other GPUs of its host; it is "" if NCCL cannot use it.
    """

    index: int
    name: str
    address: str = ""
    programmable: bool = True
    unshared: str = ""
    unqueued: str = ""

    def current(self) -> AbstractContextManager[Any]:
        """Make it the thread's current GPU in a `with` block."""
        return nullcontext()

    def stream(self) -> Stream:
        """Return a new stream."""

    def allocate(self, nbytes: int, device: "Device") -> "DeviceVector":
        """Return memory of the GPU, by a plain allocation, as bytes of undefined content.

        The vector belongs to `device`. Raises MemoryError if too little memory is left.
        """

    def pinned(self, nbytes: int) -> Array:
        """Return page-locked host memory, as bytes."""

    def pin(self, memory: Array) -> None:
        """Lock the pages of host memory for as long as its array lives; idempotent.

        If this fails, copies take longer, and a warning is logged. Memory that does not begin at
        a page is ignored, because other memory may be in its pages, and CUDA refuses copies of
        memory that is partly locked.
        """
        root, address = memory, memory.ctypes.data
        while isinstance(root.base, np.ndarray):
            root = root.base
        if address % PAGE_BYTES:
            return
        with _pinning:
            if address in _pinned:
                return
            status, text = self._register(address, memory.nbytes)
            if status == _SUCCESS:
                _pinned.add(address)
        if status == _SUCCESS:
            # Unlock it later, because new memory may be mapped at the same address.
            weakref.finalize(root, self._unpin, address).atexit = False
        elif status != _ALREADY:
            _log.warning("%d bytes of host memory cannot be locked for %s (%s): copies wait for "
                         "each other", memory.nbytes, self.name, text)

    def _unpin(self, address: int) -> None:
        # Do not acquire the lock: the garbage collector may call this in a thread that holds it.
        self._unregister(address)
        _pinned.discard(address)

    def _register(self, address: int, nbytes: int) -> tuple[int, str]:
        """Lock pages; return CUDA's status, and a description of it."""

    def _unregister(self, address: int) -> None:
        """Unlock pages."""

    def export(self, x: "DeviceVector") -> tuple[int, ...]:
        """Return eight numbers by which processes of this node open memory from `allocate`.

        Raises OSError if the memory cannot be shared.
        """
        raise OSError(self.unshared)

    def open(self, handle: Sequence[int], nbytes: int, device: "Device") -> "DeviceVector":
        """Return the memory that another process has exported, as bytes.

        Raises OSError if this GPU cannot reach the memory.
        """
        raise OSError(self.unshared)

    def close(self, x: "DeviceVector") -> None:
        """Close memory from `open`, before the process that exported it frees it."""
        raise OSError(self.unshared)

    def user_stream(self, stream: Any = None) -> Stream:
        """Return a user's stream, to queue copies on it, and to mark it.

        `stream` is a PyTorch stream or a CUDA pointer; by default, the package's current stream.
        """

    def mark(self, stream: Any = None) -> Event:
        """Return a mark on a user's stream; see `user_stream`."""
        return self.user_stream(stream).record()

    def follow(self, event: Event, stream: Any = None) -> None:
        """Make work that is queued on a user's stream from now on wait; see `user_stream`."""
        self.user_stream(stream).wait(event)

    def array(self, x: "DeviceVector", shape: tuple[int, ...]) -> Any:
        """Return a vector as a CuPy array, or a PyTorch tensor, of the same memory.

        The caller has waited for the vector's event.
        """

    def is_finite(self, x: Any) -> bool:
        """Return whether an array from `array` is finite; wait for the work queued on it."""


@dataclass(frozen=True, eq=False)
class DeviceVector:
    """A contiguous vector in a GPU's memory; schedules slice it like a NumPy vector.

    Only `Device` and GPU-aware MPI access its elements.

    The dtype is NumPy's, or bfloat16 of ml_dtypes. `owner` keeps the memory alive. `ready` is the
    event of the last write; None if the vector is ready now. On `stream`, the user uses it; None
    stands for the current stream of the GPU's package.
    """

    device: "Device"
    address: int
    size: int
    dtype: np.dtype[Any]
    owner: Any = None
    ready: Event | None = None
    stream: UserStream | None = None

    def __post_init__(self) -> None:
        if dtype_name(self.dtype) in ("longdouble", "clongdouble"):
            raise ConfigError(f"a GPU has no {self.dtype.name}; use float64 or complex128")

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> "DeviceVector":
        start, stop, _ = part.indices(self.size)
        # Not by `replace`, which takes twice as long.
        return DeviceVector(self.device, self.address + start * self.itemsize,
                            max(stop - start, 0), self.dtype, self.owner, self.ready)

    @property
    def shape(self) -> tuple[int]:
        """The shape, like that of a NumPy array."""
        return (self.size,)

    @property
    def base(self) -> object:
        """The owner of the memory, like `base` of a NumPy array."""
        return self.owner

    @property
    def itemsize(self) -> int:
        """Number of bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Number of bytes of all elements."""
        return self.size * self.itemsize

    def view(self, dtype: DTypeLike) -> "DeviceVector":
        """Return the same bytes as elements of another dtype."""
        new = np.dtype(dtype)
        return replace(self, dtype=new, size=self.nbytes // new.itemsize)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The interface by which mpi4py sends the bytes, which must be ready."""
        return {"shape": (self.size,), "typestr": self.dtype.str, "version": 3, "strides": None,
                "data": (self.address if self.size else 0, False), "stream": None}


def address_of(x: Any) -> int:
    """Return the address of a vector's first element; GPU and host addresses never coincide."""
    return x.address if isinstance(x, DeviceVector) else data_address(x)


def await_event(event: Event) -> None:
    """Wait until the work queued before an event is done."""
    while not event.test():
        time.sleep(_PAUSE_S)
