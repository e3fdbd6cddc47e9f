"""Copies and combines vectors on a GPU, in the right order."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike

from ..memory.arrays import Array
from ..memory.scratch import Scratch
from .base import DeviceVector, Event, Gpu, Stream
from .staging import Staging

# Idle scratch vectors, of few lengths: enough for all operations under way. Giving one back to
# CUDA would wait for all queued work.
_MOST_IDLE = 64
_UNIT_BYTES = 2 << 20


class _Queue:
    """A stream that is marked, and waits for others, only where new work was queued.

    A call of CUDA costs a microsecond or two, and a piece of 2 MiB travels for 40.

    Args:
        stream: The stream; call `changes` before queueing on it.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._mark: Event | None = None
        self._known: dict[_Queue, Event] = {}

    def mark(self) -> Event:
        """Return a mark behind all queued work."""
        if self._mark is None:
            self._mark = self._stream.record()
        return self._mark

    def follow(self, *others: "_Queue") -> None:
        """Make work that is queued from now on wait for what others have queued."""
        for other in others:
            mark = other.mark()
            if self._known.get(other) is not mark:
                self._known[other] = mark
                self._stream.wait(mark)
                self._mark = None

    def changes(self) -> Stream:
        """Return the stream, to queue work on."""
        self._mark = None
        return self._stream


@dataclass
class Device:
    """A GPU with mpiring's streams: one inwards, one outwards, one for work.

    Queued work finds the work queued before it done, with one exception, as for a message that is
    being sent: wait for a copy to the host before its source is overwritten. Copies in both
    directions overlap. Nothing waits for the user's streams: operations begin when vectors are
    `ready`. Any thread may call.

    Args:
        gpu: The GPU.

    Attributes:
        scratch: Memory on the GPU, for schedules. What is given back may still be in use by queued
            work, and is free for work that is queued later.
        staging: Pinned host memory, for single copies.
    """

    gpu: Gpu
    scratch: Scratch = field(init=False)
    staging: Staging = field(init=False)

    def __post_init__(self) -> None:
        self._inwards, self._outwards, self._work, self._marks = (
            _Queue(self.gpu.stream()) for _ in range(4))
        self._lock = threading.RLock()
        self.scratch = Scratch(
            _MOST_IDLE, cast(Any, lambda nbytes: self.allocate(_rounded(nbytes))))
        self.staging = Staging(self.gpu)

    def __repr__(self) -> str:
        return self.gpu.name

    def allocate(self, nbytes: int) -> DeviceVector:
        """Return new memory on the GPU, as bytes of undefined content."""
        return self.gpu.allocate(nbytes, self)

    def vector_at(self, address: int, n: int, dtype: DTypeLike, owner: object) -> DeviceVector:
        """Return memory of the GPU that is not mpiring's as a vector.

        Args:
            address: Of the first of `n` elements; 0 where there are none.
            dtype: Of NumPy's, or bfloat16 of ml_dtypes.
            owner: Keeps the memory alive; a tensor, if the GPU is PyTorch's.

        Raises:
            ConfigError: The dtype cannot be sent.
        """
        return DeviceVector(self, address, n, np.dtype(dtype), owner)

    def to_host(self, x: DeviceVector, out: Array) -> Event:
        """Queue a copy to pinned host memory; return its event."""
        with self._lock:
            self._outwards.follow(self._work, self._inwards)
            if x.size:
                self._outwards.changes().download(x, out)
            return self._outwards.mark()

    def to_device(self, x: Array, out: DeviceVector) -> Event:
        """Queue a copy from pinned host memory; return its event."""
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

    def compute(self, function: Callable[..., None], *arguments: Any) -> None:
        """Queue array operations, unless the first argument is empty; see Stream.compute."""
        if arguments[0].size:
            with self._at_work() as stream:
                stream.compute(function, *arguments)

    @contextmanager
    def _at_work(self) -> Iterator[Stream]:
        """Lend the stream for work, which waits for earlier copies to the GPU."""
        with self._lock:
            self._work.follow(self._inwards)
            yield self._work.changes()

    @contextmanager
    def _uploaded(self, sources: Sequence[Any]) -> Iterator[list[DeviceVector]]:
        """Lend vectors on the GPU: copies of those in host memory, and the others themselves."""
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
        """Return an event of all queued work."""
        with self._lock:
            # On a stream of its own, so that none of the others waits.
            self._marks.follow(self._inwards, self._outwards, self._work)
            return self._marks.mark()


def _rounded(nbytes: int) -> int:
    """Return one of few lengths: at least as long, and if not short, at most a quarter longer."""
    unit = max(_UNIT_BYTES, 1 << max(nbytes.bit_length() - 3, 0))
    return max(1, -(-nbytes // unit)) * unit
