"""Collectives that are prepared once and run many times."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ..memory.arrays import data_address, dtype_name
from ..memory.reduction import reduction
from ..operations.agreement import Call
from ..operations.collectives import Build, Collectives, returning
from ..record.flight import Flight
from ..transport import compiled
from ..transport.base import Schedule, T
from ..transport.layout import AREAS, BEGIN, DONE, GATED, IN_SLOT, NOWHERE, WINDOWS
from ..transport.node_call import NodeCall, piece_call, slot_call, slot_plan
from ..transport.node_memory import NodeMemory
from .fast_calls import BY_SLICES, BY_SLOTS
from .handle import Handle
from .queued import QueuedOperation

if TYPE_CHECKING:
    from .group import Group

# Function of a result and a schedule that returns the schedule with a result.
Finish = Callable[[T, Schedule[Any]], Schedule[T]]
REDUCING = "allreduce", "reduce_scatter"
# Maximum number of positions in windows of the vectors of equal calls that are kept.
_MAX_POSITIONS = 64
# Maximum number of equal calls that are started at a time.
_MAX_STARTED = AREAS - 1
# Number of barriers at which a rank with its vector in its slot arrives at once, if other ranks
# combine slices.
_BARRIERS = 3


@dataclass(frozen=True)
class Pattern:
    """A collective on vectors of one dtype and length.

    Attributes:
        kind: "allreduce", "reduce_scatter", "allgather", "broadcast" or "barrier".
        option: Op of mpiring, or root; None if there is neither.
        algorithm: Algorithm of an allreduce; "auto" for the fastest.
        bounds: Offsets of the ranks' slices; None if these are equally long.
    """

    kind: str
    option: Any
    dtype: "np.dtype[Any]"
    n: int
    algorithm: str = "auto"
    bounds: Sequence[int] | None = None

    @property
    def op(self) -> str:
        """The op; "" if nothing is reduced."""
        return self.option if self.kind in REDUCING else ""

    def schedule(self, x: Any, collectives: Collectives) -> Schedule[Any]:
        """Return the schedule of the collective on a vector, in any memory."""
        if self.kind == "allreduce":
            return collectives.allreduce(x, op=self.option, algorithm=self.algorithm)
        if self.kind == "reduce_scatter":
            return collectives.reduce_scatter(x, op=self.option, bounds=self.bounds)
        if self.kind == "allgather":
            return collectives.allgather(x, bounds=self.bounds)
        if self.kind == "broadcast":
            return collectives.broadcast(x, self.option)
        return collectives.barrier()


class Prepared:
    """A collective whose arguments are checked: run it any number of times.

    After the first run, node calls run it if possible. Each rank decides this by itself.

    Args:
        call: Call that all ranks make.
        pattern: The collective; None if only `build` describes it.
        build: Function of a vector that returns the function that builds the schedule; by default,
            that of the pattern.
        can_be_fast: If true, vectors are aligned and in host memory, so that node calls can run it.
        queued: The same operation, if it is queued on a GPU.

    Attributes:
        call, pattern: The arguments of the same names.
        adjust: Function that changes the settings of collectives, the same on all ranks; or None.
            Call `forget` after a change.
    """

    def __init__(self, group: "Group", call: Call, pattern: Pattern | None = None,
                 build: Callable[[Any], Build[Any]] | None = None, *,
                 can_be_fast: bool = True, queued: QueuedOperation | None = None) -> None:
        self._group, self.call, self.pattern, self._queued = group, call, pattern, queued
        self._build = build
        self._fast_calls = fast_calls = group.fast_calls
        is_auto = pattern is not None and pattern.algorithm == "auto"
        self._can_be_fast = can_be_fast and is_auto and fast_calls.memory is not None
        self._tunes = is_auto and cast(Pattern, pattern).kind == "allreduce"
        self.adjust: Callable[[Collectives], None] | None = None
        self.forget()
        if self._can_be_fast:
            fast_calls.prepared.add(self)

    def named(self, name: str) -> "Prepared":
        """Return another object for the same collective, whose name ranks also compare."""
        return Prepared(self._group, self._call_named(name), self.pattern,
                        can_be_fast=self._can_be_fast)

    def _call_named(self, name: str) -> Call:
        return replace(self.call, detail=f"{self.call.detail}, {name}")

    def __repr__(self) -> str:
        return str(self.call)

    def forget(self) -> None:
        """Forget the node calls, after which the next run is an ordinary one."""
        self._is_ready = self._by_slices = self._can_start = False
        # The node call that runs to its end: one, or one for each position of the vector.
        self.node_call: NodeCall | None = None
        self._at_positions: dict[tuple[int, int], NodeCall] = {}
        # The node calls that are started. Each is in use until its handle is complete.
        self._started: list[NodeCall] = []

    def run(self, x: Any, call: Call | None = None, costs: list[Flight] | None = None) -> None:
        """Run it on the vector `x`, ahead of operations in the background. Collective, blocking.

        The ranks compare `call`, if it is given. The record of the run is appended to `costs`.
        """
        node_call = self.node_call or self.node_call_at(x)
        if node_call is None and self._queued is not None:
            handle = self._queued.start(call or self.call, None)
            handle.wait()
            if costs is not None:
                costs.append(handle.flight)
            return
        if node_call is None:
            self._run_ordinarily(x, call, costs)
            return
        if call is not None:
            self._rename(node_call, call)
        began_s = 0.0 if costs is None else time.monotonic()
        try:
            status = GATED
            if node_call.is_short:
                # This does the same as node_call.run, in a third of the time.
                status = node_call.begin(node_call.address, data_address(x))
            elif node_call.code is not None:
                status = node_call.run(BEGIN, x)
            if status != DONE and not self._fast_calls.finish(node_call, x, status):
                self._run_ordinarily(x, call, costs)
            elif costs is not None:
                now_s = time.monotonic()
                costs.append(Flight(node_call.call, 0, "", "", began_s, began_s, now_s,
                                    now_s - began_s))
        except BaseException as error:
            self._fast_calls.fail(node_call, error)
            raise

    def start(self, x: Any, result: T, call: Call | None = None,
              finish: Finish[T] = returning) -> Handle[T]:
        """Start it on the vector `x`; return a handle whose `wait` returns `result`. Collective.

        The ranks compare `call`, if it is given. With another function `finish` than `returning`,
        the operation has a schedule, and `wait` returns its result.
        """
        if self._queued is not None:
            return self._queued.start(call or self.call, result)
        node_call = self._idle_node_call() if finish is returning else None
        if node_call is not None:
            if call is not None:
                self._rename(node_call, call)
            handle = self._fast_calls.start(node_call, x, result)
            if handle is not None:
                return handle
        build, call = self._adjusted(x), call or self.call
        if self._tunes:
            self._group.tune_before(call, waits=False)
        ordinary = self._group.submit(
            call, lambda collectives: finish(result, build(collectives)))
        self.make_ready()
        return ordinary

    def _run_ordinarily(self, x: Any, call: Call | None, costs: list[Flight] | None) -> None:
        build, call = self._adjusted(x), call or self.call
        if self._tunes:
            self._group.tune_before(call, waits=True)
        self._group.run(call, build, costs=costs)
        self.make_ready()

    def _adjusted(self, x: Any) -> Build[Any]:
        if self._build is not None:
            build = self._build(x)
        else:
            build = self._group.gpus.for_vector(x, cast(Pattern, self.pattern).schedule)

        def adjusted(collectives: Collectives) -> Schedule[Any]:
            self._adjust(collectives)
            return build(collectives)

        return build if self.adjust is None else adjusted

    def _adjust(self, collectives: Collectives) -> Collectives:
        if self.adjust is not None:
            self.adjust(collectives)
        return collectives

    # Node calls

    def make_ready(self) -> None:
        """Make the next run a fast call, if possible. Not collective, not blocking."""
        if not self._can_be_fast or self._is_ready:
            return
        pattern = cast(Pattern, self.pattern)
        self._is_ready, code = True, self._code
        collectives, x = self._adjust(self._group.collectives()), _like(pattern)
        by_slices = pattern.kind == "allreduce" and (
            collectives.algorithm_of(x, pattern.op).name == BY_SLICES)
        if collectives.is_eager(pattern.kind, x, pattern.op):
            self.node_call, self._can_start = self._slot_call(), True
        else:
            self._by_slices = by_slices and code is not None
            self._can_start = by_slices and collectives.fits_slots(x)
        if pattern.op:
            self._group.engine.compiler.want(self._fast_calls, pattern.op, dtype_name(x.dtype))
        if self._code is not code:
            # Another thread has loaded code after this method looked for it.
            self.forget()

    @property
    def _code(self) -> Any:
        """The compiled code that node calls use; None if there is none, or it is turned off."""
        pattern, memory = self._places
        if self._group.config.rounds != "auto":
            return None
        return compiled.code(pattern.op, dtype_name(pattern.dtype), len(memory.ranks))

    @property
    def _places(self) -> tuple[Pattern, NodeMemory]:
        return cast(Pattern, self.pattern), cast(NodeMemory, self._fast_calls.memory)

    def node_call_at(self, x: Any) -> NodeCall | None:
        """Return the node call that runs it on a vector, which may depend on the position."""
        if not self._by_slices:
            return self.node_call
        position = self._group.windows.position_of(x)
        node_call = self._at_positions.get(position)
        if node_call is None:
            if len(self._at_positions) >= _MAX_POSITIONS:
                self._at_positions.clear()
            node_call = self._at_positions[position] = self._slices_call(position)
        return node_call

    def _idle_node_call(self) -> NodeCall | None:
        """Return a node call to start, which no handle uses; None if an ordinary one must run."""
        if not self._can_start:
            return None
        for node_call in self._started:
            if not node_call.stage:
                return node_call
        if len(self._started) == _MAX_STARTED:
            return None
        # If other ranks combine slices, this rank's vector is in its slot.
        self._started.append(self._slot_call(**{} if self.node_call is not None else {
            "note": IN_SLOT, "barriers": _BARRIERS}))
        return self._started[-1]

    def _slot_call(self, **settings: Any) -> NodeCall:
        """Return a node call in which each rank writes to its slot once, and reads once."""
        pattern, memory = self._places
        combine = reduction(pattern.op, pattern.dtype, len(memory.ranks)) if pattern.op else None
        plan = slot_plan(pattern.kind, pattern.n, memory.rank, len(memory.ranks),
                         pattern.option if pattern.kind == "broadcast" else 0, pattern.bounds)
        node_call = slot_call(memory, pattern.dtype, pattern.n, plan, combine)
        return self._operation(node_call, BY_SLOTS if pattern.kind == "allreduce" else "",
                               **settings)

    def _slices_call(self, position: tuple[int, int]) -> NodeCall:
        """Return a node call in which each rank combines a slice of long vectors.

        A vector in a window is always at this position.
        """
        pattern, memory = self._places
        combine = reduction(pattern.op, pattern.dtype, len(memory.ranks))
        if position == NOWHERE:
            staged_bytes = self._adjust(self._group.collectives()).tuning.staged_bytes
            node_call = piece_call(memory, pattern.dtype, pattern.n, staged_bytes, combine)
        else:
            node_call = NodeCall(memory, pattern.dtype, pattern.n, WINDOWS, combine)
        return self._operation(node_call, BY_SLICES, note=position,
                               find=self._group.windows.vectors)

    def _operation(self, node_call: NodeCall, algorithm: str, **settings: Any) -> NodeCall:
        identity = self._group.sharing.counter.identity_of(self.call, algorithm)
        node_call.make_operation(self.call, identity, self._places[0].op, self._code,
                                 **settings)
        return node_call

    def _rename(self, node_call: NodeCall, call: Call) -> None:
        """Let ranks compare another call from now on."""
        algorithm = "" if not node_call.op else BY_SLICES if node_call.by_slices else BY_SLOTS
        identity = self._group.sharing.counter.identity_of(call, algorithm, once=True)
        node_call.rename(call, identity)


def _like(pattern: Pattern) -> Any:
    """Return a vector of a pattern, which takes up no memory."""
    return np.broadcast_to(np.empty((), pattern.dtype), (pattern.n,))
