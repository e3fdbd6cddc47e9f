"""The results of torch.distributed collectives: a Work, and its Future.

DistributedDataParallel waits for futures in C++, which makes no progress, so the engine's thread
completes them. Callbacks of futures may start collectives. Their order relative to other
collectives would differ between ranks, so they run in a separate group; see `in_callback`.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..engine.handle import Action, Handle, OperationQueue
from ..gpu.arrays import is_gpu_tensor
from .private import call_after_backward
from .profiling import waiting
from .tensors import on_idle_stream, tensors_in

_NO_TIMEOUT = timedelta(0)


class _Callback(threading.local):
    """Number of callbacks of futures that this thread is currently running."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


_callback = _Callback()


def in_callback() -> bool:
    """Return whether this thread is running a callback of a future."""
    return _callback.depth > 0


class _All:
    """The operations of several Works as one; without Works, a completed operation."""

    def __init__(self, works: Sequence["Work"] = ()) -> None:
        self._works = works

    @property
    def complete(self) -> bool:
        """Whether all are complete."""
        return all(work.handle.complete for work in self._works)

    def test(self) -> bool:
        """Return whether all are complete, after some progress."""
        return all([work.handle.test() for work in self._works])

    def wait(self, timeout_s: float | None = None) -> Any:
        """Wait until all are complete; `timeout_s` replaces the timeout of each Work."""
        for work in self._works:
            work.handle.wait(timeout_s or work.timeout_s)

    def when_done(self, action: Action) -> None:
        """Call `action`, with the first error, when all have ended."""
        errors: list[BaseException | None] = []
        counting = threading.Lock()

        def count(error: BaseException | None) -> None:
            with counting:
                errors.append(error)
                if len(errors) < len(self._works):
                    return
            action(next(filter(None, errors), None))

        for work in self._works:
            work.handle.when_done(count)
        if not self._works:
            action(None)


# A completed operation, for callers that have waited.
DONE = _All()


class Future(torch.futures.Future):
    """The future of an operation, or of the result of a callback.

    Callbacks run in the order of the operations. `value` is the result of the operation, or None if
    `then` sets the result; `gpus` hold its tensors.
    """

    def __init__(self, handle: Handle[Any] | _All, value: Sequence[Any] | None,
                 gpus: list[torch.device]) -> None:
        super().__init__(devices=gpus)
        self._handle, self._value, self._gpus = handle, value, gpus
        if value is not None:
            handle.when_done(self._complete)

    def _complete(self, error: BaseException | None) -> None:
        if error is not None:
            self.set_exception(error)
            return
        if self._handle is DONE:
            # The result is for this stream, on which its last copy may be queued.
            self.set_result(self._value)
            return
        # On the user's stream, the future would wait for later work. This stream waits only for the
        # operation, if its work is queued.
        with on_idle_stream(self._gpus):
            self._handle.wait()
            self.set_result(self._value)

    def then(self, callback: Callable[[Any], Any]) -> "Future":
        """Return a future of the result of `callback`, which is called with this future."""
        following = Future(self._handle, None, self._gpus)

        def call(future: Any) -> None:
            try:
                with _callback:
                    value = callback(future)
            except Exception as error:
                following.set_exception(error)
            else:
                following.set_result(value)

        super().then(call)
        return following

    def wait(self) -> Any:
        """Make progress until the result is available, and return it.

        The future of an operation can also be waited for inside a callback, even in the thread that
        would complete the future.
        """
        self._handle.wait()
        return super().wait() if self._value is None else self._value


class Work(dist.Work):
    """One operation; for a receive, the result of the handle is the rank that sent.

    `value` has the tensors with the result. Without `timeout_s`, `wait` uses the timeout of the
    group. If `threaded`, operations advance in the background. If `get_future` is called during a
    backward pass, which waits for the operation at its end, it pauses `queues`; see
    `OperationQueue.pause`.
    """

    def __init__(self, handle: Handle[Any] | _All, value: Sequence[Any],
                 timeout_s: float | None = None, *, threaded: bool,
                 queues: Iterable[OperationQueue] = ()) -> None:
        super().__init__()
        self.handle, self.value, self.timeout_s = handle, value, timeout_s
        self.threaded, self.queues = threaded, queues
        # Error of the last wait, and error of the operation that `is_completed` caught.
        self._error: BaseException | None = None
        self._failure: Exception | None = None
        self._future: Future | None = None

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait until the operation is complete, and return True.

        By default, the timeout is that of the operation. Raises StallError if the operation is not
        complete in time, and MpiringError if it has failed.
        """
        if self._failure is not None:
            raise self._failure
        try:
            self._complete(timeout.total_seconds() or self.timeout_s)
        except BaseException as error:
            self._error = error
            raise
        return True

    def _complete(self, timeout_s: float | None = None) -> None:
        """Wait; profilers see for how long."""
        with nullcontext() if self.handle.complete else waiting():
            self.handle.wait(timeout_s)

    def is_completed(self) -> bool:
        """Return whether the operation is complete, or has failed.

        It never raises an error. After a failure, `is_success` is False, `exception` returns the
        error, and `wait` raises it.
        """
        try:
            return self.handle.test()
        except Exception as error:
            if not self.handle.complete:
                self._failure = self._failure or error
            return True

    def is_success(self) -> bool:
        """Return whether the operation is complete."""
        return self.is_completed() and self.handle.complete

    def exception(self) -> BaseException | None:
        """Return the error that ended the operation or the last wait; None if there was none."""
        return None if self.handle.complete else self._failure or self._error

    def synchronize(self) -> None:
        """Wait for the operation."""
        self.wait()

    def source_rank(self) -> int:
        """Return the rank that sent the received message."""
        return int(self.handle.wait())

    _source_rank = source_rank

    def result(self) -> Sequence[Any]:
        """Wait for the operation, and return the tensors with the result."""
        self.wait()
        return self.value

    def get_future(self) -> Future:
        """Return a future of the tensors with the result."""
        if self._future is None:
            try:
                # At the end of the pass, DistributedDataParallel would wait in C++. The engine's
                # thread would not know that, and would sleep between tests. This callback runs
                # first.
                call_after_backward(self._complete)
            except RuntimeError:
                # No backward pass is running.
                if not self.threaded:
                    self.wait()
            else:
                for queue in self.queues:
                    queue.pause()
            self._future = Future(self.handle, self.value, list(
                {x.device for x in tensors_in(self.value) if is_gpu_tensor(x)}))
        return self._future


def coalesced(works: Sequence[Work]) -> Work:
    """Combine several Works into one; a timeout passed to its `wait` applies to each."""
    return Work(_All(works), [x for work in works for x in work.value],
                threaded=all(work.threaded for work in works),
                queues={queue for work in works for queue in work.queues})
