"""Prepares node calls and runs them in the caller's thread; passes late calls to the engine.

A node call is prepared after an equal call, or for a persistent operation. The caller then runs it
to its end, or starts it and waits for it later. In both cases, the protocol (see
transport.protocol) records the completed call in the counter, unless the engine runs it.
"""

import time
from typing import Any, Protocol

import numpy as np

from ..collectives import shared
from ..config import Config
from ..memory.arrays import Array, data_address, dtype_name
from ..memory.reduction import reduction
from ..operations.agreement import Call, refuse_others
from ..operations.collectives import Collectives
from ..operations.windows import Windows
from ..record.flight import Flight
from ..transport import compiled
from ..transport.base import Node, Schedule, T, Task
from ..transport.layout import (
    AREAS, BEGIN, CALL_BEGAN, CALL_SEQUENCE, CALL_STAGE, COUNTER_GATE, COUNTER_NANOSECONDS,
    DISAGREE, DONE, GATED, GATE_STARTED, RESUME, HELD, IDLE, IN_SLOT, LATE, POLL, NOWHERE, FALLBACK,
    PUBLISH, SLOT_BYTES, WINDOWS)
from ..transport.node_call import NodeCall, piece_call, slot_call, slot_plan
from ..transport.node_memory import NodeMemory
from .engine import Engine
from .handle import Action, Handle, Lane
from .opening import Sharing

# Maximum number of noted calls, because a program may use any number of shapes.
_MAX_CALLS = 256
# Maximum number of equal calls that are started at a time.
_MAX_STARTED = AREAS - 1
# Name of the call, op or root, dtype, and shape. The key of an allreduce in place also has the
# position of this rank's vector; the key of a started call also has a number.
_Key = tuple[Any, ...]
BARRIER = Call("barrier")
# Vector of calls without data.
NOTHING = np.empty(0, np.float32)
_BARRIER_KEY: _Key = "barrier", None, NOTHING.dtype, NOTHING.shape
COPYING = "allgather", "broadcast"
# Allreduce algorithms with results bitwise identical to those of node calls, see
# collectives.shared. Each rank combines all vectors, or one slice of them.
BY_SLOTS, BY_SLICES = "eager", "shared"
# Number of barriers at which a rank with its vector in its slot arrives at once, if other ranks
# combine slices.
_BARRIERS = 3


class CallingGroup(Protocol):
    """The part of a group that fast calls need; see group.Group."""

    config: Config
    sharing: Sharing
    engine: Engine
    lane: Lane

    @property
    def windows(self) -> Windows:
        """The arrays in node-shared memory."""

    def collectives(self, node: Node | None = None, sequence: int = 0) -> Collectives:
        """Return the schedules of an operation."""

    def adopt(self, handle: Handle[Any]) -> None:
        """Advance and watch an operation that was begun without the engine."""

    def check_open(self) -> None:
        """Raise ClosedError unless the group is open, and MPI is running in this process."""


