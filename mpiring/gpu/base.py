"""Protocols of a GPU, its streams and events; and vectors in a GPU's memory."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import DTypeLike

from ..errors import ConfigError
from ..memory.arrays import Array, data_address, dtype_name

if TYPE_CHECKING:
    from .device import Device

# Between two tests of an event that a caller waits for.
_PAUSE_S = 20e-6


class Event(Protocol):
    """A mark in a GPU's stream; schedules may yield it as a request."""

    def test(self) -> bool:
        """Return whether all work queued before it is done; once True, always True."""


class Stream(Protocol):
    """A queue of a GPU's work, done in order, asynchronously, and concurrently with other streams.

    Host memory is read and written when a copy is done, not when it is queued.
    """

    def download(self, x: "DeviceVector", out: Array) -> None:
        """Queue a copy to pinned host memory."""

    def upload(self, x: Array, out: "DeviceVector") -> None:
        """Queue a copy from pinned host memory."""

    def combine(self, op: str, sources: "Sequence[DeviceVector]", divisor: float,
                outs: "Sequence[DeviceVector]") -> None:
        """Queue to combine vectors elementwise, divide, and store the result several times.

        Args:
            op: As in Reduction; 16-bit sums and products are made in float32.
            sources: At least one, of one dtype and length.
            divisor: 1 for none.
            outs: At least one; each may be one of the sources.
        """

    def clear(self, x: "DeviceVector") -> None:
        """Queue to fill a vector with zeros."""

    def compute(self, function: Callable[..., None], *arguments: Any) -> None:
        """Queue array operations; only where the GPU is programmable.

        Args:
            function: Called at once, with CuPy, whose operations are queued, and the arguments.
            arguments: Vectors become CuPy arrays of the same memory; all others stay as they are.
        """

    def record(self) -> Event:
        """Return a mark behind all queued work."""

    def wait(self, event: Event) -> None:
        """Make work that is queued from now on wait for an event of any stream of this GPU."""


class Gpu(Protocol):
    """What is needed of a GPU: by CuPy, by PyTorch, or a simulated one in tests.

    Attributes:
        index: Its number among those that this process sees.
        name: For messages.
        programmable: Its streams take array operations.
    """

    index: int
    name: str
    programmable: bool

    def stream(self) -> Stream:
        """Return a new stream."""

    def allocate(self, nbytes: int, device: "Device") -> "DeviceVector":
        """Return memory of the GPU, by a plain allocation, as bytes of undefined content."""

    def pinned(self, nbytes: int) -> Array:
        """Return page-locked host memory, as bytes."""

    def pin(self, memory: Array) -> None:
        """Lock the pages of host memory, for as long as it is mapped."""

    def export(self, x: "DeviceVector") -> tuple[int, ...]:
        """Return eight numbers by which processes of this node open memory from `allocate`.

        Raises:
            OSError: It cannot be shared.
        """

    def open(self, handle: Sequence[int], nbytes: int, device: "Device") -> "DeviceVector":
        """Return the memory that another process has exported, as bytes.

        Raises:
            OSError: It cannot be reached from this GPU.
        """

    def mark(self, stream: Any = None) -> Event:
        """Return a mark on a user's stream.

        Args:
            stream: PyTorch's, or CUDA's pointer to it; by default the current one of its package.
        """

    def follow(self, event: Event) -> None:
        """Make work that the user's package queues from now on wait for an event."""

    def array(self, x: "DeviceVector", shape: tuple[int, ...]) -> Any:
        """Return a vector as a CuPy array, or a tensor of PyTorch, of the same memory."""

    def is_finite(self, x: Any) -> bool:
        """Return whether such an array is finite, when the work queued on it is done."""

    def close(self, x: "DeviceVector") -> None:
        """Close memory from `open`, before the process that exported it frees it."""


@dataclass(frozen=True, eq=False)
class DeviceVector:
    """A contiguous vector in a GPU's memory; schedules cut it as they do a NumPy vector.

    Only `Device`, and MPI where it can, touch its elements.

    Attributes:
        device: Copies and combines it.
        address: Of its first element.
        size: Number of elements.
        dtype: Of NumPy, or bfloat16 of ml_dtypes.
        owner: Keeps the memory alive.
        ready: Event of the last write; None where the vector is ready now.
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
        """The owner of the memory, as of a NumPy array."""
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
        """For mpi4py, which sends bytes that are ready."""
        return {"shape": (self.size,), "typestr": self.dtype.str, "version": 3, "strides": None,
                "data": (self.address if self.size else 0, False), "stream": None}


def address_of(x: Any) -> int:
    """Return the address of a vector's first element; none is both of a GPU and of the host."""
    return x.address if isinstance(x, DeviceVector) else data_address(x)


def await_event(event: Event) -> None:
    """Return when the work queued before an event is done."""
    while not event.test():
        time.sleep(_PAUSE_S)
