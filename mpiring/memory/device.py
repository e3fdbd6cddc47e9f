"""Sees vectors in a GPU's memory, and has the GPU copy and combine them in the right order."""

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import DTypeLike

from ..errors import ConfigError
from .arrays import Array, dtype_name, flat
from .scratch import Scratch

# Idle scratch vectors that are kept: those of a few operations under way.
_KEPT = 8
# Between two looks at an event that a caller waits for.
_PAUSE_S = 20e-6


# What sees the arrays of a package as vectors, of NumPy's or DeviceVectors: each returns one, or
# None for what is not its own.
VIEWS: list[Callable[[Any], Any]] = []


class Event(Protocol):
    """A mark in a GPU's stream; a request that schedules may yield."""

    def test(self) -> bool:
        """Return whether all that was queued before it is done; once True, always True."""


class Stream(Protocol):
    """A queue of a GPU's work. It is done in order, but at any time, and beside other streams'.

    Host memory is read and written not when a copy is queued, but when it is done.
    """

    def download(self, x: "DeviceVector", out: Array) -> None:
        """Queue a copy to pinned host memory."""

    def upload(self, x: Array, out: "DeviceVector") -> None:
        """Queue a copy from pinned host memory."""

    def combine(self, op: str, sources: "Sequence[DeviceVector]", divisor: float,
                outs: "Sequence[DeviceVector]") -> None:
        """Queue to combine vectors elementwise, divide, and store the result in several places.

        Args:
            op: As in Reduction; 16-bit sums and products are made in float32.
            sources: At least one, of one dtype and length.
            divisor: 1 for none.
            outs: At least one; each may be one of the sources.
        """

    def record(self) -> Event:
        """Return a mark behind all that is queued."""

    def wait(self, event: Event) -> None:
        """Have what is queued from now on wait for an event of any stream of this GPU."""


class Gpu(Protocol):
    """A GPU, as far as it is used here: CUDA's, or one that tests simulate.

    Attributes:
        index: Its number among those that this process sees.
        name: For people.
    """

    index: int
    name: str

    def stream(self) -> Stream:
        """Return a new stream."""

    def allocate(self, nbytes: int, device: "Device") -> "DeviceVector":
        """Return memory on it, by a plain allocation, as bytes of undefined content."""

    def pinned(self, nbytes: int) -> Array:
        """Return page-locked host memory, as bytes."""

    def pin(self, memory: Array) -> None:
        """Lock the pages of host memory, for as long as it is mapped."""

    def export(self, x: "DeviceVector") -> tuple[int, ...]:
        """Return eight numbers by which processes of this node open what `allocate` returned.

        Raises:
            OSError: It cannot be shared.
        """

    def open(self, handle: Sequence[int], nbytes: int, device: "Device") -> "DeviceVector":
        """Return the memory that another process has exported, as bytes.

        Raises:
            OSError: It cannot be reached from this GPU.
        """

    def mark(self, stream: int | None = None) -> Event:
        """Return a mark on a user's stream.

        Args:
            stream: Its pointer, 0 for CUDA's default; by default the one that CuPy has in use.
        """

    def follow(self, event: Event) -> None:
        """Have what its user, CuPy, queues from now on wait for an event."""

    def array(self, x: "DeviceVector", shape: tuple[int, ...]) -> Any:
        """Return a vector as an array of the same memory, for users: of CuPy."""

    def is_finite(self, x: Any) -> bool:
        """Return whether such an array is, when what its user has queued is done."""

    def close(self, x: "DeviceVector") -> None:
        """Give back what `open` returned, before whoever has exported it frees it."""


