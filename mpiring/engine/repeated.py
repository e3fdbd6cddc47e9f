"""Runs a group's calls as rounds, in the caller's thread; what is late goes to the engine."""

from typing import Any, cast

import numpy as np

from ..collectives.operation import IN_SLOT, NOWHERE
from ..memory.arrays import Array, bounds_of, data_address, dtype_name
from ..operations.agreement import Call
from ..memory.reduction import reduction
from ..transport import compiled, plans
from ..transport.base import T
from ..transport.layout import (
    AREAS, BEGIN, CALL_STAGE, DONE, GATED, GATE_STARTED, GO_ON, HELD, LATE, OTHERWISE, PUBLISH,
    WINDOWS)
from ..transport.node_memory import NodeMemory
from ..transport.node_call import Identity, NodeCall, slot_call
from ..transport.plans import SlotPlan
from .handle import Handle
from .started import CallingGroup, StartedRound

# A program may combine vectors of ever new shapes.
_MOST_CALLS = 256
# So many of a kind may be started at once.
_MOST_STARTED = AREAS - 1
# Of an allreduce: op, dtype, shape; and in place, the position of this rank's vector. Of others:
# kind, op or root, dtype, shape.
_Key = tuple[Any, ...]
BARRIER = Call("barrier")
# It combines nothing.
_NOTHING = np.empty(0, np.float32)
COPYING = "allgather", "broadcast"
_OF_BARRIER: _Key = ("barrier",)
# What rounds of an allreduce do to the bit, see collectives.shared: every rank combines all
# vectors, by slots; or a slice of all, in windows.
BY_SLOTS, IN_PLACE = "eager", "shared"
# At how many barriers a vector lies in its slot, if it was to be combined in place.
_BARRIERS = 3


