"""Runs a communicator's operations on vectors in GPU memory.

The schedules are those of the host and, within a node, of `collectives.slots`. Messages go through
pinned host memory, unless MPI accepts GPU pointers. Reductions are queued on the GPU. A rank
arrives at a barrier when all of its queued work is done. Staging slots are in pinned memory.
"""

import functools
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import DTypeLike

from ..collectives import nccl
from ..collectives.operation import Tuning
from ..config import Config
from ..errors import ConfigError, TransportError
from ..gpu.device import Device
from ..gpu.interface import Alarm, DeviceVector, Event, Program, Queued, UserStream
from ..gpu.nccl import Nccl, reduces
from ..launch.start import load_mpi
from ..memory.arrays import Array
from ..memory.reduction import Combine, Reduction
from ..transport import waiting
from ..transport.base import Channel, Node, Request, Schedule, T
from ..transport.layout import AREAS
from ..transport.staged import DeviceChannel
from ..transport.windows import Windows, mapped
from .agreement import Call
from .exports import Exports
from .collectives import Build, Collectives, nothing, returning
from .nccl import ONE_RANK, opened
from .queue import ALARMS, MEMORY_BYTES, GpuQueue, QueuedNode

# Each copy takes about ten microseconds in Python and CUDA, and nothing overlaps with the first and
# the last copy. A turn is the part of a slot that its rank fills at a time.
_TURN_BYTES = 4 << 20
_PIECE_BYTES = 2 << 20
SLOT_BYTES = 2 * Tuning.in_flight * _TURN_BYTES
TUNING = Tuning(ring_bytes=_PIECE_BYTES, direct_bytes=(_PIECE_BYTES, _PIECE_BYTES),
                slice_bytes=_TURN_BYTES, staged_bytes=SLOT_BYTES // 4, rows_bytes=_TURN_BYTES,
                moved_bytes=64 << 10, host_bytes=256 << 10)

# A queue copies in GPU memory, where each step takes only microseconds.
QUEUED_TUNING = replace(TUNING, host_bytes=0)

_log = logging.getLogger("mpiring")

# Function that runs an operation among all ranks of the communicator.
Run = Callable[[Call, "Build[GpuContext]"], "GpuContext"]


@functools.cache
def _log_unqueued(rank: int, device: str, problem: str) -> None:
    """Log, once, why operations cannot be queued."""
    _log.info("rank %d: operations on %s cannot be queued (%s): the host waits between their steps",
              rank, device, problem)


class GpuContext(NamedTuple):
    """A GPU and the resources that a communicator's operations need to use it.

    Attributes:
        exports: GPU memory that other ranks can access.
        direct: If true, MPI accepts pointers to GPU memory.
        segments: Pinned memory of each rank, shared with the node, for the staging slots of a few
            operations. If None, they use the slots of the node memory.
        queue: Queue of operations on GPUs that see each other's memory, on one node; None if the
            host must wait for the GPU.
        nccl: NCCL's communicator of these ranks, or None for the reason `without_nccl`.
        alarms: Words for the alarms of means by NCCL, without a queue; None if there are none.
    """

    device: Device
    exports: Exports
    direct: bool = False
    segments: Sequence[Array] | None = None
    tuning: Tuning = TUNING
    queue: GpuQueue | None = None
    nccl: Nccl | None = None
    without_nccl: str = "NCCL was not opened"
    alarms: Iterator[Array] | None = None

    def check(self) -> None:
        """Raise TransportError if NCCL has failed."""
        if self.nccl is not None:
            self.nccl.check()


class DeviceCombine(Reduction):
    """A Reduction of vectors on a GPU, with queued work; for `nonfinite` see Stream.combine."""

    def __init__(self, op: str, dtype: np.dtype[Any], size: float, device: Device,
                 nonfinite: Alarm | None = None) -> None:
        super().__init__(op, dtype, size, compiled=False)
        self._device, self._nonfinite = device, nonfinite

    def copy(self, x: Array, *outs: Array, past_caches: bool = False) -> None:
        """Copy a vector to others."""
        if outs:
            self._device.combine(self.op, [x], 1, cast(Sequence[DeviceVector], outs))

    def _apply(self, sources: Sequence[Array], divisor: float, outs: Sequence[Array]) -> None:
        self._device.combine(
            self.op, sources, divisor, cast(Sequence[DeviceVector], outs), self._nonfinite)

    def _divide(self, x: Array) -> None:
        if self.size > 1:
            self._apply([x], self.size, [x])


