"""Advances operations: now for who waits, in the background for who computes.

MPI makes no progress by itself: somebody has to test. A thread that tests
without pause steals the core it should hide on, so the engine's thread sleeps,
the longer the more rarely something moves, and steps aside when a caller waits: the
caller then tests itself, without pause.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from ..config import Config
from ..errors import ClosedError, ProcessFailedError, StallError, TransportError
from ..launch import forks
from ..record.recorder import Flight, Recorder
from ..transport.base import T, Task
from .handle import Action, Handle, Lane, Watch
from .pause import Pause

# The thread looks several times before it sleeps: between hosts, one look moved at
# most some 100 KiB (MPICH over TCP), the wire 250 KB in a pause of 2 ms. With one
# look, an allreduce behind a computation took twice its time.
_LOOKS = 4
# How often an idle engine answers other ranks' questions.
_LOOK_S = 0.1
# How often a busy one does, and looks for stalls and dead ranks. (Open MPI was seen to tell of
# a death at the third look or so: with 0.1 s, after 0.25 to 0.45 s.)
_BUSY_LOOK_S = 0.02
# A waiting caller first only yields its core: two ranks that share one must alternate.
_YIELDS = 2000
_WAITER_PAUSE_S = 50e-6
# By how much a wait with a timeout may be late because another thread steps operations.
_LATE_S = 0.01
# How often a blocking call looks by itself before it bothers the engine: on a node, most
# operations are over by then. The first looks keep the core.
_TRIES = 300
_TRIES_ALONE = 20
# How long a failure in the background waits for the main thread to notice it, so
# that the traceback shows the user's line; after that the thread ends the job.
_GRACE_S = 2.0

_give_way: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))


class Engine:
    """Advances the operations of a communicator and of all that were split from it.

    Args:
        config: Settings.
        threaded: Advance in the background; MPI must offer MPI_THREAD_MULTIPLE.
        end_job: Called with an error of the background thread that nobody fetched.
        recorder: Is told what becomes of operations; one of its own by default.

    Attributes:
        recorder: As above.
        given_up: Nothing is advanced any more, see `give_up`.
    """

    def __init__(
        self, config: Config, *, threaded: bool, end_job: Callable[[BaseException], None],
        recorder: Recorder | None = None,
    ) -> None:
        self.recorder = recorder or Recorder()
        self.threaded = threaded
        self.given_up = False
        self._config = config
        self._end_job = end_job
        self._lanes: list[Lane] = []
        self._blocking: list[Handle[Any]] = []
        # Held by who steps operations. Reentrant, because a signal handler may raise
        # between taking it and the `try` behind: that must not block the main thread.
        self._lock = threading.RLock()
        self._waiting: set[int] = set()
        self._waiting_lock = threading.Lock()
        self._nobody_waits = threading.Event()
        self._nobody_waits.set()
        self._failure: BaseException | None = None
        self._failure_noticed = False
        self._failed: Task[Any] | None = None
        self._next_look_s = 0.0
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def join(self, watch: Watch, in_flight: float | None = None) -> Lane:
        """Begin to look after a communicator.

        Args:
            watch: Is called now and then.
            in_flight: How many operations may be under way; by default, as in the settings.
        """
        lane = Lane(self, watch, in_flight or self._config.operations_in_flight)
        self._lanes.append(lane)
        if self.threaded and self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="mpiring", daemon=True)
            self._thread.start()
        return lane

    def take_back(self, lane: Lane) -> None:
        """Look after a communicator that was dropped, because it is to be closed after all."""
        with self._lock:
            lane.dropped = False
            if lane not in self._lanes:
                self._lanes.append(lane)

    def abandon(self, lane: Lane) -> list[Handle[Any]]:
        """Advance a lane's operations no more, and return those that are not complete."""
        with self._lock:
            left = [*lane.active, *lane.queue]
            lane.active.clear()
            lane.queue.clear()
        return left

    def leave(self, lane: Lane) -> None:
        """Cease to look after a communicator; when it was the last, stop the thread."""
        with self._lock:
            if lane.queue or lane.active:
                self._failure = self._failure or ClosedError("MPI ended before all operations did")
            if lane in self._lanes:
                self._lanes.remove(lane)
        if not self._lanes:
            self.stop()

    def give_up(self, error: BaseException) -> list[Task[Any]]:
        """Stop for good, because a rank has died, and return the schedules under way.

        Args:
            error: What every later call raises.
        """
        self.stop()
        self.given_up = True
        with self._lock:
            handles = [*self._blocking, *(one for lane in self._lanes for one in lane.active)]
            left = [handle.task for handle in handles]
            if self._failed is not None:
                left.append(self._failed)
            self._blocking.clear()
            for lane in self._lanes:
                lane.active.clear()
                lane.queue.clear()
            # Not the first one, whose traceback holds on to the user's arrays.
            self._failure, self._failed = error, None
        return left

    def stop(self) -> None:
        """Stop the thread; it makes no MPI call afterwards."""
        self._stopping = True
        self._wake.set()
        self._nobody_waits.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def submit(self, handle: Handle[T]) -> Handle[T]:
        """Advance an operation from now on, behind those submitted before."""
        self.raise_failure()
        handle.lane.queue.append(handle)
        # Post its first messages at once, unless the thread is at work anyway.
        self._unless_busy(lambda: self._admit(handle.lane))
        self._wake.set()
        return handle

    def run_at_once(self, task: Task[Any], flight: Flight, lane: Lane) -> bool:
        """Start an operation, and return whether it is complete after a moment.

        Within a node most are: it is not worth while to let anybody else know of them. So it
        is for the caller to `keep` what this raises.
        """
        if self._failure is not None:
            self.raise_failure()
        flight.started_s = began = time.monotonic()
        with self._lock:
            for attempt in range(_TRIES):
                if not task.step() and attempt > _TRIES_ALONE:
                    _give_way()
                if task.done:
                    break
            now = time.monotonic()
            lane.at_once_s += now - began
            if task.done:
                lane.ended_at_once(now - began)
                self.recorder.at_once(flight, began, now)
            else:
                self.recorder.waited(flight, began, now)
        return task.done

    def run(self, handle: Handle[T]) -> None:
        """Advance an operation that was started, ahead of the queue, and wait for it."""
        with self._lock:
            handle.lane.begun(handle.flight.started_s or time.monotonic())
            self._blocking.append(handle)
        self.wait(handle)

    def wait(self, handle: Handle[T], timeout_s: float | None = None) -> None:
        """Return when `handle` is complete, testing in this thread.

        Raises:
            StallError: It is not, after `timeout_s`; some 10 ms late at most, whatever else moves,
                and by as long as a step of an operation, or an action, takes.
            ClosedError: This process is a fork.
        """
        forks.refuse_calls(self.recorder.rank)
        began = time.monotonic()
        try:
            self._enter()
            fruitless = 0
            while not handle.done:
                self.raise_failure()
                moved = False
                # Locks are not fair: a thread whose operations move may have it again and again.
                if self._lock.acquire(timeout=-1 if timeout_s is None else _LATE_S):
                    try:
                        moved = self._progress()
                    finally:
                        self._lock.release()
                self._call_actions()
                if timeout_s is not None and not handle.done:
                    _give_up_after(timeout_s, began, handle)
                fruitless = 0 if moved else fruitless + 1
                if fruitless > _YIELDS:
                    time.sleep(_WAITER_PAUSE_S)
                elif fruitless:
                    _give_way()
        finally:
            self._leave(handle, began)

    def advance(self) -> None:
        """Progress once, if nobody else is at it, without waiting for anything."""
        forks.refuse_calls(self.recorder.rank)
        if not self._unless_busy(self._progress):
            _give_way()

    def call(self, handle: Handle[Any], action: Action) -> None:
        """Call an action when `handle` is complete; see Handle.when_done."""
        forks.refuse_calls(self.recorder.rank)
        handle.lane.actions.append((handle, action))
        self._call_actions(handle.lane)
        # Another thread may just have found nothing to call.
        self._wake.set()

    def _call_actions(self, *lanes: Lane) -> None:
        """Call what was to be called when operations are complete. Nobody holds the lock.

        Args:
            lanes: Of whose operations; all by default.
        """
        for lane in lanes or tuple(self._lanes):
            if lane.actions and lane.calling.acquire(blocking=False):
                try:
                    while lane.actions and (lane.actions[0][0].done or self._failure):
                        handle, action = lane.actions.popleft()
                        action(None if handle.done else self._failure)
                finally:
                    lane.calling.release()

    def poke(self) -> None:
        """Progress once where no thread does it."""
        forks.refuse_calls(self.recorder.rank)
        if not self.threaded:
            self.advance()

    def keep(self, error: BaseException, task: Task[Any] | None = None) -> None:
        """Remember an error that is about to be raised: no operation can be trusted after it.

        Args:
            task: Whose error it is, if the engine does not know of it.
        """
        if self._failure is None:
            self._failure, self._failed = error, task
            self._failure_noticed = threading.current_thread() is not self._thread

    def raise_failure(self) -> None:
        """Raise the error of an operation that failed; nothing can be trusted after it."""
        if self._failure is not None:
            first, self._failure_noticed = not self._failure_noticed, True
            if first:
                raise self._failure
            raise TransportError(
                f"an earlier operation failed: {self._failure!r}") from self._failure

    def _enter(self) -> None:
        with self._waiting_lock:
            self._waiting.add(threading.get_ident())
            self._nobody_waits.clear()

    def _leave(self, handle: Handle[Any], began: float) -> None:
        with self._waiting_lock:
            now = time.monotonic()
            handle.lane.waited_s += now - began
            self.recorder.waited(handle.flight, began, now)
            self._waiting.discard(threading.get_ident())
            if not self._waiting:
                self._nobody_waits.set()

    def _unless_busy(self, action: Callable[[], bool]) -> bool:
        """Do something under the lock, or nothing where another thread has it."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return action()
        finally:
            self._lock.release()

    def _progress(self) -> bool:
        """Step every operation once; return whether any moved. The caller holds the lock."""
        if self._failure is not None:
            return False
        moved = False
        try:
            for lane in self._lanes:
                moved |= self._admit(lane)
            for active in (self._blocking, *(lane.active for lane in self._lanes)):
                for handle in tuple(active):
                    moved |= handle.step()
                    if handle.finished:
                        active.remove(handle)
                        self._completed(handle)
            now = time.monotonic()
            if now >= self._next_look_s:
                self._next_look_s = now + _BUSY_LOOK_S
                for lane in self._lanes:
                    lane.watch.look()
                self._let_go()
        except BaseException as error:
            self.keep(error)
            raise
        return moved

    def _let_go(self) -> None:
        """Cease to look after communicators that were dropped. The caller holds the lock."""
        waited_for = [handle.lane for handle in self._blocking]
        for lane in tuple(self._lanes):
            if not lane.in_use and lane not in waited_for:
                self._lanes.remove(lane)

    def _admit(self, lane: Lane) -> bool:
        """Start queued operations, in order, as long as few are under way."""
        admitted = False
        while lane.queue and len(lane.active) < lane.in_flight:
            self._start(lane.queue.popleft(), lane.active)
            admitted = True
        return admitted

    def _start(self, handle: Handle[T], active: list[Handle[Any]]) -> None:
        """Post an operation's first requests. The caller holds the lock."""
        handle.lane.begun(time.monotonic())
        try:
            handle.start()
        except BaseException as error:
            self.keep(error)
            raise
        if handle.finished:
            self._completed(handle)
        else:
            active.append(handle)

    def _completed(self, handle: Handle[T]) -> None:
        """Note that an operation is complete."""
        now = time.monotonic()
        self.recorder.ended(handle.flight, now)
        handle.lane.ended(now)
        # Last: whoever sees it may read the statistics.
        handle.done = True

    def _is_busy(self) -> bool:
        return bool(self._blocking) or any(lane.active for lane in self._lanes)

    def _loop(self) -> None:
        """Progress in the background until stopped or failed, or all communicators are dropped."""
        pause = Pause(self._config.max_pause_s)
        try:
            while self._lanes and not self._stopping and self._failure is None:
                self._nobody_waits.wait(_LOOK_S)
                if not self._is_busy() and not any(lane.queue for lane in self._lanes):
                    pause = Pause(self._config.max_pause_s)
                    self._wake.wait(_LOOK_S)
                    self._wake.clear()
                if self._stopping:
                    return
                moved = [self._unless_busy(self._progress) for _ in range(_LOOKS)]
                self._call_actions()
                time.sleep(pause.after(any(moved)))
            # Where a waiting caller has met a failure, others may wait for their actions.
            self._call_actions()
        except BaseException as error:
            self._hand_over(error)

    def _hand_over(self, error: BaseException) -> None:
        """Leave an error to the main thread; end the job if it does not take it."""
        self._call_actions()
        if isinstance(error, ProcessFailedError):
            # It can be survived, whenever the main thread comes to hear of it.
            return
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline:
            if self._failure_noticed or self._stopping:
                return
            time.sleep(0.01)
        self._end_job(error)


def _give_up_after(timeout_s: float, began: float, handle: Handle[Any]) -> None:
    if time.monotonic() - began > timeout_s:
        raise StallError(f"wait for {handle}: Timed out after {timeout_s:g} s; the operation stays "
                         f"under way, and wait may be called again with a longer timeout")