class FastCalls:
    """The prepared node calls of a group: short collectives, and allreduces of any length.

    Each rank decides by itself whether a call is fast; the other ranks need not know.

    Attributes:
        memory: Memory that all ranks share; None if no call is fast.
        started: Handles of started calls that are not complete and not passed to the engine.
    """

    def __init__(self, group: CallingGroup, memory: NodeMemory | None) -> None:
        self.group, self.memory = group, memory
        self.started: list[FastHandle[Any]] = []
        self._counter = group.sharing.counter
        # The value is a Call if the allreduce is prepared separately for each position of x.
        self._calls: dict[_Key, NodeCall | Call] = {}

    def repeat(self, name: str, x: Any, op_or_root: Any = None) -> bool:
        """Run a collective on `x` if an equal one was noted; return False otherwise.

        Raises:
            MpiringError: The collective has failed.
        """
        key = name, op_or_root, x.dtype, x.shape
        call = self._find_call(key, x)
        if call.__class__ is Call:
            call = self._call_at(call, key, x)
        if call is None:
            return False
        return self.run(call, x if x.ndim == 1 else x.reshape(-1))

    def barrier(self) -> bool:
        """Return True once every rank has called a barrier; False if none was noted."""
        call: Any = self._calls.get(_BARRIER_KEY)
        return call is not None and self.run(call, NOTHING)

    def iallreduce(self, x: Any, op: Any) -> Handle[Any] | None:
        """Begin Communicator.iallreduce if an equal call was noted; return the handle, or None."""
        key = "allreduce", op, x.dtype, x.shape
        noted = self._find_call(key, x)
        if noted is None or x.nbytes > SLOT_BYTES:
            return None
        vector = x if x.ndim == 1 else x.reshape(-1)
        for number in range(_MAX_STARTED):
            numbered_key = *key, number
            call: Any = self._calls.get(numbered_key)
            if call is None:
                description = noted if noted.__class__ is Call else noted.call
                call = self.prepare(description, vector, "allreduce", op, started=True)
                if call is None:
                    return None
                self._store(numbered_key, call)
            if not call[CALL_STAGE]:
                break
        return self.start(call, vector, x)

    def _find_call(self, key: _Key, x: Any) -> Any:
        try:
            call = self._calls.get(key)
        except TypeError:
            # The op is not hashable; the ordinary path raises the error.
            return None
        # Check each time, because the array's memory, shape and flags may change at any time.
        return call if call is not None and x.flags.carray else None

    def _call_at(self, call: Call, key: _Key, x: Any) -> Any:
        position = self.group.windows.position_of(x)
        return self._calls.get((*key, position)) or self._store(
            (*key, position), self.prepare_slices(call, x.reshape(-1), key[1]))

    def note(self, name: str, call: Call, x: Any, op_or_root: Any = None, kind: str = "") -> None:
        """After a collective, prepare the next equal call, so that it is fast if possible.

        Args:
            name: Name that distinguishes the call from other calls on equal arrays.
            kind: Kind of the collective, if not `name`: "allreduce", "reduce_scatter", "allgather",
                "broadcast" or "barrier".
        """
        if (self.memory is None or type(op_or_root) not in (str, int, type(None))
                or not x.flags.carray):
            return
        key, kind = (name, op_or_root, x.dtype, x.shape), kind or name
        if key in self._calls:
            return
        vector = x.reshape(-1)
        prepared = self.prepare(call, vector, kind, op_or_root)
        if prepared is not None:
            self._store(key, prepared)
        elif kind == "allreduce" and self.is_compiled(vector, op_or_root):
            self._store(key, call)
        if kind in ("allreduce", "reduce_scatter"):
            self.group.engine.compiler.want(self, op_or_root, dtype_name(x.dtype))

    def _store(self, key: _Key, call: NodeCall | Call) -> Any:
        if len(self._calls) >= _MAX_CALLS:
            self.forget()
        self._calls[key] = call
        return call

    def forget(self) -> None:
        """Forget the noted calls, because faster code may exist now or there are too many."""
        self._calls.clear()

    def prepare(self, call: Call, x: Array, kind: str, op_or_root: Any = None, *,
                started: bool = False) -> NodeCall | None:
        """Return a call that runs a collective on short vectors through slots; None if impossible.

        The vectors have the length and dtype of `x`. An allreduce that will be `started` may use
        slots even if other ranks combine slices.
        """
        op = op_or_root if kind in ("allreduce", "reduce_scatter") else ""
        memory = self.memory
        if memory is None:
            return None
        collectives, settings = self.group.collectives(), dict[str, Any]()
        if not collectives.is_eager(kind, x, op):
            if not (started and kind == "allreduce" and collectives.fits_slots(x)
                    and collectives.algorithm_of(x, op).name == BY_SLICES):
                return None
            settings = {"note": IN_SLOT, "barriers": _BARRIERS}
        combine = reduction(op, x.dtype, len(memory.ranks)) if op else None
        root = op_or_root if kind == "broadcast" else 0
        plan = slot_plan(kind, x.size, memory.rank, len(memory.ranks), root)
        node_call = slot_call(memory, x.dtype, x.size, plan, combine)
        algorithm = BY_SLOTS if kind == "allreduce" else ""
        self._make_operation(node_call, call, op, algorithm, **settings)
        return node_call

    def prepare_slices(self, call: Call, x: Array, op: str) -> NodeCall:
        """Return a call that combines one slice of long vectors; call it only if `is_compiled`.

        If the vector is in a window, it must not move.
        """
        memory: Any = self.memory
        windows = self.group.windows
        position, combine = windows.position_of(x), reduction(op, x.dtype, len(memory.ranks))
        if position == NOWHERE:
            staged_bytes = self.group.collectives().tuning.staged_bytes
            node_call = piece_call(memory, x.dtype, x.size, staged_bytes, combine)
        else:
            node_call = NodeCall(memory, x.dtype, x.size, WINDOWS, combine)
        self._make_operation(node_call, call, op, BY_SLICES, note=position, find=windows.vectors)
        return node_call

    def _make_operation(self, node_call: NodeCall, call: Call, op: str, algorithm: str,
                        **settings: Any) -> None:
        code = compiled.code(op, dtype_name(node_call.dtype), len(node_call.memory.ranks))
        node_call.make_operation(
            call, self._counter.identity_of(call, algorithm), op,
            code if self.group.config.rounds == "auto" else None, **settings)

    def is_compiled(self, x: Array, op: str) -> bool:
        """Return whether an allreduce combines slices, and compiled code for it exists."""
        return (self.memory is not None and self.group.config.rounds == "auto"
                and self.group.collectives().algorithm_of(x, op).name == BY_SLICES
                and compiled.code(op, dtype_name(x.dtype), len(self.memory.ranks)) is not None)

    def run(self, call: NodeCall, x: Array, status: int = GATED) -> bool:
        """Run a call to its end; return False, and do nothing, if the gate is closed.

        If the caller has begun the call, `status` is the result of `begin`.
        """
        try:
            if call.is_short and status == GATED:
                # This does the same as call.run, in a third of the time.
                status = call.begin(call.address, data_address(x))
            elif call.code is not None and status == GATED:
                status = call.run(BEGIN, x)
            return status == DONE or self._continue(status, call, x)
        except BaseException as error:
            self.fail(call, error)
            raise

    def _continue(self, status: int, call: NodeCall, x: Array) -> bool:
        """Complete a call; return False if the gate is closed."""
        with self._counter:
            if status == GATED:
                status = self._begin(BEGIN, call, x)
            if status in (LATE, FALLBACK):
                status = call.run(RESUME, x)
            if status in (DONE, GATED):
                return status == DONE
            # From here on it is an ordinary operation.
            self.hand_over()
            handle = FastHandle(self, call, x, None, time.monotonic_ns() - call[CALL_BEGAN])
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
        if call[CALL_STAGE]:
            self.group.engine.fail(error)