class DeviceNode:
    """The node of an operation whose work is queued on GPUs; see base.Node.

    The slots are one per rank of the node, as bytes; by default, the slots of `node`.
    """

    is_queued = False

    def __init__(self, node: Node, device: Device, slots: Sequence[Array] | None) -> None:
        self.rank, self.size, self.ranks = node.rank, node.size, node.ranks
        self._node, self._device = node, device
        self._slots = slots
        self.test, self.agrees, self.headers, self.leave = (
            node.test, node.agrees, node.headers, node.leave)

    @property
    def has_arrived(self) -> bool:
        """Whether the first barrier has started."""
        return self._node.has_arrived

    def slots(self, dtype: np.dtype[Any], size: int | None = None) -> Sequence[Array]:
        """Return the staging slots of all ranks of the node, in pinned memory; see base.Node."""
        if self._slots is None:
            return self._node.slots(dtype, size)
        return [slot.view(dtype)[:size] for slot in self._slots]

    def barrier(self, *numbers: int) -> "_Arrival":
        """Arrive when all queued work is done; the request also waits for the other ranks."""
        return _Arrival(self._device.event(), lambda: self._node.barrier(*numbers))

    def share(self, *numbers: int) -> Schedule[list[tuple[int, ...]]]:
        """Arrive as for `barrier`; return the numbers that each rank has passed."""
        yield (self._device.event(),)
        return (yield from self._node.share(*numbers))

    def lane(self, index: int) -> "DeviceNode":
        """Return another node object of the same operation, with separate barriers."""
        return DeviceNode(self._node.lane(index), self._device, self._slots)


class _Arrival:
    """A barrier that this rank reaches after an event."""

    def __init__(self, event: Event, arrive: Callable[[], Request]) -> None:
        self._event, self._arrive = event, arrive
        self._barrier: Request | None = None

    def __repr__(self) -> str:
        return repr(self._barrier or "work queued on a GPU")

    def test(self) -> bool:
        if self._barrier is None:
            if not self._event.test():
                return False
            self._barrier = self._arrive()
        return self._barrier.test()


