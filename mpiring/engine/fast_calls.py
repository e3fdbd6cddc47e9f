"""Runs node calls in the caller's thread, and passes late ones to the engine.

A Prepared (see prepared) makes the node calls. The caller runs one to its end, or starts it and
waits for it later. In both cases, the protocol (see transport.protocol) records the completed call
in the counter, unless the engine runs it.
"""

import functools
import time
import weakref
from typing import TYPE_CHECKING, Any

from ..collectives import shared
from ..memory.arrays import Array
from ..operations.agreement import refuse_others
from ..record.flight import Flight
from ..transport.base import Schedule, T, Task
from ..transport.layout import (
    BEGIN, DISAGREE, DONE, FALLBACK, GATED, GATE_STARTED, HELD, IDLE, LATE, POLL, PUBLISH, RESUME)
from ..transport.node_call import NodeCall
from ..transport.node_memory import NodeMemory
from .handle import Action, Handle

if TYPE_CHECKING:
    from .group import Group

# Allreduce algorithms with results bitwise identical to those of node calls, see
# collectives.shared. Each rank combines all vectors, or one slice of them.
BY_SLOTS, BY_SLICES = "eager", "shared"


class FastCalls:
    """The node calls that a group runs in its callers' threads.

    Each rank decides by itself whether a call is fast; the other ranks need not know.

    Attributes:
        memory: Memory that all ranks share; None if no call is fast.
        started: Handles of started calls that are not complete and not passed to the engine.
        prepared: Objects that make node calls; see `forget`.
    """

    def __init__(self, group: "Group", memory: NodeMemory | None) -> None:
        self.group, self.memory = group, memory
        self.started: list[FastHandle[Any]] = []
        self.prepared: weakref.WeakSet[Any] = weakref.WeakSet()
        self._counter = group.sharing.counter

    def forget(self) -> None:
        """Forget all node calls, because faster code may exist now."""
        for prepared in tuple(self.prepared):
            prepared.forget()

    def finish(self, call: NodeCall, x: Array, status: int) -> bool:
        """Complete a call; return False, and do nothing, if the gate is closed.

        The status is the result of beginning it, or GATED.
        """
        with self._counter:
            if status == GATED:
                status = self._begin(BEGIN, call, x)
            if status in (LATE, FALLBACK):
                status = call.run(RESUME, x)
            if status in (DONE, GATED):
                return status == DONE
            # From here on it is an ordinary operation.
            self.hand_over()
            handle = FastHandle(self, call, x, None, time.monotonic_ns() - call.began)
            handle.hand_over()
        handle.wait()
        return True

    def start(self, call: NodeCall, x: Array, result: T) -> Handle[T] | None:
        """Start a call, and return its handle; None, and do nothing, if the gate is closed."""
        try:
            with self._counter:
                status = self._begin(PUBLISH, call, x)
                if status == GATED:
                    return None
                handle = FastHandle(self, call, x, result)
                self.started.append(handle)
                if status == LATE:
                    # An operation in flight still uses the area.
                    self.hand_over()
                else:
                    self._counter.close(GATE_STARTED)
                return handle
        except BaseException as error:
            self.fail(call, error)
            raise

    def _begin(self, mode: int, call: NodeCall, x: Array) -> int:
        """Begin a call; first run started calls if necessary. The caller holds the lock."""
        status = call.run(mode + HELD, x)
        if status == GATED and self.started:
            for handle in tuple(self.started):
                handle.poll()
            self._counter.open(GATE_STARTED)
            status = call.run(mode + HELD, x)
            if self.started:
                self._counter.close(GATE_STARTED)
        return status

    def hand_over(self) -> None:
        """Pass started calls to the engine, because later operations may have to wait for them."""
        with self._counter:
            for handle in tuple(self.started):
                if not handle.poll():
                    handle.hand_over()

    def remove(self, handle: "FastHandle[Any]") -> None:
        """Remove a handle from the started handles. The caller holds the lock."""
        if handle in self.started:
            self.started.remove(handle)
            if not self.started:
                self._counter.open(GATE_STARTED)

    def fail(self, call: NodeCall, error: BaseException) -> None:
        """Make later calls fail if an error interrupted a call, because other ranks continue."""
        if call.stage:
            self.group.engine.fail(error)


