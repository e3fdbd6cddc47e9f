"""Says what a GPU offers: its memory, streams and events."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from .arrays import Array
from .kernels import Kernel

if TYPE_CHECKING:
    from .device import Device, DeviceVector


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

    def clear(self, x: "DeviceVector") -> None:
        """Queue to fill a vector with zeros."""

    def launch(self, kernel: Kernel, work: int, **values: object) -> None:
        """Queue a kernel.

        Args:
            kernel: Its threads share the work in loops.
            work: How many threads have something to do.
            values: Of its struct.
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
