"""Prepared operations that are queued on a GPU, for which the host does not wait."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..gpu.interface import Event, Queued, UserStream
from ..operations.agreement import Call
from ..operations.collectives import Build
from ..operations.on_device import GpuContext, QueuedWork
from ..operations.queue import GpuQueue
from ..record.flight import Flight
from ..transport.base import T
from .handle import Action, Handle

if TYPE_CHECKING:
    from .group import Group


class QueuedOperation:
    """An operation on GPU memory that was agreed on when it was prepared, on all ranks.

    Args:
        build: Function that returns the schedule; see QueuedWork.
        ready: Function that returns the events after which the vectors may be used.
        stream: Stream on which callers use the results.
    """

    def __init__(self, group: "Group", context: GpuContext, build: Build[Any],
                 ready: Callable[[], Sequence[Event]], stream: UserStream) -> None:
        self._group, self._work, self._turns = group, QueuedWork(context, build), group.turns
        self._ready, self._stream = ready, stream

    def start(self, call: Call, result: T) -> "QueuedHandle[T]":
        """Queue the operation; return a handle whose `wait` returns `result`. Collective."""
        group, engine = self._group, self._group.engine
        group.check_open()
        try:
            while True:
                if engine.failure is not None:
                    engine.raise_failure()
                # Operations of several threads must queue in the order of their numbers.
                with group.sharing.counter:
                    # Earlier operations are queued first, and no rank may be far behind.
                    if self._work.queue.compare() and self._turns.idle:
                        return self._start(call, result)
                engine.advance()
        except BaseException as error:
            engine.fail(error)
            raise

    def _start(self, call: Call, result: T) -> "QueuedHandle[T]":
        group, work, called_s = self._group, self._work, time.monotonic()
        number, event = work.start(group.collectives, call, self._ready())
        # Numbers of the queue are negative, apart from those of other operations.
        flight = Flight(call, -number, group.name, work.algorithm, called_s, called_s)
        handle = QueuedHandle(
            group, work.queue, flight, Queued(result, event, self._stream, work.check))
        group.record_queued(handle)
        return handle


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
        return self._queued.is_over

    def test(self) -> bool:
        """Return whether the GPU has done the work. See Handle."""
        self._raise_difference()
        return self.is_over

    def wait(self, timeout_s: float | None = None) -> T:
        """Make later work of the caller's stream wait for the operation; return the result.

        Raises the same errors as Handle, as far as they are known by now.
        """
        self._raise_difference()
        return self._queued.settled()

    def _raise_difference(self) -> None:
        """Raise the error of an earlier operation, or that ranks have made different calls."""
        engine = self.queue.engine
        engine.raise_failure()
        try:
            self._calls.compare()
        except BaseException as error:
            engine.fail(error)
            raise

    def when_done(self, action: Action) -> None:
        """Call `action` at once. See Handle."""
        action(self.queue.engine.failure)

    def has_finite_result(self) -> bool:
        """Return whether the results of all ranks are finite, when the GPU has done the work."""
        while not self.test():
            self.queue.engine.advance()
        return self._calls.is_finite(-self.flight.sequence)