class FastHandle(Handle[T]):
    """Handle of a fast call that is published, so that no other rank waits for this rank.

    `wait` and `test` run the rest of the call: wait for the other ranks, and combine. If the other
    ranks are late, or another operation of this rank might have to wait for the call, the engine
    runs the rest (see `hand_over`). Until then, a thread must hold the counter's lock to run the
    call. The caller has waited `waited_ns` ns since the call began.
    """

    def __init__(self, calls: FastCalls, call: NodeCall, x: Array, result: T,
                 waited_ns: int = 0) -> None:
        # Handle's constructor is not called, because `hand_over` makes another handle for the
        # engine.
        self._calls, self._call, self._result = calls, call, result
        self._x: Any = x
        self._sequence, self._began_ns = call[CALL_SEQUENCE], call[CALL_BEGAN]
        self._waited_ns, self._is_done, self._is_running = waited_ns, False, False
        self._counter = calls.group.sharing.counter
        # The handle of the engine, once it runs the call.
        self._handle: Handle[Any] | None = None

    def __repr__(self) -> str:
        return f"#{self._sequence} {self._call.call}"

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that only the engine's handle has."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.hand_over(), name)

    @property
    def patience_s(self) -> float:
        """Patience of the engine's handle, which runs and watches the call from now on."""
        return self.hand_over().patience_s

    @patience_s.setter
    def patience_s(self, seconds: float) -> None:
        """Set it; see Handle."""
        self.hand_over().patience_s = seconds

    def poll(self) -> bool:
        """Run the call as far as possible, unless the engine does; return whether it is done."""
        if not (self._is_done or self._handle or self._is_stopped):
            with self._counter:
                # A signal handler may call this during a run.
                if not (self._is_done or self._handle or self._is_running):
                    self._run(POLL)
        return self._is_done if self._handle is None else self._handle.complete

    @property
    def _is_stopped(self) -> bool:
        """Whether the call cannot continue: an operation failed, or this process is a fork."""
        return bool(self._counter.words[COUNTER_GATE] & ~GATE_STARTED)

    def _run(self, mode: int) -> bool:
        """Run the rest in this thread, which holds the lock; return whether it is complete."""
        began_ns, self._is_running = time.monotonic_ns(), True
        try:
            status = self._call.run(mode, self._x)
            self._is_running = False
            ended_ns = time.monotonic_ns()
            self._waited_ns += ended_ns - began_ns
            if status == DISAGREE:
                refuse_others(self._call.call, self._call.node())
        except BaseException as error:
            self._calls.fail(self._call, error)
            raise
        if status == DONE:
            # A handle that is kept must not keep the array alive.
            self._is_done, self._x = True, None
            # The protocol has recorded all the time since the call began. Keep only the time during
            # which the caller waited.
            self._counter.words[COUNTER_NANOSECONDS] -= (
                ended_ns - self._began_ns - self._waited_ns)
            self._calls.remove(self)
        return self._is_done

    def hand_over(self) -> Handle[Any]:
        """Let the engine run the rest, unless it already does; return the engine's handle."""
        with self._counter:
            if self._handle is None:
                group, call, began_s = self._calls.group, self._call, self._began_ns / 1e9
                flight = Flight(call.call, self._sequence, self._counter.group,
                                BY_SLICES if call.by_slices else BY_SLOTS * bool(call.op), began_s,
                                began_s, exposed_s=self._waited_ns / 1e9)
                handle = Handle(group.lane, flight, Task(_finish(group, call, self._x)))
                handle.complete, self._handle, self._x = self._is_done, handle, None
                if not handle.complete:
                    # The engine records it, not the protocol.
                    call[CALL_BEGAN] = 0
                    group.adopt(handle)
                self._calls.remove(self)
            return self._handle

    def test(self) -> bool:
        """Make some progress; return whether the operation is complete. See Handle."""
        if self._handle is None:
            self._raise_if_stopped()
            # A signal handler may call this during a run.
            if (is_done := self.poll()) or self._is_running:
                return is_done
        # The engine also advances the operations for which other ranks may wait before they make
        # this call, and reports a stall.
        return self.hand_over().test()

    def wait(self, timeout_s: float | None = None) -> T:
        """Return the operation's result when it is complete on this rank. See Handle."""
        if not self._is_done and self._handle is None:
            self._raise_if_stopped()
            with self._counter:
                if not (self._is_done or self._handle or self._run(POLL) or self._run(RESUME)):
                    self.hand_over()
        if self._handle is not None:
            self._handle.wait(timeout_s)
        return self._result

    def _raise_if_stopped(self) -> None:
        if self._is_stopped and not self._is_done:
            self._calls.group.check_open()
            self._calls.group.engine.raise_failure()

    def when_done(self, action: Action) -> None:
        """Call `action` once the operation is complete or has failed. See Handle."""
        if self._handle is None:
            self._raise_if_stopped()
        self.hand_over().when_done(action)


def _finish(group: CallingGroup, call: NodeCall, x: Any) -> Schedule[None]:
    request = _Remainder(call, x)
    yield (request,)
    if request.status == DISAGREE:
        refuse_others(call.call, call.node())
    if request.status == FALLBACK:
        # Some vectors are not in windows.
        node = call.node()
        operation = group.collectives(node, call[CALL_SEQUENCE])
        yield from shared.located(operation, node.notes(2), x, call.op,
                                  operation.combiner(call.op, call.dtype, node.size))
        node.leave()
        call[CALL_STAGE] = IDLE


class _Remainder:
    """The rest of a node call, as a request; also complete if the call needs another algorithm."""

    def __init__(self, call: NodeCall, x: Any) -> None:
        self.status, self._call, self._x = LATE, call, x

    def __repr__(self) -> str:
        return f"stage {self._call[CALL_STAGE]} of a node call"

    def test(self) -> bool:
        if self.status == LATE:
            self.status = self._call.run(POLL, self._x)
        return self.status != LATE
