"""Handles of rounds that were started: nothing runs them but their caller's next calls."""

import time
from collections.abc import Callable
from typing import Any, Protocol

from ..collectives import shared
from ..config import Config
from ..memory.arrays import Array
from ..operations.agreement import Call, refuse_others
from ..operations.operation import Collectives
from ..operations.windows import Windows
from ..record.flight import Flight
from ..transport.base import Node, Schedule, T, Task
from ..transport.layout import (
    CALL_BEGAN, CALL_IDENTITY, CALL_SEQUENCE, CALL_STAGE, COUNTER_GATE, DISAGREE, GATE_STARTED,
    GO_ON, IDLE, LATE, LOOK, OTHERWISE)
from ..transport.node_call import NodeCall
from .engine import Engine
from .handle import Action, Handle, Lane
from .opening import Sharing


class CallingGroup(Protocol):
    """What calls like earlier ones need of their group; see group.Group."""

    config: Config
    rank: int
    size: int
    sharing: Sharing
    engine: Engine
    lane: Lane

    @property
    def windows(self) -> Windows:
        """The arrays in node-shared memory."""

    def collectives(self, node: Node | None = None, sequence: int = 0) -> Collectives:
        """Return the schedules of an operation."""

    def watch(self, handle: Handle[Any]) -> None:
        """Watch an operation that has begun by itself."""

    def check_open(self) -> None:
        """Raise ClosedError unless the group is open, and MPI is running in this process."""


class StartedRound(Handle[T]):
    """Handle of a round that is published: no other rank needs anything of this one for it.

    What is left, to meet the others and to combine, is done by `wait`, `test` or a look at `done`;
    or by the engine, once something else of this rank might wait for it (see `hand_over`). Until
    then, whoever runs it holds the counter's lock: threads run it one after the other.

    Args:
        group: Its ranks.
        round_, call: What runs, and what it is.
        x: Its vector.
        result: What `wait` returns.
        finished: Called once a caller has waited for it, and the engine never heard of it.
        waited: The caller has waited since it began.
    """

    def __init__(self, group: CallingGroup, round_: NodeCall, call: Call, x: Array, result: T,
                 finished: Callable[[Handle[Any]], None], *, waited: bool = False) -> None:
        # Not that of Handle: what only the engine needs is made when it gets this.
        self._group, self._round, self._call = group, round_, call
        self._counter = group.sharing.counter
        self._x: Array | None = x
        self._result, self._is_done, self._finished = result, False, finished
        self._is_handed_over, self.patience_s = False, 0.0
        words = round_
        self._sequence, self._began_ns = words[CALL_SEQUENCE], words[CALL_BEGAN]
        self._waited_ns = time.monotonic_ns() - self._began_ns if waited else 0
        # The record is kept here.
        words[CALL_BEGAN] = 0

    def __repr__(self) -> str:
        return f"#{self._sequence} {self._call}"

    def __getattr__(self, name: str) -> Any:
        """Return what only the engine needs, for who looks at it."""
        if name not in ("flight", "task", "lane", "waited_s"):
            raise AttributeError(name)
        self.hand_over()
        return object.__getattribute__(self, name)

    @property
    def done(self) -> bool:
        """Whether it is complete."""
        if not (self._is_done or self._is_handed_over or self._is_void):
            with self._counter:
                if not (self._is_done or self._is_handed_over):
                    self.run(LOOK)
        return self._is_done

    @done.setter
    def done(self, done: bool) -> None:
        """Note whether it is; for the engine."""
        self._is_done = done
        if done:
            # Whoever remembers the handle shall not keep the array.
            self._x = None

    @property
    def _is_void(self) -> bool:
        """Whether it cannot go on here: an operation has failed, or this process is a fork."""
        return bool(self._counter.words[COUNTER_GATE] & ~GATE_STARTED)

    def run(self, how: int) -> bool:
        """Run what is left, in this thread, which holds the lock; return whether it is complete.

        Args:
            how: LOOK or GO_ON; see transport.layout.
        """
        words, began_ns = self._round, time.monotonic_ns()
        try:
            status = self._round.run(how, self._x)  # type: ignore[arg-type]
            ended_ns = time.monotonic_ns()
            self._waited_ns += ended_ns - began_ns
            if status == LATE:
                return False
            if status == DISAGREE:
                refuse(self._round, self._call)
        except BaseException as error:
            if words[CALL_STAGE]:
                self._group.engine.fail(error)
            raise
        self.done = True
        self._counter.note(words[CALL_IDENTITY], self._sequence, self._began_ns, ended_ns,
                           self._waited_ns)
        return True

    def hand_over(self) -> None:
        """Let the engine run what is left, unless it does; from here on it is as any handle."""
        with self._counter:
            if not self._is_handed_over:
                self._hand_over()

    def _hand_over(self) -> None:
        began_s, self._is_handed_over = self._began_ns / 1e9, True
        flight = Flight(self._call, self._sequence, self._counter.group,
                        "shared" if self._round.in_place else "eager", began_s, began_s,
                        exposed_s=self._waited_ns / 1e9)
        done, x = self._is_done, self._x
        super().__init__(self._group.lane, flight, Task(
            _rest(self._group, self._round, self._call, x)))
        self._is_done = done
        try:
            if not done:
                self._group.watch(self)
                self._group.engine.adopt(self)
        except BaseException as error:
            self._group.engine.fail(error)
            raise

    def test(self) -> bool:
        """Make some progress; return whether the operation is complete; see Handle."""
        if self._is_handed_over:
            return super().test()
        self._refuse_void()
        return self.done

    def wait(self, timeout_s: float | None = None) -> T:
        """Return the operation's result when it is complete on this rank; see Handle."""
        if not self._is_done and not self._is_handed_over:
            self._refuse_void()
            with self._counter:
                if not self._is_done and not self._is_handed_over:
                    if self.run(LOOK) or self.run(GO_ON):
                        self._finished(self)
                    else:
                        self.hand_over()
        if not self._is_done:
            super().wait(timeout_s)
        return self._result

    def _refuse_void(self) -> None:
        if self._is_void and not self._is_done:
            self._group.check_open()
            self._group.engine.raise_failure()

    def when_done(self, action: Action) -> None:
        """Call `action` once the operation is complete or has failed; see Handle."""
        if not self._is_handed_over:
            self._refuse_void()
            self.hand_over()
        super().when_done(action)


def refuse(round_: NodeCall, call: Call) -> None:
    """Raise BufferMismatchError for a round in which another rank made another call."""
    refuse_others(call, round_.node())


def _rest(group: CallingGroup, round_: NodeCall, call: Call, x: Any) -> Schedule[Any]:
    rest = _Rest(round_, x)
    yield (rest,)
    if rest.status == DISAGREE:
        refuse(round_, call)
    if rest.status == OTHERWISE:
        # Not all vectors are in windows.
        node = round_.node()
        operation = group.collectives(node, round_[CALL_SEQUENCE])
        yield from shared.located(operation, node.notes(2), x, round_.op,
                                  operation.combiner(round_.op, round_.dtype, node.size))
        node.leave()
        round_[CALL_STAGE] = IDLE


class _Rest:
    """What is left of a round; complete when it is, or when it is no round any more."""

    def __init__(self, round_: NodeCall, x: Any) -> None:
        self.status, self._round, self._x = LATE, round_, x

    def __repr__(self) -> str:
        return f"stage {self._round[CALL_STAGE]} of a round"

    def test(self) -> bool:
        """Run it as far as it goes; return whether anything is left to wait for."""
        if self.status == LATE:
            self.status = self._round.run(LOOK, self._x)
        return self.status != LATE
