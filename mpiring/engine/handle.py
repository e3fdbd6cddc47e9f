"""Handles of operations under way, and the lanes in which these queue."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol

from ..record.recorder import Flight
from ..transport.base import T, Task

# Called with None when an operation is complete, or with the error that ended it.
Action = Callable[[BaseException | None], None]


class Driver(Protocol):
    """What a handle asks of the engine; see there."""

    def advance(self) -> None:
        """Progress once, without waiting for anything."""

    def wait(self, handle: "Handle[Any]", timeout_s: float | None = None) -> None:
        """Return when `handle` is complete."""

    def raise_failure(self) -> None:
        """Raise the error of an operation that failed."""

    def call(self, handle: "Handle[Any]", action: Action) -> None:
        """Call an action when `handle` is complete."""


class Handle(Generic[T]):
    """An operation under way.

    Attributes:
        flight: What the operation is, and when it did what.
        task: Its schedule.
        done: Whether it is complete, as far as anybody has looked.
    """

    def __init__(self, lane: "Lane", flight: Flight, task: Task[T]) -> None:
        self.flight = flight
        self.done = False
        self.lane = lane
        self.task = task
        self._moved_s = flight.called_s

    def __repr__(self) -> str:
        return repr(self.flight)

    @property
    def started(self) -> bool:
        """Whether its first messages are under way; until then it is queued."""
        return bool(self.flight.started_s)

    @property
    def waited_s(self) -> float:
        """Seconds since the operation last moved on."""
        return time.monotonic() - self._moved_s

    def test(self) -> bool:
        """Return whether the operation is complete; give it a chance to progress.

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
            timeout_s: Give up after so many seconds; the operation stays under way. By
                default, what the settings say.

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
        """Call `action` once the operation is complete, or has failed.

        Actions of one communicator are called one after the other, in the order in which
        they were asked for, by whatever thread makes progress; by this one, now, if the
        operation is complete already. An action may wait for other operations.

        Args:
            action: Given None, or the error; raises nothing.

        Collective: no. Blocking: no.
        """
        self.lane.engine.call(self, action)

    @property
    def finished(self) -> bool:
        """Whether the schedule has returned; `done` follows when the engine has counted it."""
        return self.task.done

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


class Watch(Protocol):
    """What the engine calls now and then, to see to one communicator."""

    def look(self) -> None:
        """Answer questions of other ranks; raise StallError if an operation is overdue."""


@dataclass(eq=False)
class Lane:
    """One communicator's operations: a few are under way in the background, the rest queue.

    Each communicator has its own, because two ranks may call those of two
    communicators in different orders.

    Attributes:
        in_flight: How many may be under way.
        actions: What is to be called, in this order, when an operation is complete.
        calling: Held by who calls them.
        dropped: Nobody will submit any more: to be let go of, once nothing is under way.
        operations: How many were completed.
        communication_s: Seconds in which at least one of them was under way.
        at_once_s, waited_s: Seconds that callers spent in blocking calls before these became
            operations under way, and waiting for such; each is changed under a lock of its own.
    """

    engine: Driver
    watch: Watch
    in_flight: float
    queue: deque[Handle[Any]] = field(default_factory=deque)
    active: list[Handle[Any]] = field(default_factory=list)
    actions: deque[tuple[Handle[Any], Action]] = field(default_factory=deque)
    calling: threading.Lock = field(default_factory=threading.Lock)
    dropped: bool = False
    operations: int = 0
    communication_s: float = 0.0
    at_once_s: float = 0.0
    waited_s: float = 0.0
    _under_way: int = 0
    _busy_since: float = 0.0

    def begun(self, now: float) -> None:
        """Note that an operation is under way, since `now`."""
        if not self._under_way:
            self._busy_since = now
        self._under_way += 1

    def ended(self, now: float) -> None:
        """Note that one that was under way is complete."""
        self.operations += 1
        self._under_way -= 1
        if not self._under_way:
            self.communication_s += now - self._busy_since

    def ended_at_once(self, seconds: float) -> None:
        """Note that one is complete before it was under way."""
        self.operations += 1
        if not self._under_way:
            self.communication_s += seconds

    @property
    def exposed_s(self) -> float:
        """Seconds that callers spent waiting."""
        return self.at_once_s + self.waited_s

    @property
    def in_use(self) -> bool:
        """Whether there is anything to do, or to come."""
        return bool(not self.dropped or self.queue or self.active or self.actions
                    or self.calling.locked())