class DeviceCollectives(Collectives):
    """The schedules of an operation on vectors in GPU memory; for `alarm` see DeviceCombine.

    After an allreduce, `tells_finite` is true if the alarm tells each rank about all elements.
    """

    __slots__ = ("_host", "_context", "_channel", "_alarm", "tells_finite")

    def __init__(self, host: Collectives, context: GpuContext, node: Node,
                 alarm: Alarm | None = None) -> None:
        super().__init__(host.resources, node, host.sequence)
        self.tuning, self.sent = context.tuning, host.sent
        self._host, self._context, self._alarm = host, context, alarm
        self._channel: Channel | None = None
        self.tells_finite = False

    @property
    def gpu(self) -> str:  # type: ignore[override]
        """The description of the GPU."""
        return str(self._context.device)

    @property
    def without_nccl(self) -> str:  # type: ignore[override]
        """The reason why these operations cannot use NCCL; "" if they can."""
        return self._context.without_nccl

    @property
    def nccl(self) -> Nccl:
        """NCCL's communicator, if there is one."""
        return cast(Nccl, self._context.nccl)

    def _uses_nccl(self, *vectors: Any) -> bool:
        return self._context.nccl is not None and all(
            isinstance(x, DeviceVector) for x in vectors)

    @property
    def net(self) -> Channel:
        """The operation's channel."""
        if self._channel is None:
            self._channel = DeviceChannel(
                self._host.net, self._context.device, direct=self._context.direct)
        return self._channel

    def allreduce(self, x: Any, *, op: str = "sum", algorithm: str = "auto") -> Schedule[None]:
        """Return the schedule that combines the vector `x` over all ranks; see Collectives."""
        if (algorithm != "auto" or x.nbytes > self.tuning.host_bytes or self.size == 1
                or not self.without_nccl):
            schedule = super().allreduce(x, op=op, algorithm=algorithm)
            self.tells_finite = op == "mean" and self.algorithm == "nccl"
            return self._checked(schedule, x) if self.tells_finite else schedule
        slot = self._context.device.staging.acquire(x.nbytes)
        host = slot[:x.nbytes].view(x.dtype)
        row = self._host.algorithm_of(host, op)
        if row.name == "native":
            # Unlike other algorithms, it cannot start inside a running schedule.
            row = self.algorithm_of(x, op)
        self.algorithm = row.name
        return self._on_host(x, host, slot, row.allreduce(
            self._host, host, op, self._host.combiner(op, x.dtype, self.size)))

    def _checked(self, schedule: Schedule[None], x: Any) -> Schedule[None]:
        """Run a schedule; let each rank check the complete result, as all ranks see it."""
        yield from schedule
        if self._alarm is not None and not reduces("mean", x.dtype):
            # Ranks have checked only their slices.
            self._context.device.combine("sum", [x], 1, [x], self._alarm)

    def _on_host(self, x: Any, host: Array, slot: Array,
                 schedule: Schedule[None]) -> Schedule[None]:
        """Copy a vector to its place in a pinned slot, run a schedule there, and copy it back."""
        device = self._context.device
        yield (device.to_host(x, host),)
        yield from schedule
        device.staging.release(slot, device.to_device(host, x))

    def broadcast(self, x: Any, root: int) -> Schedule[None]:
        """Return the schedule that copies the vector `x` of rank `root` to all ranks."""
        return nccl.broadcast(self, x, root) if self._uses_nccl(x) else super().broadcast(x, root)

    def allgather_chunks(self, chunks: Sequence[Any]) -> Schedule[None]:
        """Return the schedule that copies vector r of `chunks` of rank r to all ranks."""
        return (nccl.allgather_chunks(self, chunks) if self._uses_nccl(*chunks) else
                super().allgather_chunks(chunks))

    def _combine_directly(self, chunks: Sequence[Any], combine: Combine) -> Schedule[None]:
        return (nccl.combine_chunks(self, chunks, combine) if self._uses_nccl(*chunks) else
                super()._combine_directly(chunks, combine))

    def _exchange(self, sends: Mapping[int, Any], receives: Mapping[int, Any]) -> Schedule[None]:
        return (nccl.exchange(self, sends, receives)
                if self._uses_nccl(*sends.values(), *receives.values()) else
                super()._exchange(sends, receives))

    def borrow(self, n: int, dtype: DTypeLike) -> Any:
        """Lend GPU memory for n elements for the duration of a `with` block."""
        return self._context.device.scratch.borrow(n, dtype)

    def combiner(self, op: str, dtype: np.dtype[Any], size: float) -> Combine:
        """Return the implementation of an op on the GPU."""
        return DeviceCombine(op, dtype, size, self._context.device, self._alarm)

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> Schedule[Any]:
        """Return a schedule that allocates a GPU vector, shared with the node if possible."""
        device, dtype = self._context.device, np.dtype(dtype)
        if self.node.size == 1:
            return returning(
                device.allocate(math.prod(shape) * dtype.itemsize).view(dtype), nothing())
        return self._context.exports.empty(
            self.node, device, shape, dtype, self.next_window())


def in_context(collectives: Collectives, context: GpuContext, ready: Sequence[Event],
               build: Callable[[Collectives], Schedule[T]],
               stream: UserStream | None = None) -> Schedule[Any]:
    """Return a schedule on a GPU that ends when all of its work is done or queued.

    The vectors may be used after the events `ready`. If the work is queued, the result is Queued
    for the caller's stream, by default that of the GPU's package.
    """
    stream = stream or context.device.gpu
    if context.queue is not None:
        queued = QueuedNode(context.queue, collectives.node)
        _, schedule = _built(collectives, context, queued, build)
        return _in_turn(collectives, context, lambda: queued.begin(ready), schedule, stream)
    # As in NodeMemory, every fourth operation uses the same slots.
    start = collectives.sequence % AREAS * SLOT_BYTES
    slots = None if context.segments is None else [
        segment[start:start + SLOT_BYTES] for segment in context.segments]
    node = DeviceNode(collectives.node, context.device, slots)
    if context.nccl is None:
        return _with_events(ready, _built(collectives, context, node, build)[1], context.device)
    alarm = None if context.alarms is None else (next(context.alarms), collectives.sequence)
    on_gpu, schedule = _built(collectives, context, node, build, alarm)
    return _in_turn(collectives, context, lambda: context.device.follow(ready), schedule, stream,
                    alarm if on_gpu.tells_finite else None)


def _built(
    collectives: Collectives, context: GpuContext, node: Node,
    build: Callable[[Collectives], Schedule[T]], alarm: Alarm | None = None,
) -> tuple[DeviceCollectives, Schedule[T]]:
    on_gpu = DeviceCollectives(collectives, context, node, alarm)
    schedule = build(on_gpu)
    collectives.algorithm = on_gpu.algorithm
    return on_gpu, schedule


