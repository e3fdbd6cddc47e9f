"""Handles of operations under way, and the lanes in which these queue."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol

from ..record.flight import Flight
from ..transport import waiting
from ..transport.base import T, Task

# Called with None when an operation is complete, or with the error that ended it.
Action = Callable[[BaseException | None], None]


class Handle(Generic[T]):
    """Handle of an operation in progress.

    Attributes:
        flight: What the operation is, and when it did what.
        task: Its schedule.
        lane: The operations of its communicator.
        done: Whether it is complete and counted.
        patience_s: Seconds that ranks which answer may stay away, where that is more than
            `stall_timeout_s`; made of `patient`, True for a day.
    """

    def __init__(self, lane: "Lane", flight: Flight, task: Task[T], *,
                 patient: float | bool = False) -> None:
        self.flight = flight
        self.done = False
        self.patience_s = waiting.CLOSING_S if patient is True else patient
        self.lane = lane
        self.task = task
        self._moved_s = flight.called_s

    def __repr__(self) -> str:
        return repr(self.flight)

    @property
    def waited_s(self) -> float:
        """Seconds since the operation last moved."""
        return time.monotonic() - self._moved_s

    def test(self) -> bool:
        """Make some progress; return whether the operation is complete.

        Raises:
            MpiringError: The operation, or an earlier one, failed.

        Collective: no. Blocking: no.
        """
        if not self.done:
            self.lane.engine.advance()
        if not self.done:
            self.lane.engine.raise_failure()
        return self.done

    def wait(self, timeout_s: float | None = None) -> T:
        """Return the operation's result when it is complete on this rank.

        Args:
            timeout_s: Give up after this many seconds; the operation stays under way. By
                default the settings decide.

        Raises:
            BufferMismatchError: The ranks called different things.
            StallError: Some ranks did not arrive in time.
            TransportError: MPI failed, or an earlier operation did.

        Collective: no. Blocking: yes.
        """
        if not self.done:
            self.lane.engine.wait(self, timeout_s)
        return self.task.result  # type: ignore[return-value]

    def when_done(self, action: Action) -> None:
        """Call `action` once the operation is complete or has failed.

        Actions of one communicator are called one after the other, in the order of these calls,
        by whatever thread makes progress; by this thread, now, if the operation is complete
        already. An action may wait for other operations.

        Args:
            action: Takes None, or the error; raises nothing.

        Collective: no. Blocking: no.
        """
        self.lane.engine.call(self, action)

    def step(self) -> bool:
        """Advance as far as the network allows; for the engine."""
        moved = self.task.step()
        if moved:
            self._moved_s = time.monotonic()
        return moved

    def start(self) -> None:
        """Post the first requests; for the engine."""
        self._moved_s = self.flight.started_s = time.monotonic()
        self.task.step()


class Driver(Protocol):
    """What advances operations; see engine.Engine.

    Attributes:
        threaded: In the background, too.
    """

    threaded: bool

    def advance(self) -> None:
        """Make progress once."""

    def raise_failure(self) -> None:
        """Raise the first error of any operation, if there was one."""

    def wait(self, handle: Handle[Any], timeout_s: float | None = None, /) -> None:
        """Return when `handle` is complete, or raise StallError after `timeout_s`."""

    def call(self, handle: Handle[Any], action: Action, /) -> None:
        """Call an action when `handle` is complete."""


@dataclass(eq=False)
class Lane:
    """One communicator's operations: a few are under way in the background, the rest queue.

    Each communicator has its own, because two ranks may call the operations of two
    communicators in different orders.

    Attributes:
        look: Called now and then; raises StallError if an operation is overdue.
        in_flight: How many may be under way.
        actions: What to call when operations are complete, in this order.
        calling: Held by the thread that calls actions.
        dropped: No operation will be submitted any more: the engine forgets the lane once
            nothing is under way.
        operations: How many were completed.
        under_way: How many have begun and are not complete.
        communication_s: Seconds in which at least one of them was under way.
        rests_until_s: See `rest`; in `time.monotonic`.
        at_once_s, waited_s: Seconds that callers spent in blocking calls before these became
            operations under way, and waiting for such; each is changed under a lock of its own.
    """

    engine: Driver
    look: Callable[[], object]
    in_flight: float
    queue: deque[Handle[Any]] = field(default_factory=deque)
    active: list[Handle[Any]] = field(default_factory=list)
    actions: deque[tuple[Handle[Any], Action]] = field(default_factory=deque)
    calling: threading.Lock = field(default_factory=threading.Lock)
    dropped: bool = False
    operations: int = 0
    under_way: int = 0
    communication_s: float = 0.0
    at_once_s: float = 0.0
    waited_s: float = 0.0
    rests_until_s: float = 0.0
    _busy_since_s: float = 0.0

    def rest(self) -> None:
        """Leave the operations in the background to whoever waits for one of them, for 0.3 s.

        For a caller that soon waits, and needs its core until then: the engine's thread would
        take it again and again, and hide nothing. After 0.3 s it advances them after all.
        """
        self.rests_until_s = time.monotonic() + waiting.REST_S

    @property
    def rests(self) -> bool:
        """Whether the engine's thread is to leave the operations in the background alone."""
        return time.monotonic() < self.rests_until_s

    @property
    def busy(self) -> bool:
        """Whether any operation is under way or queues in the background."""
        return bool(self.active or self.queue)

    def begun(self, now_s: float) -> None:
        """Note that an operation is under way since `now_s`."""
        if not self.under_way:
            self._busy_since_s = now_s
        self.under_way += 1

    def ended(self, now_s: float) -> None:
        """Note that an operation that was under way is complete."""
        self.operations += 1
        self.under_way -= 1
        if not self.under_way:
            self.communication_s += now_s - self._busy_since_s

    @property
    def exposed_s(self) -> float:
        """Seconds that callers spent waiting."""
        return self.at_once_s + self.waited_s

    @property
    def in_use(self) -> bool:
        """Whether there is anything to do, or to come."""
        return bool(not self.dropped or self.busy or self.actions or self.calling.locked())
