"""Prepared operations that are queued on a GPU, for which the host does not wait."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from ..gpu.device import Event, Queued, UserStream
from ..operations.agreement import Call
from ..operations.collectives import Build
from ..operations.on_device import GpuContext, queue_call
from ..operations.queue import GpuQueue
from ..record.flight import Flight
from ..transport.base import T
from .handle import Action, Handle

if TYPE_CHECKING:
    from .group import Group


class QueuedOperation:
    """An operation on GPU memory that was agreed on when it was prepared, on all ranks.

    Args:
        build: Function that returns the schedule; see `queue_call`.
        ready: Function that returns the events after which the vectors may be used.
        stream: Stream on which callers use the results.
    """

    def __init__(self, group: "Group", context: GpuContext, build: Build[Any],
                 ready: Callable[[], Sequence[Event]], stream: UserStream) -> None:
        self._group, self._context, self._build = group, context, build
        self._ready, self._stream = ready, stream
        self._queue = cast(GpuQueue, context.queue)

    def start(self, call: Call, result: T) -> "QueuedHandle[T]":
        """Queue the operation; return a handle whose `wait` returns `result`. Collective."""
        group = self._group
        try:
            while True:
                self._await_turn()
                with group.sharing.counter:
                    # Another thread may have started an operation.
                    if self._is_next:
                        return self._start(call, result)
        except BaseException as error:
            group.engine.fail(error)
            raise

    def _start(self, call: Call, result: T) -> "QueuedHandle[T]":
        group, called_s = self._group, time.monotonic()
        collectives = group.collectives()
        number, event = queue_call(self._context, collectives, call, self._ready(), self._build)
        # Numbers of the queue are negative, apart from those of other operations.
        flight = Flight(call, -number, group.name, collectives.algorithm, called_s, called_s)
        handle = QueuedHandle(group, self._queue, flight, Queued(result, event, self._stream))
        group.record_queued(handle)
        return handle

    @property
    def _is_next(self) -> bool:
        """Whether all earlier operations are queued, and no rank is far behind."""
        return self._group.turns.idle and self._queue.has_room

    def _await_turn(self) -> None:
        group = self._group
        group.check_open()
        while True:
            group.engine.raise_failure()
            self._queue.compare()
            if self._is_next:
                return
            group.engine.advance()


class QueuedHandle(Handle[T]):
    """Handle of an operation that is queued on a GPU; nothing is left to do on the host."""

    is_queued = True

    def __init__(self, group: "Group", calls: GpuQueue, flight: Flight,
                 queued: Queued[T]) -> None:
        self.queue, self.flight, self.complete, self.patience_s = group.queue, flight, True, 0.0
        self._calls, self._queued, self._moved_s = calls, queued, flight.called_s

    @property
    def is_over(self) -> bool:
        """Whether the GPU has done the work."""
        return self._queued.event.test()

    def test(self) -> bool:
        """Return whether the GPU has done the work. See Handle."""
        self.queue.engine.raise_failure()
        return self.is_over

    def wait(self, timeout_s: float | None = None) -> T:
        """Make later work of the caller's stream wait for the operation; return the result.

        Raises the same errors as Handle, as far as they are known by now.
        """
        engine = self.queue.engine
        engine.raise_failure()
        try:
            self._calls.compare()
        except BaseException as error:
            engine.fail(error)
            raise
        return self._queued.settled()

    def when_done(self, action: Action) -> None:
        """Call `action` at once. See Handle."""
        action(self.queue.engine.failure)

    def is_finite(self) -> bool:
        """Return whether the results of all ranks are finite, when the GPU has done the work."""
        while not self.test():
            self.queue.engine.advance()
        return self._calls.is_finite(-self.flight.sequence)
