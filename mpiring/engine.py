"""Advances operations: now for who waits, in the background for who computes.

MPI makes no progress by itself: somebody has to test. A thread that tests
without pause steals the core it should hide on, so the engine's thread sleeps,
longer and longer while nothing moves, and steps aside when a caller waits: the
caller then tests itself, without pause.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol

from .collectives.agreement import Call
from .config import Config
from .errors import ClosedError, TransportError
from .transport.base import Schedule, T, Task

_FIRST_PAUSE_S = 20e-6
_PAUSE_GROWTH = 1.5
# How often an idle engine answers other ranks' questions, and a busy one looks for stalls.
_LOOK_S = 0.1
# A waiting caller first only yields its core: two ranks that share one must alternate.
_YIELDS = 2000
_WAITER_PAUSE_S = 50e-6
# How long a failure in the background waits for the main thread to notice it, so
# that the traceback shows the user's line; after that the thread ends the job.
_GRACE_S = 2.0

_give_way: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))


class Handle(Generic[T]):
    """An operation under way.

    Attributes:
        call: What the operation is.
        sequence: Its number among its communicator's operations.
        done: Whether it is complete, as far as anybody has looked.
    """

    def __init__(self, engine: "Engine", call: Call, sequence: int, schedule: Schedule[T]) -> None:
        self.call = call
        self.sequence = sequence
        self.done = False
        self._engine = engine
        self._task = Task(schedule)
        self._moved_s = time.monotonic()

    def __repr__(self) -> str:
        return f"#{self.sequence} {self.call}"

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
        self._engine.poke()
        if not self.done:
            self._engine.raise_failure()
        return self.done

    def wait(self) -> T:
        """Return the operation's result when it is complete on this rank.

        Raises:
            BufferMismatchError: The ranks called different things.
            StallError: Some ranks did not arrive in time.
            TransportError: MPI failed, or an earlier operation did.

        Collective: no. Blocking: yes.
        """
        if not self.done:
            self._engine.wait(self)
        return self._task.result  # type: ignore[return-value]

    @property
    def finished(self) -> bool:
        """Whether the schedule has returned; `done` follows when the engine has counted it."""
        return self._task.done

    def step(self) -> bool:
        """Advance as far as the network allows; for the engine."""
        moved = self._task.step()
        if moved:
            self._moved_s = time.monotonic()
        return moved

    def start(self) -> None:
        """Post the first requests; for the engine."""
        self._moved_s = time.monotonic()
        self._task.step()


class Watch(Protocol):
    """What the engine calls now and then, to see to one communicator."""

    def look(self) -> None:
        """Answer questions of other ranks; raise StallError if an operation is overdue."""


class Engine:
    """Advances the operations of a communicator and of all that were split from it.

    Args:
        config: Settings.
        threaded: Advance in the background; MPI must offer MPI_THREAD_MULTIPLE.
        end_job: Called with an error of the background thread that nobody fetched.

    Attributes:
        operations: How many were completed.
        communication_s: Seconds in which at least one operation was under way.
        exposed_s: Seconds that callers spent waiting.
    """

    def __init__(
        self, config: Config, *, threaded: bool, end_job: Callable[[BaseException], None],
    ) -> None:
        self.operations = 0
        self.communication_s = 0.0
        self.exposed_s = 0.0
        self.threaded = threaded
        self._config = config
        self._end_job = end_job
        self._watches: list[Watch] = []
        self._queue: deque[Handle[object]] = deque()
        self._background: list[Handle[object]] = []
        self._blocking: list[Handle[object]] = []
        self._lock = threading.Lock()          # held by who steps operations
        self._waiters = 0
        self._nobody_waits = threading.Event()
        self._nobody_waits.set()
        self._count_lock = threading.Lock()    # guards _waiters
        self._failure: BaseException | None = None
        self._failure_noticed = False
        self._busy_since: float | None = None
        self._next_look_s = 0.0
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._loop, name="mpiring", daemon=True)
            self._thread.start()

    def submit(self, handle: Handle[T]) -> Handle[T]:
        """Advance an operation from now on, behind those submitted before."""
        self.raise_failure()
        self._queue.append(handle)  # type: ignore[arg-type]
        # Post its first messages at once, unless the thread is at work anyway.
        if self._lock.acquire(blocking=False):
            try:
                self._admit()
            finally:
                self._lock.release()
        self._wake.set()
        return handle

    def run(self, handle: Handle[T]) -> T:
        """Advance an operation ahead of the queue, and return its result."""
        self.raise_failure()
        began = time.monotonic()
        with self._lock:
            self._start(handle, self._blocking)  # type: ignore[arg-type]
        self.exposed_s += time.monotonic() - began
        return handle.wait()

    def wait(self, handle: Handle[T]) -> None:
        """Return when `handle` is complete, testing in this thread."""
        began = time.monotonic()
        self._enter()
        try:
            fruitless = 0
            while not handle.done:
                self.raise_failure()
                fruitless = 0 if self._turn() else fruitless + 1
                if fruitless > _YIELDS:
                    time.sleep(_WAITER_PAUSE_S)
                elif fruitless:
                    _give_way()
        finally:
            self._leave()
            self.exposed_s += time.monotonic() - began

    def poke(self) -> None:
        """Make some progress where no thread makes it."""
        if not self.threaded:
            self._turn()

    def raise_failure(self) -> None:
        """Raise the error of an operation that failed; nothing can be trusted after it."""
        if self._failure is not None:
            first, self._failure_noticed = not self._failure_noticed, True
            if first:
                raise self._failure
            raise TransportError(
                f"an earlier operation failed: {self._failure!r}") from self._failure

    def watch(self, watch: Watch) -> None:
        """Begin to look after a communicator."""
        self._watches.append(watch)

    def unwatch(self, watch: Watch) -> None:
        """Cease to look after a communicator; when it was the last, stop the thread."""
        with self._lock:
            self._watches.remove(watch)
        if not self._watches:
            self.stop()

    def stop(self) -> None:
        """Stop the thread and all operations; no MPI call is made here afterwards."""
        if self._queue or self._blocking or self._background:
            self._failure = self._failure or ClosedError("MPI ended before all operations did")
        self._stopping = True
        self._wake.set()
        self._nobody_waits.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _enter(self) -> None:
        with self._count_lock:
            self._waiters += 1
            self._nobody_waits.clear()

    def _leave(self) -> None:
        with self._count_lock:
            self._waiters -= 1
            if not self._waiters:
                self._nobody_waits.set()

    def _turn(self) -> bool:
        """Progress once, unless another thread is at it for long; return whether any moved."""
        if not self._lock.acquire(timeout=_LOOK_S):
            return False
        try:
            return self._progress()
        finally:
            self._lock.release()

    def _progress(self) -> bool:
        """Step every operation once. The caller holds the lock."""
        if self._failure is not None:
            return False
        moved = self._admit()
        try:
            for active in (self._blocking, self._background):
                for handle in tuple(active):
                    moved |= handle.step()
                    if handle.finished:
                        active.remove(handle)
                        self._completed(handle)
            now = time.monotonic()
            if now >= self._next_look_s:
                self._next_look_s = now + _LOOK_S
                for watch in self._watches:
                    watch.look()
        except BaseException as error:
            self._failure = self._failure or error
            raise
        return moved

    def _admit(self) -> bool:
        """Start queued operations, in order, as long as few are under way."""
        admitted = False
        while self._queue and len(self._background) < self._config.operations_in_flight:
            self._start(self._queue.popleft(), self._background)
            admitted = True
        return admitted

    def _start(self, handle: Handle[object], active: list[Handle[object]]) -> None:
        """Post an operation's first requests. The caller holds the lock."""
        if self._busy_since is None:
            self._busy_since = time.monotonic()
        try:
            handle.start()
        except BaseException as error:
            self._failure = self._failure or error
            raise
        if handle.finished:
            self._completed(handle)
        else:
            active.append(handle)

    def _completed(self, handle: Handle[object]) -> None:
        """Note that an operation is complete, and how long any were under way."""
        self.operations += 1
        if self._busy_since is not None and not (self._blocking or self._background):
            self.communication_s += time.monotonic() - self._busy_since
            self._busy_since = None
        # Last: whoever sees it may read the statistics.
        handle.done = True

    def _loop(self) -> None:
        """Progress in the background until stopped or failed."""
        pause = _FIRST_PAUSE_S
        try:
            while not self._stopping and self._failure is None:
                self._nobody_waits.wait()
                if not (self._queue or self._blocking or self._background):
                    self._wake.wait(_LOOK_S)
                    self._wake.clear()
                if self._stopping:
                    return
                if self._turn():
                    pause = _FIRST_PAUSE_S
                else:
                    time.sleep(pause)
                    pause = min(pause * _PAUSE_GROWTH, self._config.max_pause_s)
        except BaseException as error:
            self._hand_over(error)

    def _hand_over(self, error: BaseException) -> None:
        """Leave an error to the main thread; end the job if it does not take it."""
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline:
            if self._failure_noticed or self._stopping:
                return
            time.sleep(0.01)
        self._end_job(error)
