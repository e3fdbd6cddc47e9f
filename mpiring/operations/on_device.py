"""Runs a communicator's operations on vectors in the memory of GPUs.

Their schedules are the same as on the host. Their messages go through pinned host memory, or MPI
takes the GPU's pointers; their sums are queued on the GPU; and a rank arrives at a barrier when all
that it has queued is done. Staging slots are pinned memory.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike

from ..collectives.operation import Tuning
from ..config import Config
from ..errors import TransportError
from ..gpu.device import Device, DeviceVector, Event
from ..launch.gpu_aware import takes_pointers
from ..launch.start import load_mpi
from ..memory.arrays import Array
from ..memory.reduction import Combine, Reduction
from ..transport.base import Channel, Node, Request, Schedule, T
from ..transport.layout import AREAS, LATE, LOOK, PUBLISH
from ..transport.staged import DeviceChannel
from .agreement import Call
from .exports import Exports
from .operation import Collectives
from .windows import Windows, mapped

# Each copy costs some ten microseconds of Python and CUDA; the first and the last have nothing to
# hide behind. At each turn a rank fills so much of a slot for the others.
_TURN_BYTES = 4 << 20
_PIECE_BYTES = 2 << 20
TUNING = Tuning(ring_bytes=_PIECE_BYTES, direct_bytes=(_PIECE_BYTES, _PIECE_BYTES),
                slice_bytes=_TURN_BYTES, moved_bytes=64 << 10)
SLOT_BYTES = 2 * TUNING.in_flight * _TURN_BYTES

Build = Callable[[Collectives], Schedule[T]]
# Runs an operation among all ranks of the communicator.
Run = Callable[[Call, "Build[GpuContext]"], "GpuContext"]


@dataclass(frozen=True)
class GpuContext:
    """A GPU, as the operations of one communicator use it.

    Attributes:
        device: The GPU.
        exports: Memory on it that is open to other ranks.
        direct: MPI takes its pointers.
        segments: Per rank of the node, pinned memory that all of them share, for the staging
            slots of a few operations; None to use those of the node memory.
        tuning: Lengths and counts for its vectors.
    """

    device: Device
    exports: Exports
    direct: bool = False
    segments: Sequence[Array] | None = None
    tuning: Tuning = TUNING


class DeviceCombine(Reduction):
    """A Reduction of vectors on a GPU, where its work is queued.

    Args:
        op, dtype, size: See Reduction.
        device: The GPU.

    Raises: as Reduction.
    """

    def __init__(self, op: str, dtype: np.dtype[Any], size: float, device: Device) -> None:
        super().__init__(op, dtype, size, compiled=False)
        self._device = device

    def of(self, sources: Sequence[Array]) -> Callable[[Array], None]:
        """Return a function that combines these vectors as `combine` does."""
        return functools.partial(self.combine, sources)

    def copy(self, x: Array, *outs: Array, past_caches: bool = False) -> None:
        """Copy a vector to others."""
        if outs:
            self._device.combine(self.op, [x], 1, cast(Sequence[DeviceVector], outs))

    def _apply(self, sources: Sequence[Array], divisor: float, outs: Sequence[Array]) -> None:
        self._device.combine(self.op, sources, divisor, cast(Sequence[DeviceVector], outs))

    def _divide(self, x: Array) -> None:
        if self.size > 1:
            self._apply([x], self.size, [x])


class DeviceNode:
    """The meeting place of a node's ranks, for work that is queued on their GPUs; see base.Node.

    Args:
        node: The meeting place.
        device: This rank's GPU.
        slots: Per rank of the node, the bytes of its staging slot; by default those of `node`.
    """

    def __init__(self, node: Node, device: Device, slots: Sequence[Array] | None) -> None:
        self.rank, self.size, self.ranks = node.rank, node.size, node.ranks
        self._node, self._device, self.memory = node, device, node.memory
        self._slots = slots
        self.test, self.agrees, self.headers, self.leave = (
            node.test, node.agrees, node.headers, node.leave)

    @property
    def met(self) -> bool:
        """Whether the first barrier was begun."""
        return self._node.met

    def slots(self, dtype: np.dtype[Any], size: int | None = None) -> Sequence[Array]:
        """Return, per rank of the node, a staging slot in pinned memory; see base.Node."""
        if self._slots is None:
            return self._node.slots(dtype, size)
        return [slot.view(dtype)[:size] for slot in self._slots]

    def barrier(self, *numbers: int) -> "_Arrival":
        """Arrive when all that is queued is done; the request is for the other ranks, too."""
        return _Arrival(self._device.event(), lambda: self._node.barrier(*numbers))

    def share(self, *numbers: int) -> Schedule[list[tuple[int, ...]]]:
        """Arrive likewise, and return per rank the numbers that each has passed."""
        yield (self._device.event(),)
        return (yield from self._node.share(*numbers))

    def part(self, call: Any, x: Any) -> Schedule[None]:
        """Run a call as a part of the operation; see base.Node."""
        call.join_by_barriers(self, x)
        call.run(PUBLISH, x)
        status = LATE
        while status == LATE:
            yield (call.barriers.arrival,)
            status = call.run(LOOK, x)

    def lane(self, index: int) -> "DeviceNode":
        """Return a further meeting place of the same operation."""
        return DeviceNode(self._node.lane(index), self._device, self._slots)


class _Arrival:
    """A barrier that this rank reaches after an event."""

    def __init__(self, event: Event, arrive: Callable[[], Request]) -> None:
        self._event, self._arrive = event, arrive
        self._barrier: Request | None = None

    def __repr__(self) -> str:
        return repr(self._barrier or "work queued on a GPU")

    def test(self) -> bool:
        """Return whether all have arrived."""
        if self._barrier is None:
            if not self._event.test():
                return False
            self._barrier = self._arrive()
        return self._barrier.test()


class DeviceCollectives(Collectives):
    """The schedules of an operation on vectors that lie in a GPU's memory.

    Args:
        host: The operation.
        context: The GPU.
    """

    __slots__ = ("_host", "_context", "_channel")

    def __init__(self, host: Collectives, context: GpuContext) -> None:
        # As in NodeMemory, every fourth operation has the same slots.
        start = host.sequence % AREAS * SLOT_BYTES
        slots = None if context.segments is None else [
            segment[start:start + SLOT_BYTES] for segment in context.segments]
        super().__init__(host.resources, DeviceNode(host.node, context.device, slots),
                         host.sequence)
        self.tuning = context.tuning
        self._host, self._context = host, context
        self._channel: Channel | None = None

    @property
    def gpu(self) -> str:  # type: ignore[override]
        """The GPU."""
        return str(self._context.device)

    @property
    def net(self) -> Channel:
        """The operation's channel."""
        if self._channel is None:
            self._channel = DeviceChannel(
                self._host.net, self._context.device, direct=self._context.direct)
        return self._channel

    @property
    def bytes_sent(self) -> int:
        """How many this rank has sent in this operation so far; see Statistics."""
        return self._host.bytes_sent

    def borrow(self, n: int, dtype: DTypeLike) -> Any:
        """Lend memory on the GPU for n elements, as long as the operation needs it."""
        return self._context.device.scratch.borrow(n, dtype)

    def combiner(self, op: str, dtype: np.dtype[Any], size: float) -> Combine:
        """Return what combines vectors on the GPU."""
        return DeviceCombine(op, dtype, size, self._context.device)

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> Schedule[Any]:
        """Return the schedule that returns a vector on the GPU, open to the node if possible."""
        device, dtype = self._context.device, np.dtype(dtype)
        if self.node.size == 1:
            vector = device.allocate(math.prod(shape) * dtype.itemsize).view(dtype)
            return _returned(vector)
        return self._context.exports.empty(
            self.node, device, shape, dtype, self.next_window())


