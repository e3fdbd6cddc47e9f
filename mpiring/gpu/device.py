"""Sees vectors in a GPU's memory, and has the GPU copy and combine them in the right order."""

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike

from ..errors import ConfigError
from .arrays import Array, dtype_name, flat
from .gpu import Event, Gpu, Stream
from .kernels import Kernel
from .scratch import Scratch
from .staging import Staging

# Idle scratch vectors that are kept, of few lengths: those of all operations under way. To give one
# back to CUDA would wait for all that is queued.
_KEPT = 64
_UNIT_BYTES = 2 << 20
# Between two looks at an event that a caller waits for.
_PAUSE_S = 20e-6


# What sees the arrays of a package as vectors, of NumPy's or DeviceVectors: each returns one, or
# None for what is not its own.
VIEWS: list[Callable[[Any], Any]] = []


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


class _Queue:
    """A stream which is marked, and waits for others, only where something new is queued.

    Each call of CUDA's costs a microsecond or two, and a piece of 2 MiB travels for 40.

    Args:
        stream: The stream; what is queued there shall be announced by `changes`.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._mark: Event | None = None
        self._known: dict[_Queue, Event] = {}

    def mark(self) -> Event:
        """Return a mark behind all that is queued."""
        if self._mark is None:
            self._mark = self._stream.record()
        return self._mark

    def follow(self, *others: "_Queue") -> None:
        """Have what is queued from now on wait for what others have queued."""
        for other in others:
            mark = other.mark()
            if self._known.get(other) is not mark:
                self._known[other] = mark
                self._stream.wait(mark)
                self._mark = None

    def changes(self) -> Stream:
        """Return the stream, for something to be queued."""
        self._mark = None
        return self._stream


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
            _Queue(self.gpu.stream()) for _ in range(4))
        self._lock = threading.RLock()
        self.scratch = Scratch(_KEPT, cast(Any, lambda nbytes: self.allocate(_rounded(nbytes))))
        self.staging = Staging(self.gpu)

    def __repr__(self) -> str:
        return self.gpu.name

    def allocate(self, nbytes: int) -> DeviceVector:
        """Return new memory on the GPU, as bytes of undefined content."""
        return self.gpu.allocate(nbytes, self)

    def to_host(self, x: DeviceVector, out: Array) -> Event:
        """Queue a copy to pinned host memory; return when it is done."""
        with self._lock:
            self._outwards.follow(self._work, self._inwards)
            if x.size:
                self._outwards.changes().download(x, out)
            return self._outwards.mark()

    def to_device(self, x: Array, out: DeviceVector) -> Event:
        """Queue a copy from pinned host memory; return when it is done."""
        with self._lock:
            self._inwards.follow(self._work)
            if out.size:
                self._inwards.changes().upload(x, out)
            return self._inwards.mark()

    def combine(self, op: str, sources: Sequence[Any], divisor: float,
                outs: Sequence[DeviceVector]) -> None:
        """Queue to combine vectors; see Stream.combine.

        Args:
            sources: Also in pinned host memory.
        """
        if not outs[0].size:
            return
        with self._uploaded(sources) as vectors, self._at_work() as stream:
            stream.combine(op, vectors, divisor, outs)

    def clear(self, x: DeviceVector) -> None:
        """Queue to fill a vector with zeros."""
        if x.size:
            with self._at_work() as stream:
                stream.clear(x)

    def launch(self, kernel: Kernel, work: int, **values: object) -> None:
        """Queue a kernel; see Stream.launch."""
        with self._at_work() as stream:
            stream.launch(kernel, work, **values)

    @contextmanager
    def _at_work(self) -> Iterator[Stream]:
        """Lend the stream for work, which finds there what was copied to the GPU."""
        with self._lock:
            self._work.follow(self._inwards)
            yield self._work.changes()

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
            self._marks.follow(self._inwards, self._outwards, self._work)
            return self._marks.mark()


def _rounded(nbytes: int) -> int:
    """Return one of few lengths: at least as long, and if not short, at most a quarter longer."""
    unit = max(_UNIT_BYTES, 1 << max(nbytes.bit_length() - 3, 0))
    return max(1, -(-nbytes // unit)) * unit


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