class RepeatedCalls:
    """The calls that a group has made before, and may make again as rounds.

    Short ones, and allreduces of vectors in windows, of any length.

    Whether a call is a round, each rank decides by itself: the others cannot tell.

    Args:
        group: Its ranks share one memory.

    Attributes:
        started: What was started, and was not complete when it was looked at last.
    """

    def __init__(self, group: CallingGroup) -> None:
        self._group, self._counter = group, group.sharing.counter
        self.started: list[StartedRound[Any]] = []
        self._rounds: dict[_Key, tuple[NodeCall, Call]] = {}
        # Those that are combined in place, where this rank's vector is in a window.
        self._in_place: dict[_Key, Call] = {}
        # For several that are started at once.
        self._more: dict[_Key, list[tuple[NodeCall, Call]]] = {}

    def allreduce(self, x: Any, op: Any) -> bool:
        """Combine `x` over all ranks, in place, if such a call was made before; return whether.

        Args:
            x: A NumPy array.
            op: As in Communicator.allreduce.

        Raises: as Communicator.allreduce.
        """
        key = op, x.dtype, x.shape
        found = self._made_before(x, key) or self._made_in_place(x, key)
        if found is None:
            return False
        return self.run(*found, x if x.ndim == 1 else x.reshape(-1))

    def reduce_scatter(self, x: Any, op: Any) -> Array | None:
        """Combine `x` over all ranks if such a call was made before; return this rank's chunk.

        Args: as `allreduce`.

        Returns:
            The chunk, or None.
        """
        found = self._made_before(x, ("reduce_scatter", op, x.dtype, x.shape))
        vector = x if x.ndim == 1 else x.reshape(-1)
        if found is None or not self.run(*found, vector):
            return None
        chunk: Array = found[0].reduced(vector)
        return chunk

    def allgather(self, x: Any) -> bool:
        """Copy all ranks' chunks of `x`, in place, if such a call was made before; return whether.

        Args:
            x: A NumPy array.

        Raises: as Communicator.allgather.
        """
        return self.again("allgather", x)

    def broadcast(self, x: Any, root: Any) -> bool:
        """Copy `x` of rank `root`, in place, if such a call was made before; return whether.

        Args:
            x: A NumPy array.
            root: As in Communicator.broadcast.

        Raises: as Communicator.broadcast.
        """
        # 1 == 1.0 == True
        return type(root) is int and self.again("broadcast", x, root)

    def again(self, kind: str, x: Any, root: int | None = None) -> bool:
        """Copy `x`, in place, if a call of a kind was made before; return whether.

        Args:
            kind: Of the call.
            x: A NumPy array.
            root: Of a broadcast.
        """
        found = self._made_before(x, (kind, root, x.dtype, x.shape))
        return found is not None and self.run(*found, x if x.ndim == 1 else x.reshape(-1))

    def iallreduce(self, x: Any, op: Any) -> Handle[Any] | None:
        """Begin to combine `x` over all ranks, in place, if such a call was made before.

        Args: as `allreduce`.

        Returns:
            The handle, or None.
        """
        found = self._made_before(x, (op, x.dtype, x.shape))
        if found is None:
            return None
        vector = x if x.ndim == 1 else x.reshape(-1)
        if found[0][CALL_STAGE]:
            more = self._more.setdefault((op, x.dtype, x.shape), [])
            found = next((pair for pair in more if not pair[0][CALL_STAGE]), found)
            if found not in more and len(more) < _MOST_STARTED - 1:
                another = self.round(found[1], vector, "allreduce", op)
                if another is not None:
                    found = another, found[1]
                    more.append(found)
        return self.start(*found, vector, x)

    def _made_before(self, x: Any, key: _Key) -> tuple[NodeCall, Call] | None:
        try:
            found = self._rounds.get(key)
        except TypeError:
            # An op that is none; the ordinary path says so.
            return None
        # Nothing is known about the array: its memory, shape and flags may change at any time.
        return found if found is not None and x.flags.carray else None

    def _made_in_place(self, x: Any, key: _Key) -> tuple[NodeCall, Call] | None:
        try:
            call = self._in_place.get(key)
        except TypeError:
            return None
        if call is None or not x.flags.carray:
            return None
        position = self._group.windows.position_of(x)
        here = *key, position
        found = self._rounds.get(here)
        if found is None and position != NOWHERE:
            if len(self._rounds) >= _MOST_CALLS:
                self._rounds.clear()
                self._more.clear()
            found = self._rounds[here] = self.in_place(call, x.reshape(-1), key[0]), call
        return found

    def barrier(self) -> bool:
        """Return whether every rank has called a barrier; False, and do nothing, if it cannot."""
        found = self._rounds.get(_OF_BARRIER)
        if found is None:
            round_ = self.round(BARRIER, _NOTHING, "barrier")
            if round_ is None:
                return False
            found = self._rounds[_OF_BARRIER] = round_, BARRIER
        return self.run(*found, _NOTHING)

    def note(self, call: Call, x: Any, kind: str, op_or_root: Any = None) -> None:
        """Note a collective that was made, so that the next one like it is a round.

        Args:
            call: What it was.
            x: Its array, of NumPy.
            kind: "allreduce", "reduce_scatter", "allgather" or "broadcast": how it plans.
            op_or_root: Where it has one.
        """
        if type(op_or_root) not in (str, int, type(None)) or not x.flags.carray:
            return
        key: _Key = op_or_root, x.dtype, x.shape
        if kind != "allreduce":
            key = call.kind, *key
        if key in self._rounds or key in self._in_place:
            return
        if len(self._rounds) + len(self._in_place) >= _MOST_CALLS:
            self.forget()
        vector = x.reshape(-1)
        round_ = self.round(call, vector, kind, op_or_root)
        if round_ is not None:
            self._rounds[key] = round_, call
        elif kind == "allreduce" and self.is_compiled(vector, op_or_root, IN_PLACE):
            self._in_place[key] = call

    def forget(self) -> None:
        """Forget what was noted: there may be a better way now, or too much."""
        self._rounds.clear()
        self._in_place.clear()
        self._more.clear()

    def round(self, call: Call, x: Array, kind: str, op_or_root: Any = None, *,
              instead: bool = False) -> NodeCall | None:
        """Return what runs a collective on short vectors as a round; None where it cannot.

        Args:
            call: What it is.
            x: A vector like those that are to be combined or copied.
            kind, op_or_root: As for `note`, or "barrier".
            instead: Of an allreduce: others may combine it by `in_place`.
        """
        op = op_or_root if kind in ("allreduce", "reduce_scatter") else ""
        if not self._group.collectives().is_eager(kind, x, op):
            return None
        settings = {"note": IN_SLOT, "barriers": _BARRIERS} if instead else {}
        return self._round(call, x, self._moves(kind, x.size, op_or_root), op,
                           BY_SLOTS if kind == "allreduce" else "", **settings)

    def in_place(self, call: Call, x: Array, op: str) -> NodeCall:
        """Return what combines a vector in a window in place as a round, if `is_compiled`.

        Args:
            call, op: What it is.
            x: The vector; it stays where it is.
        """
        windows = self._group.windows
        return self._round(call, x, None, op, IN_PLACE,
                           note=windows.position_of(x), find=windows.vectors)

    def _round(self, call: Call, x: Array, plan: SlotPlan | None, op: str, algorithm: str,
               **settings: Any) -> NodeCall:
        memory, size = cast(NodeMemory, self._group.sharing.memory), self._group.size
        identity = Identity(
            self._counter.identity_of(call, algorithm), call.header, call.digest)
        combine = reduction(op, x.dtype, size) if op else None
        node_call = slot_call(memory, x.dtype, x.size, plan, combine) if plan is not None else (
            NodeCall(memory, x.dtype, x.size, WINDOWS, combine))
        node_call.whole(identity, op, compiled.code(op, dtype_name(x.dtype), size) if
                        self._group.config.rounds == "auto" else None, **settings)
        return node_call

    def _moves(self, kind: str, n: int, op_or_root: Any) -> SlotPlan:
        rank, size = self._group.rank, self._group.size
        if kind == "allreduce":
            return plans.allreduce(n)
        if kind == "broadcast":
            return plans.broadcast(n, op_or_root, rank, size)
        if kind == "barrier":
            return plans.BARRIER
        build = plans.reduce_scatter if kind == "reduce_scatter" else plans.allgather
        return build(bounds_of(n, size), rank)

    def is_compiled(self, x: Array, op: str, algorithm: str = BY_SLOTS) -> bool:
        """Return whether an allreduce by an algorithm would be a round in compiled code."""
        group = self._group
        return (group.config.rounds == "auto"
                and group.collectives().algorithm_of(x, op).name == algorithm
                and compiled.code(op, dtype_name(x.dtype), group.size) is not None)

    def run(self, round_: NodeCall, call: Call, x: Array) -> bool:
        """Run a round to its end; return False, and do nothing, if the gate is closed.

        Args:
            round_, call: What to run, and what it is.
            x: Its vector.
        """
        try:
            if round_.is_short:
                # As round_.run, in a third of the time.
                status = round_.begin(round_.address, data_address(x))
            elif round_.code is None:
                with self._counter:
                    status = round_.run(BEGIN + HELD, x)
            else:
                status = round_.run(BEGIN, x)
            if status == GATED and self.started:
                with self._counter:
                    status = self._begin_behind(BEGIN + HELD, round_, x)
            return status == DONE or status != GATED and self.go_on(status, round_, call, x)
        except BaseException as error:
            self.fail(round_, error)
            raise

    def go_on(self, status: int, round_: NodeCall, call: Call, x: Array) -> bool:
        """Run what is left of a round to its end; return False if it has not begun.

        Args:
            status: What its beginning has returned; not DONE.
            round_, call, x: As for `run`.
        """
        with self._counter:
            if status == LATE or status == OTHERWISE:
                status = round_.run(GO_ON, x)
            if status == DONE or status == GATED:
                return status == DONE
            # From here on all is as for any operation.
            self.hand_over()
            rest = StartedRound(self._group, round_, call, x, None, self.finished, waited=True)
            rest.hand_over()
        rest.wait()
        return True

    def fail(self, round_: NodeCall, error: BaseException) -> None:
        """Let later calls fail if an error came amid a round: the other ranks go on."""
        if round_[CALL_STAGE]:
            self._group.engine.fail(error)

    def start(self, round_: NodeCall, call: Call, x: Array, result: T) -> Handle[T] | None:
        """Start a round, and return its handle; None, and do nothing, if the gate is closed.

        Args:
            round_, call, x: As for `run`.
            result: What the handle's `wait` returns.
        """
        try:
            with self._counter:
                status = round_.run(PUBLISH + HELD, x)
                if status == GATED and self.started:
                    status = self._begin_behind(PUBLISH + HELD, round_, x)
                if status == GATED:
                    return None
                handle = StartedRound(self._group, round_, call, x, result, self.finished)
                self.started.append(handle)
                if status == LATE:
                    # An operation that is under way has the area.
                    self.hand_over()
                else:
                    self._counter.close(GATE_STARTED)
                return handle
        except BaseException as error:
            self.fail(round_, error)
            raise

    def _begin_behind(self, how: int, round_: NodeCall, x: Array) -> int:
        """Begin a round after a look at those that were started. The caller holds the lock."""
        self.started = [handle for handle in self.started if not handle.done]
        self._counter.open(GATE_STARTED)
        status = round_.run(how, x)
        if self.started:
            self._counter.close(GATE_STARTED)
        return status

    def finished(self, handle: Handle[Any]) -> None:
        """Take note that a caller has waited for what was started. It holds the lock."""
        if handle in self.started:
            self.started.remove(handle)
            if not self.started:
                self._counter.open(GATE_STARTED)

    def hand_over(self) -> None:
        """Let the engine run what was started: other operations may have to wait for it."""
        with self._counter:
            left, self.started = self.started, []
            self._counter.open(GATE_STARTED)
            for handle in left:
                if not handle.done:
                    handle.hand_over()
