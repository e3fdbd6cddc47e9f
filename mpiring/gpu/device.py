"""A GPU with its streams: copies and sums of vectors in the right order."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike

from ..memory.arrays import Array
from ..memory.scratch import Scratch
from .interface import Alarm, DeviceVector, Event, Flags, Gpu, Program, Stream
from .warps import WarpKernel

# Number of idle scratch vectors, of few lengths, to keep. It is sufficient for all operations in
# flight. Returning a vector to CUDA would wait for all queued work.
_MAX_IDLE = 64
_UNIT_BYTES = 2 << 20
# Idle memory beyond both limits is freed, the oldest first. Pinning a page again costs ten times as
# much as copying it, but no other program can use pinned memory.
_KEEP, _KEEP_BYTES = 16, 256 << 20
# Number of slots, the oldest first, that are tested for whether a copy still uses them.
_MAX_TESTED = 4

_Slot = tuple[Array, Event | None]


class Staging:
    """Pinned host memory, lent for one copy at a time; any thread may call it."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        # In the order in which slots were returned.
        self._idle: list[_Slot] = []
        self._idle_bytes = 0
        self._lock = threading.Lock()

    def acquire(self, nbytes: int) -> Array:
        """Return unused memory of at least `nbytes`."""
        # There are few lengths, so that slots can be reused by other operations.
        size = 1 << max(nbytes - 1, 4095).bit_length()
        busy: list[_Slot] = []
        while len(busy) < _MAX_TESTED and (slot := self._removed(size)) is not None:
            if _is_free(slot):
                break
            busy.append(slot)
        else:
            slot = None
        for busy_slot in busy:
            self._add(busy_slot)
        return self._gpu.pinned(size) if slot is None else slot[0]

    def release(self, slot: Array, until: Event | None = None) -> None:
        """Return memory to the pool; a copy may use it until an event."""
        self._add((slot, until))
        for _ in range(_MAX_TESTED):
            if len(self._idle) <= _KEEP or self._idle_bytes <= _KEEP_BYTES:
                break
            oldest = self._removed()
            if oldest is not None and not _is_free(oldest):
                self._add(oldest)

    def _add(self, slot: _Slot) -> None:
        with self._lock:
            self._idle.append(slot)
            self._idle_bytes += slot[0].size

    def _removed(self, size: int | None = None) -> _Slot | None:
        with self._lock:
            for index, (slot, _) in enumerate(self._idle):
                if size is None or slot.size == size:
                    self._idle_bytes -= slot.size
                    return self._idle.pop(index)
        return None


def _is_free(slot: _Slot) -> bool:
    """Return whether no copy uses a slot; do not hold the lock, because this calls CUDA."""
    until = slot[1]
    return until is None or until.test()