def _in_turn(collectives: Collectives, context: GpuContext, begin: Callable[[], None],
             schedule: Schedule[T], stream: UserStream,
             alarm: Alarm | None = None) -> Schedule[Queued[T]]:
    """Return a schedule that queues the work of another one when its turn has come."""
    turn = collectives.resources.turns.join(collectives.sequence)

    def queued() -> Schedule[Queued[T]]:
        yield (turn,)
        begin()
        result = yield from schedule
        turn.leave()
        return Queued(result, context.device.mark(), stream, context.check, alarm)

    return queued()


def _words(device: Device) -> Iterator[Array]:
    """Return words of pinned memory, in turn; see gpu.Alarm."""
    memory = device.gpu.pinned(4 * ALARMS).view(np.uint32)
    return itertools.cycle([memory[i:i + 1] for i in range(ALARMS)])


def _with_events(ready: Sequence[Event], schedule: Schedule[T], device: Device) -> Schedule[T]:
    if ready:
        yield ready
    result = yield from schedule
    yield (device.event(),)
    return result


class QueuedWork:
    """The work of an operation that ranks have agreed on, which is noted once, and then repeated.

    The function `build` returns its schedule. On all ranks, the vectors are always in the same
    windows, or all in none.
    """

    def __init__(self, context: GpuContext, build: Build[Any]) -> None:
        self._context, self._build = context, build
        self.queue, self.check = cast(GpuQueue, context.queue), context.check
        self.algorithm = ""
        # The work, for each place of the staging slots.
        self._programs: dict[int, Program] = {}

    def start(self, collectives: Callable[[], Collectives], call: Call,
              ready: Sequence[Event]) -> tuple[int, Event]:
        """Queue it; return the number of the call, which ranks compare later, and its last event.

        The vectors may be used after the events `ready`.
        """
        queue = self.queue
        number, half = queue.record(call), queue.half
        program = self._programs.get(half)
        if program is not None:
            return number, queue.repeat(program, ready, number)
        node = QueuedNode(queue, None)
        node.begin(ready)
        on_gpu = DeviceCollectives(collectives(), self._context, node, queue.alarm(number))
        with queue.device.noting() as self._programs[half]:
            for pending in self._build(on_gpu):
                if not all(request.test() for request in pending):
                    raise RuntimeError(f"{call} waits for {pending}, not only for GPUs")
        self.algorithm = on_gpu.algorithm
        return number, queue.device.mark()


