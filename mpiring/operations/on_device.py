"""Schedules of one operation on vectors in a GPU's memory.

They are the same as on the host. Their messages go through pinned host memory, or MPI takes the
GPU's pointers; their sums are queued on the GPU; and a rank arrives at a barrier when all that it
has queued is done. Staging slots are pinned memory.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike

from ..collectives.operation import Tuning
from ..gpu.device import Device, DeviceVector, Event
from ..memory.arrays import Array
from ..memory.reduction import Combine, reduction
from ..transport.base import Channel, Node, Request, Schedule, T
from ..transport.layout import AREAS, LATE, LOOK, PUBLISH
from ..transport.staged import DeviceChannel
from .exports import Exports
from .operation import Collectives

# Each copy costs some ten microseconds of Python and CUDA; the first and the last have nothing to
# hide behind. At each turn a rank fills so much of a slot for the others.
_TURN_BYTES = 4 << 20
_PIECE_BYTES = 2 << 20
TUNING = Tuning(ring_bytes=_PIECE_BYTES, direct_bytes=(_PIECE_BYTES, _PIECE_BYTES),
                slice_bytes=_TURN_BYTES, moved_bytes=64 << 10)
SLOT_BYTES = 2 * TUNING.in_flight * _TURN_BYTES


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


class DeviceCombine:
    """Combines vectors on a GPU as a Reduction does on the host; see there.

    Raises: as Reduction.
    """

    def __init__(self, op: str, dtype: np.dtype[Any], size: float, device: Device) -> None:
        like = reduction(op, dtype, size)
        self._op = op
        self.adds, self.divisor = False, like.size if op == "mean" else 1
        self._divides_first = like.divides_first
        self._device = device

    def prepare(self, x: Array) -> None:
        """Divide `x` by the number of ranks where the mean needs it first."""
        if self._divides_first:
            self._queue([x], self.divisor, [x])

    def accumulate(self, out: Array, contribution: Array) -> None:
        """Combine `contribution` into `out`, in place."""
        self._queue([out, contribution], 1, [out])

    def finish(self, chunk: Array) -> None:
        """Divide a chunk of sums by the number of ranks if a mean is asked for."""
        if self.divisor != 1 and not self._divides_first:
            self._queue([chunk], self.divisor, [chunk])

    def combine(self, sources: Sequence[Array], *outs: Array) -> None:
        """Combine contributions elementwise, in the order given, and divide where it is a mean."""
        if len(sources) > 1 or self.divisor != 1 or len(outs) > 1 or sources[0] is not outs[0]:
            self._queue(sources, self.divisor, outs)

    def _queue(self, sources: Sequence[Array], divisor: float, outs: Sequence[Array]) -> None:
        self._device.combine(self._op, sources, divisor, cast(Sequence[DeviceVector], outs))


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