class FastHandle(Handle[T]):
    """Handle of a fast call that is published, so that no other rank waits for this rank.

    `wait` and `test` run the rest of the call: wait for the other ranks, and combine. If the other
    ranks are late, or another operation of this rank might have to wait for the call, the engine
    runs the rest (see `hand_over`). Until then, a thread must hold the counter's lock to run the
    call. The caller has waited `waited_ns` ns since the call began.
    """

    is_queued = False

    def __init__(self, calls: FastCalls, call: NodeCall, x: Array, result: T,
                 waited_ns: int = 0) -> None:
        # Few handles need a flight and a task, so these are made later.
        self.queue, self.complete, self.patience_s = calls.group.queue, False, 0.0
        self._calls, self._node_call, self._call, self._result = calls, call, call.call, result
        self._x: Any = x
        self._sequence, self._began_ns = call.sequence, call.began
        self._waited_ns, self._ended_ns, self._moved_s = waited_ns, 0, self._began_ns / 1e9
        self._is_running = self._is_adopted = False
        self._counter = calls.group.sharing.counter

    def __repr__(self) -> str:
        return f"#{self._sequence} {self._call}"

    @functools.cached_property
    def flight(self) -> Flight:  # type: ignore[override]
        """The record of the call."""
        call, began_s = self._node_call, self._began_ns / 1e9
        return Flight(self._call, self._sequence, self._counter.group,
                      BY_SLICES if call.by_slices else BY_SLOTS * bool(call.op), began_s, began_s,
                      self._ended_ns / 1e9, self._waited_ns / 1e9)

    @property
    def is_over(self) -> bool:
        """Whether the operation is complete."""
        return self.complete

    def poll(self) -> bool:
        """Run the call as far as possible, unless the engine does; return whether it is done."""
        if not (self.complete or self._is_adopted or self._is_stopped):
            with self._counter:
                # A signal handler may call this during a run.
                if not (self.complete or self._is_adopted or self._is_running):
                    self._run(POLL)
        return self.complete

    @property
    def _is_stopped(self) -> bool:
        """Whether the call cannot continue: an operation failed, or this process is a fork."""
        return bool(self._counter.gate & ~GATE_STARTED)

    def _run(self, mode: int) -> bool:
        """Run the rest in this thread, which holds the lock; return whether it is complete."""
        began_ns, self._is_running = time.monotonic_ns(), True
        try:
            status = self._node_call.run(mode, self._x)
            self._is_running = False
            ended_ns = time.monotonic_ns()
            self._waited_ns += ended_ns - began_ns
            if status == DISAGREE:
                refuse_others(self._call, self._node_call.node())
        except BaseException as error:
            self._calls.fail(self._node_call, error)
            raise
        if status == DONE:
            # A handle that is kept must not keep the array alive.
            self.complete, self._ended_ns, self._x = True, ended_ns, None
            # The protocol has recorded all the time since the call began. Keep only the time during
            # which the caller waited.
            self._counter.fast_ns -= ended_ns - self._began_ns - self._waited_ns
            self._calls.remove(self)
        return self.complete

    def hand_over(self) -> None:
        """Let the engine run the rest, unless it already does, or the call is complete."""
        with self._counter:
            if not (self.complete or self._is_adopted):
                self.task = Task(_finish(
                    self._calls.group, self._node_call, self._x, self._result))
                # The engine records it, not the protocol.
                self._node_call.began = 0
                self._is_adopted, self._x = True, None
                self._calls.group.adopt(self)
                self._calls.remove(self)

    def test(self) -> bool:
        """Make some progress; return whether the operation is complete. See Handle."""
        if not self._is_adopted:
            self._raise_if_stopped()
            # A signal handler may call this during a run.
            if (is_done := self.poll()) or self._is_running:
                return is_done
        # The engine also advances the operations for which other ranks may wait before they make
        # this call, and reports a stall.
        self.hand_over()
        return super().test()

    def wait(self, timeout_s: float | None = None) -> T:
        """Return the operation's result when it is complete on this rank. See Handle."""
        if not (self.complete or self._is_adopted):
            self._raise_if_stopped()
            with self._counter:
                if not (self.complete or self._is_adopted or self._run(POLL) or self._run(RESUME)):
                    self.hand_over()
        if not self.complete:
            self.queue.engine.wait(self, timeout_s)
        return self._result

    def _raise_if_stopped(self) -> None:
        if self._is_stopped and not self.complete:
            self._calls.group.check_open()
            self._calls.group.engine.raise_failure()

    def when_done(self, action: Action) -> None:
        """Call `action` once the operation is complete or has failed. See Handle."""
        if not self._is_adopted:
            self._raise_if_stopped()
        self.hand_over()
        super().when_done(action)


def _finish(group: "Group", call: NodeCall, x: Any, result: T) -> Schedule[T]:
    request = _Remainder(call, x)
    yield (request,)
    if request.status == DISAGREE:
        refuse_others(call.call, call.node())
    if request.status == FALLBACK:
        # Some vectors are not in windows.
        node = call.node()
        operation = group.collectives(node, call.sequence)
        yield from shared.located(operation, node.notes(2), x, call.op,
                                  operation.combiner(call.op, call.dtype, node.size))
        node.leave()
        call.stage = IDLE
    return result


class _Remainder:
    """The rest of a node call, as a request; also complete if the call needs another algorithm."""

    def __init__(self, call: NodeCall, x: Any) -> None:
        self.status, self._call, self._x = LATE, call, x

    def __repr__(self) -> str:
        return f"stage {self._call.stage} of a node call"

    def test(self) -> bool:
        if self.status == LATE:
            self.status = self._call.run(POLL, self._x)
        return self.status != LATE