class GpuOperations:
    """The GPUs that the operations of one communicator use, on one rank."""

    def __init__(self, windows: Windows, run: Run, config: Config) -> None:
        self._run, self._config = run, config
        self._exports = Exports(windows)
        self._contexts: dict[int, GpuContext] = {}

    def own_device(self, device: Device) -> Device:
        """Return a GPU with the streams of this communicator, for vectors of its operations.

        The first call for each GPU is collective and blocking.
        """
        return self.context_of(device).device

    def for_vector(self, x: Any, build: Callable[[Any, Collectives], Schedule[T]]) -> Build[T]:
        """Return a function that builds a schedule on a vector, which may be on a GPU.

        The arguments of `build` are the vector and the collectives.
        """
        if not isinstance(x, DeviceVector):
            return functools.partial(build, x)
        own = replace(x, device=self.own_device(x.device))
        return self.for_device(x.device, (x.ready,) if x.ready else (),
                               functools.partial(build, own), x.stream)

    def for_device(self, device: Device, ready: Sequence[Event], build: Build[T],
                   stream: UserStream | None = None) -> Build[T]:
        """Return a function that builds the same schedule for vectors of an `own_device`.

        The vectors may be used after the events `ready`, and the results on the caller's `stream`.
        The first call for each GPU is collective and blocking.
        """
        context = self.context_of(device)
        return lambda collectives: in_context(collectives, context, ready, build, stream)

    def close(self) -> bool:
        """Close NCCL and the memory of other ranks; return whether operations have used GPUs.

        All queued work of all ranks is done. Raises BufferMismatchError if the calls of queued
        operations differ.
        """
        for context in self._contexts.values():
            if context.queue is not None:
                context.queue.compare()
            if context.nccl is not None:
                context.nccl.close()
        self._exports.close()
        return bool(self._contexts)

    def end_calls(self) -> None:
        """End the calls of NCCL, for which the GPU could wait forever; results are undefined."""
        for context in tuple(self._contexts.values()):
            if context.nccl is not None:
                context.nccl.abort()

    def release(self, is_over: Callable[[], bool]) -> None:
        """Let queued operations end without a rank that has died; their results are undefined.

        Return when `is_over` returns true, or after a few seconds.
        """
        deadline_s = time.monotonic() + waiting.GRACE_S
        self.end_calls()
        while not is_over() and time.monotonic() < deadline_s:
            # GPUs may still write the numbers of earlier barriers.
            for context in self._contexts.values():
                if context.queue is not None:
                    context.queue.release()
            time.sleep(waiting.BUSY_CHECK_S)

    def context_of(self, device: Device) -> GpuContext:
        """Return a GPU and its resources; all ranks must make the first call for each GPU.

        Raises ConfigError on all ranks if the setting `nccl` is "yes", but NCCL cannot be used.
        """
        gpu = device.gpu
        context = self._contexts.get(id(gpu))
        if context is None:
            # The context keeps the GPU alive, so that no other one gets its id. All ranks must use
            # the same package, because the schedules differ.
            package = "CuPy" if gpu.programmable else "PyTorch alone"
            context = self._run(
                Call("prepare", f"GPU number {len(self._contexts)} for operations with {package}"),
                lambda collectives: self._prepare(collectives, device))
            if self._config.nccl == "yes" and context.without_nccl not in ("", ONE_RANK):
                raise ConfigError(f"MPIRING_NCCL=yes, but {context.without_nccl}; use auto")
            self._contexts[id(gpu)] = context
        return context

    def _prepare(self, collectives: Collectives, device: Device) -> Schedule[GpuContext]:
        # Operations of two communicators may be queued in different orders on two ranks.
        own, queue = type(device)(device.gpu), None
        if len(collectives.nodes) == 1:
            queue = yield from self._queue(collectives.node, own)
        library, without_nccl, has_alarms = yield from opened(
            collectives, own, self._config.nccl, needed=queue is None)
        if queue is not None:
            return GpuContext(own, self._exports, tuning=QUEUED_TUNING, queue=queue, nccl=library,
                              without_nccl=without_nccl)
        if library is not None:
            device = own
        segments = yield from self._segments(collectives, device)
        direct = np.zeros(1, np.uint8)
        if len(collectives.nodes) > 1:
            if collectives.rank == 0:
                from ..launch.gpu_aware import takes_pointers
                # The first call may try it in a new job, which takes as long as a job's start.
                # While NCCL waits for another rank, MPI might wait for the GPU.
                direct[:] = library is None and takes_pointers(
                    self._config, load_mpi().Get_library_version(),
                    device.gpu.index if device.gpu.programmable else None)
            yield from collectives.broadcast(direct, 0)
        # All pieces that a rank stages at a time for the other ranks of its node fit into one turn.
        tuning = replace(TUNING, slice_bytes=TUNING.slice_bytes // max(collectives.slices - 1, 1))
        return GpuContext(
            device, self._exports, bool(direct[0]), segments, tuning, None, library, without_nccl,
            _words(device) if library is not None and has_alarms else None)

    def _queue(self, node: Node, device: Device) -> Schedule[GpuQueue | None]:
        """Return a queue of operations, or None on all ranks if a GPU of the node cannot queue."""
        problem = device.gpu.unqueued
        answers = yield from node.share(int(not problem))
        if problem:
            _log_unqueued(node.ranks[node.rank], repr(device), problem)
        if not all(ok for ok, in answers):
            return None
        if node.size == 1:
            return GpuQueue(device, node, [np.zeros(MEMORY_BYTES, np.uint8)],
                            [device.allocate(0)])
        slots = yield from self._exports.open(
            node, device, device.allocate(2 * SLOT_BYTES))
        memory = None if slots is None else (yield from mapped(node, MEMORY_BYTES))
        if slots is None or memory is None:
            return None
        for segment in memory:
            device.gpu.pin(segment)
        return GpuQueue(device, node, memory, slots)

    def _segments(self, collectives: Collectives,
                  device: Device) -> Schedule[Sequence[Array] | None]:
        """Return pinned memory that the node's ranks share; None if this rank is alone."""
        if collectives.node.size == 1:
            yield ()
            return None
        segments = yield from mapped(collectives.node, AREAS * SLOT_BYTES)
        if segments is None:
            raise TransportError(
                f"rank {collectives.rank}: cannot allocate {AREAS * SLOT_BYTES >> 20} MiB of "
                f"shared memory, which the ranks of a node need to exchange GPU data")
        for segment in segments:
            device.gpu.pin(segment)
        return segments
