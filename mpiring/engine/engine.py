"""Advances operations: in the caller's thread during a wait, otherwise in a background thread.

MPI makes no progress by itself, so a thread must test requests. A thread that tests continuously
takes a core from the computation. The engine's thread therefore sleeps between tests, longer if
operations rarely move. While a caller waits, the caller tests instead, continuously.
"""

import contextlib
import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from ..arguments import path, whole_number
from ..config import Config
from ..errors import (
    ClosedError, MpiringError, ProcessFailedError, StallError, TransportError)
from ..launch import forks
from ..launch.ending import JobEnder
from ..operations.on_device import GpuOperations
from ..record.counter import OperationCounter
from ..record.recorder import Recorder
from ..transport import waiting
from ..transport.base import T, Task
from ..transport.layout import GATE_FAILED
from .background import BackgroundCompiler
from .handle import Action, Handle, OperationQueue
from .questions import Watch, report_peers

# The engines of this process by number, the oldest first.
_engines: "weakref.WeakValueDictionary[int, Engine]" = weakref.WeakValueDictionary()
_numbers = itertools.count()


class Pause:
    """Pauses of the thread, which adapt to a fraction of the time between two movements.

    A movement shortens the next pause but does not reset it. Otherwise the thread would interrupt
    the computation ten times for each piece of a long message.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._next_s = waiting.FIRST_PAUSE_S

    def after(self, moved: bool) -> float:
        """Return the seconds to sleep after tests; `moved` is true if an operation has moved."""
        if moved:
            self._next_s = max(self._next_s / waiting.PAUSE_SHRINKAGE, waiting.FIRST_PAUSE_S)
        pause = min(self._next_s, self._longest_s)
        if not moved:
            self._next_s = min(self._next_s * waiting.PAUSE_GROWTH, self._longest_s)
        return pause


class Engine(forks.OfRank):
    """Advances the operations of a communicator and of all communicators split from it.

    Args:
        threaded: If true, advance in the background; needs MPI_THREAD_MULTIPLE.
        end_job: Function to call with an error of the background thread that no caller has raised,
            and with an uncaught exception; None to leave both to the program.
        patience: Policy by which a caller waits for the other ranks of its node.

    Attributes:
        compiler: Compiler of sums that were not prepared.
        given_up: True after `give_up`; operations no longer advance.
        failure: First error of any operation; later results cannot be trusted.
        failed_s: Time of the last failure, in `time.monotonic`; 0 for none.
        lock: Lock for stepping operations. It is reentrant, because a signal handler may raise
            between `acquire` and the following `try`. The main thread then still holds the lock.
    """

    def __init__(
        self, config: Config, *, threaded: bool, end_job: JobEnder | None,
        recorder: Recorder | None = None, patience: waiting.Patience = waiting.Patience(),
    ) -> None:
        self.recorder = recorder or Recorder()
        self.patience = patience
        self.threaded = threaded
        self.compiler = BackgroundCompiler()
        self.given_up = False
        self.failure: BaseException | None = None
        self.failed_s = 0.0
        self.lock = threading.RLock()
        self.end_job = end_job
        self._config = config
        self._queues: list[OperationQueue] = []
        self._gates: weakref.WeakSet[OperationCounter] = weakref.WeakSet()
        self._gpus: weakref.WeakSet[GpuOperations] = weakref.WeakSet()
        self._blocking: list[Handle[Any]] = []
        self._waiting: set[int] = set()
        self._waiting_lock = threading.Lock()
        self._no_waiters = threading.Event()
        self._no_waiters.set()
        self._failure_noticed = False
        self._failed: Task[Any] | None = None
        self._is_stepping = False
        self._next_check_s = 0.0
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        _engines[next(_numbers)] = self

    @property
    def is_live(self) -> bool:
        """Whether a communicator is in use."""
        return bool(self._queues) and not self.given_up

    def join(self, watch: Watch, max_in_flight: float | None = None) -> OperationQueue:
        """Return a queue for the operations of a communicator.

        By default, `max_in_flight` is as in the settings.
        """
        queue = OperationQueue(self, watch, max_in_flight or self._config.operations_in_flight)
        self._queues.append(queue)
        if self.threaded and self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="mpiring", daemon=True)
            self._thread.start()
        return queue

    def guard(self, counter: OperationCounter, gpus: GpuOperations) -> None:
        """Prevent fast calls of a communicator, and free its GPUs, once any operation has failed.

        The GPUs are freed when a caller gets the error. Until then, the program must wait for
        results that are undefined.
        """
        self._gates.add(counter)
        self._gpus.add(gpus)
        if self.failure is not None:
            counter.close(GATE_FAILED)

    def take_back(self, *queues: OperationQueue) -> None:
        """Advance the operations of a dropped communicator again, so that it can be closed."""
        with self.lock:
            for queue in queues:
                queue.dropped = False
                if queue not in self._queues:
                    self._queues.append(queue)

    def leave(self, queue: OperationQueue, *, quietly: bool = False) -> list[Handle[Any]]:
        """Remove a communicator; return its incomplete operations, a failure unless `quietly`.

        This stops the thread if it was the last communicator.
        """
        with self.lock:
            left = [*queue.active, *queue.queued]
            if left and not quietly:
                self._fail_with(self.failure or ClosedError("MPI ended before all operations did"))
            if queue in self._queues:
                self._queues.remove(queue)
        if not self._queues:
            self.stop()
        return left

    def give_up(self, error: BaseException) -> list[Task[Any]]:
        """Stop permanently, because a rank has died; return the schedules in flight.

        Every later call raises `error`.
        """
        self.stop()
        self.given_up = True
        with self.lock:
            handles = [
                *self._blocking, *(handle for queue in self._queues for handle in queue.active)]
            left = [handle.task for handle in handles]
            if self._failed is not None:
                left.append(self._failed)
            self._blocking.clear()
            for queue in self._queues:
                queue.active.clear()
                queue.queued.clear()
            # Drop the first failure's schedule: its traceback keeps the user's arrays alive.
            self._failed = None
            self._fail_with(error)
        return left

    def stop(self) -> None:
        """Stop the thread; it makes no MPI call afterwards."""
        self._stopping = True
        self._wake.set()
        self._no_waiters.set()
        self.compiler.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def submit(self, handle: Handle[T]) -> Handle[T]:
        """Queue an operation behind those submitted before, and advance it."""
        self.raise_failure()
        handle.queue.queued.append(handle)
        # Post its first messages at once, unless another thread is stepping operations.
        self._try_locked(lambda: self._admit(handle.queue))
        if not handle.queue.is_paused:
            self._wake.set()
        return handle

    def run(self, handle: Handle[T]) -> None:
        """Advance an operation ahead of the queue, and wait for it."""
        with self.lock:
            handle.queue.record_start(handle.flight.started_s or time.monotonic())
            self._blocking.append(handle)
        self.wait(handle)

    def adopt(self, handle: Handle[T]) -> None:
        """Advance an operation that was begun without the engine."""
        with self.lock:
            handle.queue.record_start(handle.flight.started_s)
            handle.queue.at_once_s += handle.flight.exposed_s
            # It does not count as a background operation, because their limit must have the same
            # effect on all ranks.
            self._blocking.append(handle)
        self._wake.set()

    def wait(self, handle: Handle[T], timeout_s: float | None = None) -> None:
        """Return when `handle` is complete, testing in this thread.

        Raises:
            StallError: It is not complete after `timeout_s`. The error is at most 10 ms late, plus
                the duration of one step of an operation or of an action.
            ClosedError: This process is a fork.
        """
        forks.refuse_calls(self.recorder.rank)
        began = moved_s = time.monotonic()
        handle.queue.paused_until_s = 0.0
        try:
            with self._waiting_lock:
                self._waiting.add(threading.get_ident())
                self._no_waiters.clear()
            while not handle.complete:
                self.raise_failure()
                moved = False
                # Locks are not fair: while operations move, another thread may acquire this lock
                # repeatedly.
                if self.lock.acquire(timeout=-1 if timeout_s is None else waiting.LATE_S):
                    try:
                        moved = self._progress()
                    finally:
                        self.lock.release()
                self._call_actions()
                moved |= advance_inline(self)
                now = time.monotonic()
                if timeout_s is not None and now - began > timeout_s and not handle.complete:
                    raise StallError(
                        f"wait for {handle}: Timed out after {timeout_s:g} s; the operation stays "
                        f"in flight, and wait may be called again with a longer timeout")
                if moved:
                    moved_s = now
                elif now - moved_s > self.patience.yield_s:
                    pause_s = self.patience.pause_after(now - began)
                    time.sleep(pause_s if timeout_s is None else min(pause_s, waiting.LATE_S))
                else:
                    waiting.give_way()
        finally:
            with self._waiting_lock:
                now = time.monotonic()
                handle.queue.waited_s += now - began
                self.recorder.waited(handle.flight, began, now)
                self._waiting.discard(threading.get_ident())
                if not self._waiting:
                    self._no_waiters.set()

    def advance(self) -> None:
        """Make progress once, without waiting, unless another thread is making progress."""
        forks.refuse_calls(self.recorder.rank)
        if not self._step():
            waiting.give_way()
        advance_inline(self)

    def _step(self) -> bool:
        """Step every operation once, and call actions; return whether any operation moved."""
        # A signal handler may call this during a step.
        moved = not self._is_stepping and self._try_locked(self._progress)
        self._call_actions()
        return moved

    def call(self, handle: Handle[Any], action: Action) -> None:
        """Call an action when `handle` is complete; see Handle.when_done."""
        forks.refuse_calls(self.recorder.rank)
        handle.queue.actions.append((handle, action))
        self._call_actions(handle.queue)
        # The thread may have checked for actions just before this one was added.
        self._wake.set()

    def _call_actions(self, *queues: OperationQueue) -> None:
        """Call the actions of complete operations, of all queues by default, without the lock."""
        for queue in queues or tuple(self._queues):
            if queue.actions and queue.calling.acquire(blocking=False):
                try:
                    while queue.actions and (queue.actions[0][0].complete or self.failure):
                        handle, action = queue.actions.popleft()
                        action(None if handle.complete else self.failure)
                finally:
                    queue.calling.release()

    def fail(self, error: BaseException, task: Task[Any] | None = None) -> None:
        """Record an error that is about to be raised.

        The task is the schedule that raised it, if this schedule was not passed to the engine.
        """
        if self.failure is None:
            self._failed = task
            self._fail_with(error)
            if threading.current_thread() is not self._thread:
                self._notice_failure()

    def _fail_with(self, error: BaseException) -> None:
        self.failure, self.failed_s = error, time.monotonic()
        for counter in tuple(self._gates):
            counter.close(GATE_FAILED)

    def _notice_failure(self) -> None:
        """Prepare to raise the failure in a thread of the program."""
        self._failure_noticed = True
        for gpus in tuple(self._gpus):
            gpus.end_calls()

    def raise_failure(self) -> None:
        """Raise the first error of any operation, if there is one."""
        if self.failure is not None:
            if not self._failure_noticed:
                self._notice_failure()
                raise self.failure
            raise TransportError(
                f"an earlier operation failed: {self.failure!r}") from self.failure

    def _try_locked(self, action: Callable[[], bool]) -> bool:
        """Return `action()`, called under the lock; return False if another thread holds it."""
        if not self.lock.acquire(blocking=False):
            return False
        try:
            return action()
        finally:
            self.lock.release()

    def _progress(self, queues: Sequence[OperationQueue] | None = None) -> bool:
        """Step every operation once; return whether any moved. The caller holds the lock.

        If `queues` are given, background operations of other queues are skipped.
        """
        if self.failure is not None:
            return False
        moved, queues = False, self._queues if queues is None else queues
        self._is_stepping = True
        try:
            for queue in queues:
                moved |= self._admit(queue)
            for active in (self._blocking, *(queue.active for queue in queues)):
                for handle in tuple(active):
                    moved |= handle.step()
                    if handle.task.done:
                        active.remove(handle)
                        self._complete(handle)
            now = time.monotonic()
            if now >= self._next_check_s:
                self._next_check_s = now + waiting.BUSY_CHECK_S
                for queue in self._queues:
                    queue.watch.check()
                self._forget_dropped()
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self._is_stepping = False
        return moved

    def _forget_dropped(self) -> None:
        """Remove dropped communicators with nothing in flight. The caller holds the lock."""
        waited_for = [handle.queue for handle in self._blocking]
        for queue in tuple(self._queues):
            if not queue.in_use and queue not in waited_for:
                self._queues.remove(queue)

    def _progress_unpaused(self) -> bool:
        """Make progress like `_progress`, but skip paused queues."""
        return self._progress([queue for queue in self._queues if not queue.is_paused])

    def _admit(self, queue: OperationQueue) -> bool:
        """Start queued operations, in order, up to the limit; return True if any was started."""
        admitted = False
        while queue.queued and len(queue.active) < queue.max_in_flight:
            self._start(queue.queued.popleft(), queue.active)
            admitted = True
        return admitted

    def _start(self, handle: Handle[T], active: list[Handle[Any]]) -> None:
        """Post an operation's first requests. The caller holds the lock."""
        handle.queue.record_start(time.monotonic())
        try:
            handle.start()
        except BaseException as error:
            self.fail(error)
            raise
        if handle.task.done:
            self._complete(handle)
        else:
            active.append(handle)

    def _complete(self, handle: Handle[T]) -> None:
        """Record that an operation is complete."""
        now = time.monotonic()
        self.recorder.ended(handle.flight, now)
        handle.queue.record_end(now)
        # Set this last, because a caller that sees it may read the statistics.
        handle.complete = True

    def _loop(self) -> None:
        """Make progress until stopped or failed, or until all communicators are dropped."""
        pause = Pause(self._config.max_pause_s)
        try:
            while self._queues and not self._stopping and self.failure is None:
                self._no_waiters.wait(waiting.IDLE_CHECK_S)
                if not (self._blocking or any(
                        queue.busy and not queue.is_paused for queue in tuple(self._queues))):
                    pause = Pause(self._config.max_pause_s)
                    self._wake.wait(waiting.IDLE_CHECK_S)
                    self._wake.clear()
                if self._stopping:
                    return
                moved = [self._try_locked(self._progress_unpaused) for _ in range(waiting.TESTS)]
                self._call_actions()
                time.sleep(pause.after(any(moved)))
            # A waiting caller may have raised a failure, but other callers' actions are still due.
            self._call_actions()
        except BaseException as error:
            self._hand_over(error)
        self._answer_until_stopped()

    def _answer_until_stopped(self) -> None:
        """After a failure, answer ranks that end the job: this rank may still run other code."""
        while not self._stopping and any(not queue.dropped for queue in tuple(self._queues)):
            if isinstance(self.failure, ProcessFailedError):
                # The main thread may recover, which MPI calls on these communicators can disturb.
                return
            self._try_locked(self._answer)
            self._wake.wait(waiting.IDLE_CHECK_S)
            self._wake.clear()

    def _answer(self) -> bool:
        """Answer ranks that end the job. The caller holds the lock."""
        # If MPI has failed, there is nobody to tell.
        with contextlib.suppress(MpiringError):
            for queue in self._queues:
                queue.watch.answer(failed=True)
        return False

    def _hand_over(self, error: BaseException) -> None:
        """Leave an error to the main thread; end the job if that thread does not raise it."""
        self._call_actions()
        if isinstance(error, ProcessFailedError):
            # The main thread may recover from this error, no matter when it raises the error.
            return
        deadline = time.monotonic() + waiting.GRACE_S
        while time.monotonic() < deadline:
            if self._failure_noticed or self._stopping:
                return
            self._try_locked(self._answer)
            time.sleep(0.01)
        if self.end_job is not None:
            self.end_job(error)

    def report(self, last: int, folder: str | None = None) -> str:
        """Return lines about the last operations of this engine, then of all others of the process.

        Each engine reports its `last` operations. If `folder` is given, save those of this engine
        there; see Recorder.save.
        """
        return "\n".join(filter(None, [
            self.recorder.report(last, folder),
            *(engine.recorder.report(last, where=" in other communicators")
              for engine in _live() if engine is not self)]))

    def dump(self, last: int, file: TextIO | None, folder: str | os.PathLike[str] | None) -> None:
        """Print the result of `report` in one write; see Communicator.dump_flight."""
        text = self.report(whole_number("last", last, 0),
                           None if folder is None else path("folder", folder))
        file = file or sys.stderr
        try:
            file.write(f"mpiring: {text or 'there were no operations yet'}\n")
            file.flush()
        except OSError:
            # A full disk must not end the training, unless the user has chosen the file.
            if file is not sys.stderr:
                raise


