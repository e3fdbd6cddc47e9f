"""The results of collectives of torch.distributed: a Work, and its Future.

DistributedDataParallel waits for futures in C++, which makes no progress: the engine's thread
completes them. Callbacks of futures may begin collectives, which would come between the others in
a different order on every rank; so they are recognised by `in_callback`, and run in a group of
their own.
"""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from ..engine.handle import Action, Handle
from ..gpu.arrays import is_gpu_tensor
from .devices import on_idle_stream
from .private import call_after_backward
from .tensors import tensors_in

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


class _Done:
    """Handle of an operation that is complete, since the caller has waited."""

    done = True

    def test(self) -> bool:
        """Return True."""
        return True

    def wait(self, timeout_s: float | None = None) -> Any:
        """Return."""

    def when_done(self, action: Action) -> None:
        """Call `action`, now."""
        action(None)


class _All:
    """Several handles as one.

    Args:
        handles: Of operations.
    """

    def __init__(self, handles: Sequence["OneHandle"]) -> None:
        self._handles = handles

    @property
    def done(self) -> bool:
        """Whether all are complete."""
        return all(handle.done for handle in self._handles)

    def test(self) -> bool:
        """Return whether all are complete, after some progress."""
        return all([handle.test() for handle in self._handles])

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when all are complete; the timeout is for each."""
        for handle in self._handles:
            handle.wait(timeout_s)

    def when_done(self, action: Action) -> None:
        """Call `action` when all have ended, with the first error."""
        left, errors, counting = len(self._handles), [], threading.Lock()

        def count(error: BaseException | None) -> None:
            nonlocal left
            with counting:
                left -= 1
                if error is not None:
                    errors.append(error)
                if left > 0:
                    return
            action(errors[0] if errors else None)

        for handle in self._handles or [DONE]:
            handle.when_done(count)


OneHandle: TypeAlias = Handle[Any] | _Done
DONE: OneHandle = _Done()


class _Chained(torch.futures.Future):
    """A future that follows from an operation.

    Args:
        handle: The operation.
        gpus: The GPUs that the tensors of its value lie on.
    """

    def __init__(self, handle: OneHandle | _All, gpus: list[torch.device]) -> None:
        super().__init__(devices=gpus)
        self._handle = handle
        self._gpus = gpus

    def then(self, callback: Callable[[Any], Any]) -> "_Chained":
        """Return a future of what `callback` returns, given this one when it is complete."""
        following = _Chained(self._handle, self._gpus)

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
        """Return the result, making progress meanwhile."""
        self._handle.wait()
        return super().wait()


class Future(_Chained):
    """The future of an operation; callbacks run in the order of the operations.

    Args:
        handle: The operation.
        value: Its result.
    """

    def __init__(self, handle: OneHandle | _All, value: Any) -> None:
        super().__init__(handle, list({x.device for x in tensors_in(value) if is_gpu_tensor(x)}))
        self._value = value
        handle.when_done(self._complete)

    def _complete(self, error: BaseException | None) -> None:
        if error is None:
            # The tensors are complete: not on the user's stream, whose later work would delay it.
            with on_idle_stream(self._gpus):
                self.set_result(self._value)
        else:
            self.set_exception(error)

    def wait(self) -> Any:
        """Return the result, making progress meanwhile; also from inside a callback.

        The thread of the callback may be the one that would complete this future.
        """
        self._handle.wait()
        return self._value


class Work(dist.Work):
    """One operation.

    Args:
        handle: The operation; for a receive, its result is the rank that sent.
        value: The tensors with the result.
        timeout_s: The longest that `wait` waits; None for the timeout of the group.
        threaded: Whether operations advance in the background.
        rests: Not so if, during a backward pass, a future is asked for, which this pass will wait
            for at its end: see `Lane.rest`.

    Attributes:
        handle, value: As given.
    """

    def __init__(self, handle: OneHandle, value: Sequence[Any], timeout_s: float | None = None, *,
                 threaded: bool, rests: bool = False) -> None:
        super().__init__()
        self.handle, self.value = handle, value
        self._timeout_s = timeout_s
        self._threaded, self._rests = threaded, rests
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
            self.handle.wait(timeout.total_seconds() or self._timeout_s)
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
            if _wait_after_backward(self.handle):
                if self._rests and not isinstance(self.handle, _Done):
                    self.handle.lane.rest()
            elif not self._threaded:
                self.wait()
            self._future = Future(self.handle, self.value)
        return self._future


def _wait_after_backward(handle: OneHandle) -> bool:
    """During a backward pass, make its thread wait for `handle` at the end; else return False.

    DistributedDataParallel would wait there in C++, unknown to the engine's thread, which would
    sleep between its tests.
    """
    try:
        # In the order of these calls, and so before DistributedDataParallel's own.
        call_after_backward(handle.wait)
    except RuntimeError:
        return False
    return True


class Coalesced(dist.Work):
    """Several operations as one.

    Args:
        works: Of the operations.
    """

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Return True when all are complete; the timeout is for each."""
        return all([work.wait(timeout) for work in self._works])

    def is_completed(self) -> bool:
        """Return whether all are complete."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Return whether all are complete."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        """Return the first error that ended one of them; None if none did."""
        return next(filter(None, (work.exception() for work in self._works)), None)

    def result(self) -> Sequence[Any]:
        """Return the tensors with all results, when they are complete."""
        return [x for work in self._works for x in work.result()]

    def get_future(self) -> Future:
        """Return a future of the tensors with all results."""
        # PyTorch's collect_all forgets the devices: callbacks of its `then` would not wait.
        for work in self._works:
            work.get_future()
        return Future(_All([work.handle for work in self._works]),
                      [x for work in self._works for x in work.value])
