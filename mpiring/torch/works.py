"""The results of collectives of torch.distributed: a Work, and its Future.

DistributedDataParallel waits for futures in C++, which makes no progress: the engine's thread
completes them. Callbacks of futures may begin collectives, which would come between the others in
a different order on every rank; so they are recognised by `in_callback`, and run in a group of
their own.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..engine.handle import Action, Handle, Lane
from ..gpu.arrays import is_gpu_tensor
from .private import call_after_backward
from .tensors import on_idle_stream, tensors_in

_NO_TIMEOUT = timedelta(0)


class _Callback(threading.local):
    """How many callbacks of futures this thread is inside of."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


_callback = _Callback()


def in_callback() -> bool:
    """Return whether this thread is inside a callback of a future."""
    return _callback.depth > 0


class _All:
    """The operations of several Works as one; of none, an operation that is complete.

    Args:
        works: The Works.
    """

    def __init__(self, works: Sequence["Work"] = ()) -> None:
        self._works = works

    @property
    def done(self) -> bool:
        """Whether all are complete."""
        return all(work.handle.done for work in self._works)

    def test(self) -> bool:
        """Return whether all are complete, after some progress."""
        return all([work.handle.test() for work in self._works])

    def wait(self, timeout_s: float | None = None) -> Any:
        """Return when all are complete; the timeout is for each, by default its own."""
        for work in self._works:
            work.handle.wait(timeout_s or work.timeout_s)

    def when_done(self, action: Action) -> None:
        """Call `action` when all have ended, with the first error."""
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


# Of an operation that is complete, since the caller has waited.
DONE = _All()


class Future(torch.futures.Future):
    """The future of an operation, or of a callback's result.

    Callbacks run in the order of the operations.

    Args:
        handle: The operation.
        value: Its result; None if `then` sets the result.
        gpus: The GPUs that the tensors of the result lie on.
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
        # The tensors are complete: not on the user's stream, whose later work would delay it.
        with on_idle_stream(self._gpus):
            self.set_result(self._value)

    def then(self, callback: Callable[[Any], Any]) -> "Future":
        """Return a future of what `callback` returns, given this one when it is complete."""
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
        """Return the result, making progress meanwhile; an operation's also inside a callback.

        The thread of the callback may be the one that would complete that future.
        """
        self._handle.wait()
        return super().wait() if self._value is None else self._value


class Work(dist.Work):
    """One operation.

    Args:
        handle: The operation; for a receive, its result is the rank that sent.
        value: The tensors with the result.
        timeout_s: The longest that `wait` waits; None for the timeout of the group.
        threaded: Whether operations advance in the background.
        lanes: These do not if, during a backward pass, a future is asked for, which this pass will
            wait for at its end: see `Lane.rest`.

    Attributes: as the arguments.
    """

    def __init__(self, handle: Handle[Any] | _All, value: Sequence[Any],
                 timeout_s: float | None = None, *, threaded: bool,
                 lanes: Iterable[Lane] = ()) -> None:
        super().__init__()
        self.handle, self.value, self.timeout_s = handle, value, timeout_s
        self.threaded, self.lanes = threaded, lanes
        # Of the last wait; and of the operation, where `is_completed` found that it failed.
        self._error: BaseException | None = None
        self._failure: Exception | None = None
        self._future: Future | None = None

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Return True when the operation is complete.

        Raises:
            StallError: It is not, in time.
            MpiringError: As the handle's `wait`, or as found by `is_completed`.
        """
        if self._failure is not None:
            raise self._failure
        try:
            self.handle.wait(timeout.total_seconds() or self.timeout_s)
        except BaseException as error:
            self._error = error
            raise
        return True

    def is_completed(self) -> bool:
        """Return whether the operation is complete, or has failed.

        Raises nothing: after a failure `is_success` is False, `exception` returns the error, and
        `wait` raises it.
        """
        try:
            return self.handle.test()
        except Exception as error:
            if not self.handle.done:
                self._failure = self._failure or error
            return True

    def is_success(self) -> bool:
        """Return whether the operation is complete."""
        return self.handle.done

    def exception(self) -> BaseException | None:
        """Return the error that ended the operation or the last wait for it; None if none did."""
        return None if self.handle.done else self._failure or self._error

    def synchronize(self) -> None:
        """Wait."""
        self.wait()

    def source_rank(self) -> int:
        """Return the rank that sent what was received."""
        return int(self.handle.wait())

    _source_rank = source_rank

    def result(self) -> Sequence[Any]:
        """Return the tensors with the result, when the operation is complete."""
        self.wait()
        return self.value

    def get_future(self) -> Future:
        """Return a future of the tensors with the result."""
        if self._future is None:
            try:
                # At its end, DistributedDataParallel would wait in C++, unknown to the engine's
                # thread, which would sleep between its tests. These calls come before its own.
                call_after_backward(self.handle.wait)
            except RuntimeError:
                # No backward pass runs.
                if not self.threaded:
                    self.wait()
            else:
                for lane in self.lanes:
                    lane.rest()
            self._future = Future(self.handle, self.value, list(
                {x.device for x in tensors_in(self.value) if is_gpu_tensor(x)}))
        return self._future


def coalesced(works: Sequence[Work]) -> Work:
    """Return several operations as one; a timeout of its `wait` is for each."""
    return Work(_All(works), [x for work in works for x in work.value],
                threaded=all(work.threaded for work in works),
                lanes={lane for work in works for lane in work.lanes})