@dataclass(frozen=True, eq=False)
class DeviceVector:
    """A contiguous vector in a GPU's memory; schedules cut it as they do a NumPy vector.

    Nothing here touches its elements: only `Device` does, and MPI, where it can.

    Attributes:
        device: What copies and combines it.
        address: Of its first element.
        size: How many there are.
        dtype: Of NumPy's, or bfloat16 of ml_dtypes.
        owner: Keeps the memory alive.
        ready: When whoever wrote it last has done so; None for now.
    """

    device: "Device"
    address: int
    size: int
    dtype: np.dtype[Any]
    owner: object = None
    ready: Event | None = None

    def __post_init__(self) -> None:
        if dtype_name(self.dtype) in ("longdouble", "clongdouble"):
            raise ConfigError(f"a GPU has no {self.dtype.name}; use float64 or complex128")

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> "DeviceVector":
        start, stop, _ = part.indices(self.size)
        return replace(self, address=self.address + start * self.itemsize,
                       size=max(stop - start, 0))

    @property
    def shape(self) -> tuple[int]:
        """As of a NumPy array."""
        return (self.size,)

    @property
    def base(self) -> object:
        """What the memory is a part of, as of a NumPy array."""
        return self.owner

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.itemsize

    def view(self, dtype: DTypeLike) -> "DeviceVector":
        """Return the same bytes as elements of another dtype."""
        new = np.dtype(dtype)
        return replace(self, dtype=new, size=self.nbytes // new.itemsize)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """What mpi4py wants to know; it is asked for bytes only, once they are there."""
        return {"shape": (self.size,), "typestr": self.dtype.str, "version": 3, "strides": None,
                "data": (self.address if self.size else 0, False), "stream": None}


class Staging:
    """Pinned host memory, lent for one copy at a time.

    Args:
        gpu: Whose copies it is for.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._idle: list[tuple[Array, Event | None]] = []

    def take(self, nbytes: int) -> Array:
        """Return memory of at least so many bytes, which nothing uses."""
        fitting = [place for place, (slot, until) in enumerate(self._idle)
                   if slot.size >= nbytes and (until is None or until.test())]
        if not fitting:
            # Few lengths, so that slots of one operation suit the next.
            return self._gpu.pinned(1 << max(nbytes - 1, 4095).bit_length())
        return self._idle.pop(min(fitting, key=lambda place: self._idle[place][0].size))[0]

    def give(self, slot: Array, until: Event | None = None) -> None:
        """Take memory back; a copy may use it until an event."""
        self._idle.append((slot, until))


@dataclass
class Device:
    """A GPU with the streams on which mpiring uses it: one inwards, one outwards, one for work.

    Whatever is queued finds done what was queued before it, with one exception, as for a message
    that is being sent: who overwrites what is being copied to the host waits for that first.
    Copies in both directions overlap. Nothing waits for the user's streams: operations begin
    when vectors are `ready`. Any thread may call.

    Args:
        gpu: Offers the streams.

    Attributes:
        scratch: Memory on the GPU, for schedules. What is given back may be in use by what is
            queued: only other queued work finds it free.
        staging: Pinned host memory, for single copies.
    """

    gpu: Gpu
    scratch: Scratch = field(init=False)
    staging: Staging = field(init=False)

    def __post_init__(self) -> None:
        self._inwards, self._outwards, self._work, self._marks = (
            self.gpu.stream() for _ in range(4))
        self._lock = threading.RLock()
        self.scratch = Scratch(_KEPT, cast(Any, self.allocate))
        self.staging = Staging(self.gpu)

    def __repr__(self) -> str:
        return self.gpu.name

    def allocate(self, nbytes: int) -> DeviceVector:
        """Return new memory on the GPU, as bytes of undefined content."""
        return self.gpu.allocate(nbytes, self)

    def to_host(self, x: DeviceVector, out: Array) -> Event:
        """Queue a copy to pinned host memory; return when it is done."""
        with self._lock:
            for stream in (self._work, self._inwards):
                self._outwards.wait(stream.record())
            if x.size:
                self._outwards.download(x, out)
            return self._outwards.record()

    def to_device(self, x: Array, out: DeviceVector) -> Event:
        """Queue a copy from pinned host memory; return when it is done."""
        with self._lock:
            self._inwards.wait(self._work.record())
            if out.size:
                self._inwards.upload(x, out)
            return self._inwards.record()

    def combine(self, op: str, sources: Sequence[Any], divisor: float,
                outs: Sequence[DeviceVector]) -> None:
        """Queue to combine vectors; see Stream.combine.

        Args:
            sources: Also in pinned host memory.
        """
        if not outs[0].size:
            return
        with self._lock, self._uploaded(sources) as vectors:
            self._work.wait(self._inwards.record())
            self._work.combine(op, vectors, divisor, outs)

    @contextmanager
    def _uploaded(self, sources: Sequence[Any]) -> Iterator[list[DeviceVector]]:
        """Lend copies of those vectors that are in host memory, beside the others."""
        hosts = [x for x in sources if isinstance(x, np.ndarray)]
        if not hosts:
            yield list(sources)
            return
        size = sources[0].size
        with self.scratch.borrow(len(hosts) * size, sources[0].dtype) as scratch:
            free = cast(DeviceVector, scratch)
            vectors = []
            for x in sources:
                if isinstance(x, np.ndarray):
                    self.to_device(x, free[:size])
                    x, free = free[:size], free[size:]
                vectors.append(x)
            yield vectors

    def event(self) -> Event:
        """Return when all that is queued is done."""
        with self._lock:
            # On a stream of its own, so that none of the others has to wait.
            for stream in (self._inwards, self._outwards, self._work):
                self._marks.wait(stream.record())
            return self._marks.record()


def device_named(wish: "str | Device", place: int) -> Device:
    """Return the GPU that a text names.

    Args:
        wish: "cuda", or "cuda:" and a number; or the device itself.
        place: Of this rank among those of its node, who take GPUs in turn.

    Raises:
        ConfigError: There is none.
        MissingDependencyError: CuPy is not installed.
    """
    if isinstance(wish, Device):
        return wish
    found = re.fullmatch(r"cuda(?::(\d+))?", str(wish), re.ASCII)
    if found is None:
        raise ConfigError(f"device={wish!r}: expected cpu, cuda, or cuda: and a number")
    from . import cuda
    return cuda.device(int(found[1]) if found[1] else place % cuda.count())


def vector_of(x: Any, *, writeable: bool = True) -> Any:
    """Return the elements of an array as a vector that shares its memory, wherever that is.

    Args:
        x: A NumPy array, a tensor of PyTorch where mpiring.torch is imported, an array on a GPU
            (of CuPy, or any with `__cuda_array_interface__`), or a DeviceVector; of any shape,
            contiguous.
        writeable: Refuse arrays that cannot be written to.

    Returns:
        A NumPy vector, or a DeviceVector, which is ready when its user's stream has come so far.

    Raises:
        ConfigError: As `arrays.flat`.
        MissingDependencyError: It is on a GPU, and CuPy is not installed.
    """
    # The first look is there for speed: on a node, an allreduce takes some 10 µs.
    if type(x) is not np.ndarray:
        if isinstance(x, DeviceVector):
            return x
        for view in VIEWS:
            if (vector := view(x)) is not None:
                return vector
        if is_on_gpu(x):
            from .cuda_arrays import vector_of as vector_on_gpu
            return vector_on_gpu(x, writeable=writeable)
    return flat(x, writeable=writeable)


def is_on_gpu(x: Any) -> bool:
    """Return whether something is an array on a GPU: of CuPy, or whatever can be seen as one."""
    try:
        return hasattr(x, "__cuda_array_interface__")
    except RuntimeError:
        # PyTorch's way to say that such a tensor must be detached first.
        return True


def address_of(x: Any) -> int:
    """Return where a vector's first element is; no address is both on a GPU and in host memory."""
    return x.address if isinstance(x, DeviceVector) else int(x.ctypes.data)


def await_event(event: Event) -> None:
    """Return when what was queued before an event is done."""
    while not event.test():
        time.sleep(_PAUSE_S)


def copy_to(out: Any, x: Any) -> None:
    """Copy a vector; where one of them is on a GPU, queue that.

    Args:
        out: Overwritten.
        x: Of the same length and dtype. If only one of the two is on a GPU, the other is pinned.
    """
    if type(out) is np.ndarray and type(x) is np.ndarray:
        np.copyto(out, x)
    elif not isinstance(out, DeviceVector):
        if isinstance(x, DeviceVector):
            x.device.to_host(x, out)
        else:
            np.copyto(out, x)
    elif isinstance(x, DeviceVector):
        out.device.combine("sum", [x], 1, [out])
    else:
        out.device.to_device(x, out)
