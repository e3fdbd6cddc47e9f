"""Handles of operations in flight, and the queues in which operations wait."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic

from ..gpu.interface import Queued, settled
from ..launch.forks import OfRank
from ..record.flight import Flight
from ..transport import waiting
from ..transport.base import T, Task
from .questions import Watch

if TYPE_CHECKING:
    from .engine import Engine

# Function to call with None when an operation is complete, or with the error that ended it.
Action = Callable[[BaseException | None], None]


class Handle(OfRank, Generic[T]):
    """Handle of an operation in progress.

    Attributes:
        flight: Record of the operation's call and of the times of its steps.
        task: Schedule of the operation.
        queue: Queue of the operation's communicator.
        done: The result of `test`.
        complete: True once the operation is complete and counted, except for work that is queued on
            a GPU; reading it makes no progress.
        patience_s: Number of seconds for which the operation may stall while all ranks answer, if
            more than `stall_timeout_s`. It is the argument `patient`; True means a day.
    """

    def __init__(self, queue: "OperationQueue", flight: Flight, task: Task[T], *,
                 patient: float | bool = False) -> None:
        self.flight = flight
        self.complete = False
        self.patience_s = waiting.CLOSING_S if patient is True else patient
        self.queue = queue
        self.task = task
        self._moved_s = flight.called_s

    def __repr__(self) -> str:
        return repr(self.flight)

    @property
    def waited_s(self) -> float:
        """Seconds since the operation last moved."""
        return time.monotonic() - self._moved_s

    @property
    def done(self) -> bool:
        """Whether the operation is complete, after some progress."""
        return self.test()

    def test(self) -> bool:
        """Make some progress in all operations; return whether this one is complete.

        Raises:
            MpiringError: The operation, or an earlier one, failed.

        Collective: no. Blocking: no.
        """
        if not self.complete:
            self.queue.engine.advance()
        if not self.complete:
            self.queue.engine.raise_failure()
        return self.is_over

    @property
    def is_queued(self) -> bool:
        """Whether the rest is queued on a GPU, so that the host has nothing left to do."""
        return self.complete and isinstance(self.task.result, Queued)

    @property
    def tells_finite(self) -> bool:
        """Whether the operation is complete, and `has_finite_result` can tell about it."""
        return self.is_queued and self.task.result.alarm is not None  # type: ignore[union-attr]

    def has_finite_result(self) -> bool:
        """Return whether the result of all ranks is finite, when the GPU has done the work."""
        while not self.test():
            self.queue.engine.advance()
        return bool(self.task.result.is_finite)  # type: ignore[union-attr]

    @property
    def is_over(self) -> bool:
        """Whether the operation is complete, also on the GPU."""
        result = self.task.result if self.complete else None
        return result.is_over if isinstance(result, Queued) else self.complete

    def wait(self, timeout_s: float | None = None) -> T:
        """Return the operation's result when it is complete on this rank.

        Args:
            timeout_s: Timeout in seconds, after which the operation stays in flight. By default,
                the setting `stall_timeout_s` applies.

        Raises:
            BufferMismatchError: The ranks made different calls.
            StallError: Some ranks did not arrive in time.
            TransportError: MPI failed, or an earlier operation failed.

        Collective: no. Blocking: yes.
        """
        if not self.complete:
            self.queue.engine.wait(self, timeout_s)
        return settled(self.task.result)  # type: ignore[no-any-return]

    def when_done(self, action: Action) -> None:
        """Call `action` once the operation is complete or has failed. Not collective, not blocking.

        The action gets None, or the error; it must not raise. Actions of one communicator run one
        after another, in the order of these calls, in any thread that makes progress. If the
        operation is already complete, the action runs now, in this thread. An action may wait for
        other operations.
        """
        self.queue.engine.call(self, action)

    def step(self) -> bool:
        """Advance as far as the network allows; called by the engine."""
        moved = self.task.step()
        if moved:
            self._moved_s = time.monotonic()
        return moved

    def start(self) -> None:
        """Post the first requests; called by the engine."""
        self._moved_s = self.flight.started_s = time.monotonic()
        self.task.step()


@dataclass(eq=False)
class OperationQueue:
    """One communicator's operations: a few are in flight in the background, the rest wait.

    Each communicator has its own queue, because two ranks may call the operations of two
    communicators in different orders.

    Attributes:
        watch: Watch of the operations; the engine checks it periodically.
        queued: Operations that wait to be started.
        active: Background operations in flight.
        actions: Actions to call when operations are complete, in this order.
        calling: Lock held by the thread that calls actions.
        work: Function to call while callers wait or poll, if the engine has no thread.
        dropped: If true, no operation will be submitted any more, and the engine removes the queue
            once nothing is in flight.
        operations: Number of completed operations.
        in_flight: Number of operations that have begun and are not complete.
        communication_s: Seconds during which at least one operation was in flight.
        at_once_s: Seconds that callers spent in blocking calls without the engine.
        waited_s: Seconds that callers spent waiting for operations in flight. `at_once_s` and
            `waited_s` are changed under separate locks.
        paused_until_s: End of a pause, in `time.monotonic`; see `pause`.
    """

    engine: "Engine"
    watch: Watch
    max_in_flight: float
    queued: deque[Handle[Any]] = field(default_factory=deque)
    active: list[Handle[Any]] = field(default_factory=list)
    actions: deque[tuple[Handle[Any], Action]] = field(default_factory=deque)
    calling: threading.Lock = field(default_factory=threading.Lock)
    work: Callable[[], object] = int
    dropped: bool = False
    operations: int = 0
    in_flight: int = 0
    communication_s: float = 0.0
    at_once_s: float = 0.0
    waited_s: float = 0.0
    paused_until_s: float = 0.0
    _busy_since_s: float = 0.0

    def pause(self) -> None:
        """For 0.3 s, let only waiting callers advance the background operations.

        A caller uses this if it will soon wait and needs its core until then. The engine's thread
        would take the core repeatedly without hiding any communication. After 0.3 s, the thread
        advances the operations again.
        """
        self.paused_until_s = time.monotonic() + waiting.QUEUE_PAUSE_S

    @property
    def is_paused(self) -> bool:
        """Whether the engine's thread must not advance the background operations."""
        return time.monotonic() < self.paused_until_s

    @property
    def busy(self) -> bool:
        """Whether any operation is in flight or queued in the background."""
        return bool(self.active or self.queued)

    def record_start(self, now_s: float) -> None:
        """Record that an operation was started at `now_s`."""
        if not self.in_flight:
            self._busy_since_s = now_s
        self.in_flight += 1

    def record_end(self, now_s: float) -> None:
        """Record that an operation in flight was completed at `now_s`."""
        self.operations += 1
        self.in_flight -= 1
        if not self.in_flight:
            self.communication_s += now_s - self._busy_since_s

    @property
    def exposed_s(self) -> float:
        """Number of seconds that callers have waited."""
        return self.at_once_s + self.waited_s

    @property
    def in_use(self) -> bool:
        """Whether work remains or may still be submitted."""
        return bool(not self.dropped or self.busy or self.actions or self.calling.locked())