class _Queue:
    """A stream that is marked, and waits for other streams, only if new work was queued.

    A CUDA call costs a microsecond or two, and sending a piece of 2 MiB takes only 40 µs.
    Use `changes` to queue work on the stream.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._mark: Event | None = None
        self._is_used = False
        self._known: dict[_Queue, Event] = {}

    def mark(self) -> Event:
        """Return a mark behind all queued work."""
        if self._mark is None:
            self._mark = self._stream.record()
        return self._mark

    def follow(self, *others: "_Queue") -> None:
        """Make work that is queued from now on wait for the queued work of other streams."""
        for other in others:
            if other._is_used and self._known.get(other) is not (mark := other.mark()):
                self._known[other] = mark
                self.changes().wait(mark)

    def repeat(self, *arguments: Any) -> Event:
        """Queue the work of a program; see Stream.repeat."""
        self._mark, self._is_used = self._stream.repeat(*arguments), True
        return self._mark

    def changes(self) -> Stream:
        """Return the stream, to queue work on it."""
        self._mark, self._is_used = None, True
        return self._stream


class Device:
    """A GPU with separate streams for uploads, downloads and work.

    Queued work sees the results of the work queued before it. There is one exception: wait for a
    copy to the host before you overwrite its source, as for a message that is being sent. Copies in
    both directions overlap. Nothing waits for the user's streams, because operations begin only
    when their vectors are `ready`. Any thread may call it.

    `scratch` is memory on the GPU, for schedules. Queued work may still use memory that was
    returned; only work that is queued later may overwrite it. `staging` is pinned host memory, for
    single copies.
    """

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._uploads, self._downloads, self._work, self._marks = (
            _Queue(gpu.stream()) for _ in range(4))
        self._lock = threading.RLock()
        self._program: Program | None = None
        self.scratch = Scratch(
            _MAX_IDLE, cast(Any, lambda nbytes: self.allocate(_rounded(nbytes))))
        self.staging = Staging(gpu)

    def __repr__(self) -> str:
        return self.gpu.name

    def allocate(self, nbytes: int) -> DeviceVector:
        """Return new memory on the GPU, as bytes of undefined content."""
        return self.gpu.allocate(nbytes, self)

    def vector_at(self, address: int, n: int, dtype: DTypeLike, owner: object) -> DeviceVector:
        """Return a user's GPU memory as a vector; address 0 stands for none.

        `owner` keeps the memory alive; it is a tensor for a PyTorch GPU. Raises ConfigError if the
        dtype cannot be sent.
        """
        return DeviceVector(self, address, n, np.dtype(dtype), owner)

    def to_host(self, x: DeviceVector, out: Array) -> Event:
        """Queue a copy to pinned host memory; return its event."""
        with self._lock:
            self._refuse_to_note()
            self._downloads.follow(self._work, self._uploads)
            if x.size:
                self._downloads.changes().download(x, out)
            return self._downloads.mark()

    def to_device(self, x: Array, out: DeviceVector) -> Event:
        """Queue a copy from pinned host memory; return its event."""
        with self._lock:
            self._refuse_to_note()
            self._uploads.follow(self._work)
            if out.size:
                self._uploads.changes().upload(x, out)
            return self._uploads.mark()

    def combine(self, op: str, sources: Sequence[Any], divisor: float,
                outs: Sequence[DeviceVector], nonfinite: Alarm | None = None) -> None:
        """Queue a combination of vectors on the GPU or in pinned memory; see Stream.combine."""
        if not outs[0].size:
            return
        with self._uploaded(sources) as vectors, self._computing() as stream:
            stream.combine(op, vectors, divisor, outs, nonfinite)
            if self._program is not None:
                self._program.steps.append((op, vectors, divisor, outs, nonfinite is not None))

    def meet(self, flags: Flags, number: int) -> None:
        """Queue a barrier of a node between all work so far and all later work; see Stream.meet."""
        with self._lock:
            self._work.follow(self._uploads, self._downloads)
            self._work.changes().meet(flags, number)
            if self._program is not None:
                self._program.steps.append(None)

    def call(self, queue: Callable[[int], None]) -> None:
        """Queue the work of a library; see Stream.call."""
        with self._computing() as stream:
            stream.call(queue)
            if self._program is not None:
                self._program.steps.append(queue)

    @contextmanager
    def noting(self) -> Iterator[Program]:
        """Note the sums, barriers and calls that are queued in a block, so that `repeat` can.

        Other work in the block raises RuntimeError.
        """
        with self._lock:
            self._program = program = Program()
            try:
                yield program
            finally:
                self._program = None

    def _refuse_to_note(self) -> None:
        if self._program is not None:
            raise RuntimeError("only sums, barriers and calls of libraries can be repeated")

    def repeat(self, program: Program, ready: Sequence[Event], flags: Flags, number: int,
               nonfinite: Alarm) -> Event:
        """Queue the work of a program again, after the events `ready`; return its last event.

        The first barrier has this number. The alarm of sums is `nonfinite`.
        """
        with self._lock:
            self._work.follow(self._uploads, self._downloads)
            return self._work.repeat(program, ready, flags, number, nonfinite)

    def follow(self, events: Sequence[Event]) -> None:
        """Make all work that is queued from now on wait for events of any stream of this GPU."""
        with self._lock:
            for event in events:
                self._work.changes().wait(event)

    def clear(self, x: DeviceVector) -> None:
        """Queue filling a vector with zeros."""
        if x.size:
            with self._computing() as stream:
                self._refuse_to_note()
                stream.clear(x)

    def launch(self, kernel: WarpKernel, function: Callable[..., None], *arguments: Any) -> None:
        """Queue a kernel, unless the first argument is empty; see Stream.launch."""
        if arguments[0].size:
            with self._computing() as stream:
                self._refuse_to_note()
                stream.launch(kernel, function, *arguments)

    @contextmanager
    def _computing(self) -> Iterator[Stream]:
        """Lend the stream for work, which waits for earlier copies to the GPU."""
        with self._lock:
            self._work.follow(self._uploads)
            yield self._work.changes()

    @contextmanager
    def _uploaded(self, sources: Sequence[Any]) -> Iterator[list[DeviceVector]]:
        """Lend vectors on the GPU, which are copies if the sources are in host memory."""
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

    def mark(self) -> Event:
        """Return an event of all queued work; later work waits for the copies before it."""
        with self._lock:
            self._work.follow(self._uploads, self._downloads)
            return self._work.mark()

    def event(self) -> Event:
        """Return an event of all queued work."""
        with self._lock:
            # The mark is on a separate stream, so that no other stream waits.
            self._marks.follow(self._uploads, self._downloads, self._work)
            return self._marks.mark()


def _rounded(nbytes: int) -> int:
    """Round up to one of few lengths; long vectors become at most a quarter longer."""
    unit = max(_UNIT_BYTES, 1 << max(nbytes.bit_length() - 3, 0))
    return max(1, -(-nbytes // unit)) * unit