def _returned(x: DeviceVector) -> Schedule[DeviceVector]:
    yield ()
    return x


def in_context(collectives: Collectives, context: GpuContext, ready: Sequence[Event],
               build: Callable[[Collectives], Schedule[T]]) -> Schedule[T]:
    """Return a schedule on a GPU that ends when all that it has queued is done.

    Args:
        collectives: Of the operation.
        context: The GPU.
        ready: When the vectors may be used.
        build: Returns the schedule, given the collectives on the GPU.
    """
    on_gpu = DeviceCollectives(collectives, context)
    schedule = build(on_gpu)
    collectives.algorithm = on_gpu.algorithm
    return _between(ready, schedule, context.device)


def _between(ready: Sequence[Event], schedule: Schedule[T], device: Device) -> Schedule[T]:
    if ready:
        yield ready
    result = yield from schedule
    yield (device.event(),)
    return result


class GpuOperations:
    """The GPUs that operations of one communicator use, on one rank.

    Args:
        windows: Where collectives find memory that ranks share.
        run: Runs an operation.
        config: Its `gpu_aware`: whether MPI takes pointers of a GPU's memory.
    """

    def __init__(self, windows: Windows, run: Run, config: Config) -> None:
        self._run, self._config = run, config
        self._exports = Exports(windows)
        self._known: dict[int, GpuContext] = {}

    def where(self, vector: Any, build: Build[T]) -> Build[T]:
        """Return `build` for where a vector lies: in host memory, or on a GPU; see `on`."""
        if not isinstance(vector, DeviceVector):
            return build
        return self.on(vector.device, (vector.ready,) if vector.ready else (), build)

    def on(self, device: Device, ready: Sequence[Event], build: Build[T]) -> Build[T]:
        """Return a function that builds the same schedule for vectors on a GPU.

        Args:
            device: The GPU.
            ready: When the vectors may be used.
            build: Returns a schedule, given the collectives bound to its channel.

        Collective: yes, the first time for each GPU. Blocking: yes, then.
        """
        context = self._of(device)
        return lambda collectives: in_context(collectives, context, ready, build)

    def _of(self, device: Device) -> GpuContext:
        """Return a GPU as operations use it."""
        context = self._known.get(id(device))
        if context is None:
            # Kept alive by the context, so that no other one can have its id.
            # All ranks need the same: their schedules differ.
            way = "CuPy" if device.gpu.programmable else "PyTorch alone"
            context = self._known[id(device)] = self._run(
                Call("prepare", f"GPU number {len(self._known)} for operations by {way}"),
                lambda collectives: self._prepared(collectives, device))
        return context

    def _prepared(self, collectives: Collectives, device: Device) -> Schedule[GpuContext]:
        segments = yield from self._segments(collectives, device)
        direct = np.zeros(1, np.uint8)
        if len(collectives.nodes) > 1:
            if collectives.rank == 0:
                # As long as a job's start, the first time.
                direct[:] = takes_pointers(
                    self._config, load_mpi().Get_library_version(),
                    device.gpu.index if device.gpu.programmable else None)
            yield from collectives.broadcast(direct, 0)
        # What a rank lays out at a time for the other ranks of its node fits a turn together.
        tuning = replace(TUNING, slice_bytes=TUNING.slice_bytes // max(collectives.slices - 1, 1))
        return GpuContext(device, self._exports, bool(direct[0]), segments, tuning)

    def _segments(self, collectives: Collectives,
                  device: Device) -> Schedule[Sequence[Array] | None]:
        """Return pinned memory that the node's ranks share, if there are several."""
        if collectives.node.size == 1:
            yield ()
            return None
        segments = yield from mapped(collectives.node, AREAS * SLOT_BYTES)
        if segments is None:
            raise TransportError(
                f"rank {collectives.rank}: there are no {AREAS * SLOT_BYTES >> 20} MiB of memory "
                f"to share with the node's other ranks, through which the data of GPUs has to go")
        for segment in segments:
            device.gpu.pin(segment)
        return segments