def _live() -> list[Engine]:
    """Return the engines with communicators in use: the last failed one first, then the oldest.

    If there is none, return the newest engine.
    """
    engines = [*_existing()]
    live = [engine for engine in engines if engine.is_live] or engines[-1:]
    return sorted(live, key=lambda engine: -engine.failed_s)


def _existing() -> Iterator[Engine]:
    for ref in _engines.valuerefs():
        if (engine := ref()) is not None:
            yield engine


def advance_inline(but: Engine | None = None) -> bool:
    """Make progress in all engines that have no thread; return whether any operation moved.

    A rank that waits for one operation must also advance the others. Otherwise two ranks that wait
    for different operations would wait for each other. The caller itself advances the engine `but`.
    """
    moved = False
    for engine in _existing():
        if not engine.threaded and engine.is_live:
            moved |= engine is not but and engine._step()
            for queue in tuple(engine._queues):
                queue.work()
    return moved


def report_all(last: int) -> str:
    """Return lines about the last operations of all engines of this process."""
    return next((engine.report(last) for engine in _live()), "")


def has_communicated() -> bool:
    """Return whether this process has sent data of the program in a communicator in use."""
    return any(engine.recorder.has_data for engine in _live())


def report_all_peers() -> str:
    """Let the other ranks save their last operations; return lines about these operations."""
    return report_peers([(engine.lock, [queue.watch for queue in engine._queues])
                         for engine in _live() if engine.is_live])


def ender() -> JobEnder | None:
    """Return the function that ends the job of the engine that failed, or of the oldest engine."""
    return next((engine.end_job for engine in _live() if engine.end_job is not None), None)
