"""Calls of the ranks of a node, and the protocol in Python: the dialect of NumPy vectors."""

import bisect
import ctypes
import functools
import itertools
import operator
import time
from array import array
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from ..jit.cache import Code
from ..memory.arrays import Array, bounds_of, data_address, dtype_name
from ..memory.reduction import Combine, Reduction
from . import compiled, waiting
from .layout import (
    AREAS, AREA_WORDS, CALL_ARRAYS, CALL_CONSTANTS, CALL_VARIABLES, DONE, FALLBACK, IDLE, PIECES,
    POLL, PUBLISH, READS, RESUME, ROWS, SLOTS, WINDOWS, WRITING, fields)
from .node_memory import REORDERS, NodeMemory, SharedNode
from .protocol import protocol

# Python's lock is released for longer vectors.
_WITH_LOCK_BYTES = 64 << 10

# Function of the notes of all ranks of the node, and of this rank's vector: it returns all ranks'
# vectors if they are in one window.
Find = Callable[[Sequence[tuple[int, ...]], Array], Sequence[Array] | None]


# For an area: all slots, the part of this rank's slot to write, and a function that reduces the
# slots.
_Views = tuple[Sequence[Array], Array | None, Any]


class NodeCall(ctypes.Structure):
    """A call that the ranks of a node make, once or many times.

    It is a part of an operation, unless `make_operation` makes it a complete one. Its `combine` is
    None if nothing is reduced. For the other names, see layout. The variables are in a structure,
    which both dialects use. The constants are attributes; `compile` copies them to the structure.

    Attributes:
        code: Compiled code of the call; None if Python runs it.
        is_short: If true, the code may begin with Python's lock held. Then `begin(address,
            data_address(x))` does the same as `run(BEGIN, x)` in less time; continue with `run` if
            the status is not DONE.
        x, slots: Vector and all ranks' slots of the current operation, for Python.
        written: Part of this rank's slot to write.
        combined: Function that reduces all slots.
        views: Values of `slots`, `written` and `combined` for each area.
    """

    _fields_ = fields(CALL_VARIABLES, CALL_CONSTANTS + CALL_ARRAYS)
    __slots__ = (
        *CALL_CONSTANTS, *CALL_ARRAYS, "memory", "dtype", "combine", "call", "header", "op", "code",
        "begin", "address", "is_short", "_find", "x", "slots", "written", "combined", "views")

    def __init__(self, memory: NodeMemory, dtype: "np.dtype[Any]", n: int, kind: int,
                 combine: Any) -> None:
        self.memory, self.dtype, self.combine = memory, dtype, combine
        self.counter, self.ranks, self.rank = memory.counter, len(memory.ranks), memory.rank
        self.kind, self.length, self.itemsize = kind, n, dtype.itemsize
        self.spins, self.yields = memory.patience.spins, memory.patience.yields
        self.polls = self.divisor = self.barriers = 1
        self.is_operation = self.window = self.offset = self.width = self.half = 0
        self.first, self.last = 0, int(kind == WINDOWS)
        self.write_start = self.write_length = self.reduce_start = self.reduce_length = 0
        self.segments = memory.words
        self.vectors, self.windows, self.offsets, self.starts, self.lengths = (
            [0] * self.ranks for _ in range(5))
        self.call: Any = None
        self.header, self.op, self.address, self.is_short = b"", "", 0, False
        self.code: Code | None = None
        self._find: Find | None = None
        self.x: Any = None
        self.slots: Sequence[Array] = ()
        self.written: Array | None = None
        self.combined: Any = None
        self.views: list[_Views | None] = [None] * AREAS

    def make_operation(self, call: Any, identity: int, op: str, code: Code | None, *,
                       note: tuple[int, int] = (0, 0), barriers: int = 1,
                       find: Find | None = None) -> None:
        """Make the call a complete operation.

        Args:
            identity: Number of the call, see OperationCounter.identity_of.
            op: Name of the op; "" if nothing is reduced.
            note: Position of this rank's vector for the other ranks; it never changes.
            barriers: Number of barriers at which this rank arrives when its vector is in its slot.
            find: Function that finds all ranks' vectors, for WINDOWS, which needs compiled code.
        """
        self.rename(call, identity)
        self.op, self.is_operation, self._find = op, 1, find
        (self.window, self.offset), self.barriers = note, barriers
        self.compile(code, self.ranks if op == "mean" else 1)

    def rename(self, call: Any, identity: int) -> None:
        """Let ranks compare another call; see `make_operation`. No run may be in progress."""
        self.call, self.identity, self.digest = call, identity, call.digest
        self.header = call.header
        self.header_address = data_address(np.frombuffer(self.header, np.uint8))

    def compile(self, code: Code | None, divisor: int) -> None:
        """Use compiled code, if there is any, to run the call; `divisor` is the divisor of sums."""
        self.code = code
        if code is None:
            return
        self.divisor, self.spins = divisor, self.memory.patience.compiled_spins
        if self.kind >= PIECES:
            self.polls = waiting.PIECE_POLLS
        constants = {name: getattr(self, name) for name in CALL_CONSTANTS}
        constants["counter"] = ctypes.addressof(self.counter)
        constants["segments"] = self.memory.addresses.buffer_info()[0]
        for name in CALL_ARRAYS[1:]:
            words = array("q", getattr(self, name))
            setattr(self, name, words)
            constants[name] = words.buffer_info()[0]
        self.constants[:] = [*constants.values()]
        self.address = ctypes.addressof(self)
        self.begin: Callable[[int, int], int] = code.call_with_lock
        self.is_short = self.length * self.itemsize <= _WITH_LOCK_BYTES

    def join(self, sequence: int, count: int, x: Any) -> None:
        """Begin as a part of operation number `sequence`, after its barrier number `count`."""
        self.sequence, self.count, self.area = sequence, count, sequence % AREAS * AREA_WORDS
        self.stage, self.phase = WRITING, self.first
        if self.code is None:
            _bind(self, x)
        else:
            self.vector = data_address(x)

    def run(self, mode: int, x: Array) -> int:
        """Run the call as far as possible, in a mode of layout; return its status.

        Add HELD to BEGIN when holding the counter's lock.
        """
        code = self.code
        if code is None:
            return self._run_in_python(mode, x)
        if mode == RESUME or mode == POLL and not self.is_short:
            status = code.call(self.address + mode, 0)
        elif self.is_short or mode & 3 == PUBLISH or mode == POLL:
            status = code.call_with_lock(self.address + mode, data_address(x))
        else:
            # Hold Python's lock while the call gets its number; release it while ranks may be late.
            status = code.call_with_lock(self.address + mode + PUBLISH, data_address(x))
            if status == DONE:
                status = code.call(self.address + RESUME, 0)
        return self._fall_back(mode, x) if status == FALLBACK else status

    def _run_in_python(self, mode: int, x: Array) -> int:
        status: int = run_plain(self, mode, x)
        if self.stage == IDLE:
            # A call that is kept must not keep the array alive.
            self.x = None
        return status

    def _fall_back(self, mode: int, x: Array) -> int:
        """Continue in Python, or with the current positions of the vectors."""
        mode = POLL if mode == POLL else RESUME
        if self.kind == PIECES:
            return FALLBACK
        if self._find is None:
            # All ranks have arrived, so this run completes the call.
            _bind(self, x)
            return self._run_in_python(mode, x)
        notes = self.node().notes(2)
        addresses = [data_address(vector) for vector in self._find(notes, x) or ()]
        # Only NumPy can add vectors at unaligned addresses.
        if not addresses or any(a % x.itemsize for a in addresses):
            return FALLBACK
        for rank, (address, (window, offset)) in enumerate(zip(addresses, notes)):
            self.vectors[rank], self.windows[rank], self.offsets[rank] = address, window, offset
        return self.run(mode, x)

    @property
    def by_slices(self) -> bool:
        """Whether each rank reduces one slice of the vectors, or of each piece of them."""
        return self.kind >= WINDOWS

    def node(self) -> SharedNode:
        """Return the node of the operation, after the first barrier."""
        node = self.memory.node(self.sequence, self.header, self.digest)
        node.arrival(node.count + 1)
        return node


def _reducer(combine: Any, sources: Sequence[Array]) -> Callable[[Array], None]:
    """Return a function that combines all slots into a vector."""
    if isinstance(combine, Reduction):
        return combine.of(sources)
    return functools.partial(combine.combine, sources)


class SlotPlan(NamedTuple):
    """One rank's part in a collective in which each rank of a node writes once and reads once.

    Data has the same offset in the rank's slot as in its vector.

    Attributes:
        writes: Range of its vector that this rank writes.
        reduces: Range of all ranks' vectors that it reduces; None if nothing is reduced.
        reads: If nothing is reduced, range that it reads of each rank's vector.
    """

    writes: slice
    reduces: slice | None
    reads: Sequence[slice] = ()


def slot_plan(kind: str, n: int, rank: int, ranks: int, root: int = 0,
              bounds: Sequence[int] | None = None) -> SlotPlan:
    """Return the ranges that a rank writes and reads in a short collective.

    The kind is "allreduce", "reduce_scatter", "allgather", "broadcast" or "barrier". Ranks are
    numbered within the node. By default, `bounds` are those of equal slices.
    """
    everything, nothing = slice(0, n), slice(0, 0)
    if kind == "allreduce":
        return SlotPlan(everything, everything)
    if kind == "broadcast":
        return SlotPlan(everything if rank == root else nothing, None, [
            everything if r == root != rank else nothing for r in range(ranks)])
    bounds = bounds or bounds_of(n, ranks)
    slices = [slice(*pair) for pair in zip(bounds, bounds[1:])]
    if kind == "reduce_scatter":
        return SlotPlan(slice(bounds[0], bounds[-1]), slices[rank])
    # A barrier is an allgather of nothing.
    rank_slice, slices[rank] = slices[rank], nothing
    return SlotPlan(rank_slice, None, slices)


def slot_call(memory: NodeMemory, dtype: "np.dtype[Any]", n: int, plan: SlotPlan,
              combine: Combine | None = None) -> NodeCall:
    """Return a call in which each rank writes once to its slot, and reads once."""
    call = NodeCall(memory, dtype, n, READS if plan.reduces is None else SLOTS, combine)
    writes, reduces = plan.writes, plan.reduces or slice(0, 0)
    call.write_start, call.write_length = writes.start, writes.stop - writes.start
    call.reduce_start, call.reduce_length = reduces.start, reduces.stop - reduces.start
    for rank, part in enumerate(plan.reads):
        call.starts[rank], call.lengths[rank] = part.start, part.stop - part.start
    return call


def piece_call(memory: NodeMemory, dtype: "np.dtype[Any]", n: int, piece_bytes: int,
               combine: Combine) -> NodeCall:
    """Return a call that reduces private vectors, in pieces of at most `piece_bytes` bytes."""
    p, half = len(memory.ranks), memory.slots(0, dtype, None)[0].size // 2
    longest = min(half, piece_bytes // dtype.itemsize) // p
    # Pieces use the halves of a slot alternately: one is read while the next is written.
    width = -(-n // max(1, -(-n // (longest * p)) * p))
    call = NodeCall(memory, dtype, n, PIECES, combine)
    call.last = 1 - (-n // max(1, width * p))
    call.width, call.half = width, half
    return call


def piece_part(memory: NodeMemory, x: Array, piece_bytes: int, combine: Combine) -> NodeCall:
    """Return a `piece_call` that is a part of an operation, compiled if possible."""
    call = piece_call(memory, x.dtype, x.size, piece_bytes, combine)
    call.first = 1
    call.compile(_code_for(memory, [x], combine), int(combine.divisor))
    return call


def _code_for(memory: NodeMemory, parts: Sequence[Any], combine: Combine) -> Code | None:
    """Return compiled code that combines vectors of one dtype; None if only Python can."""
    p, dtype = len(memory.ranks), parts[0].dtype
    # A call's words are whole numbers, and only NumPy can add vectors at unaligned addresses.
    if p == 1 or not memory.segments or not combine.adds or combine.divisor != int(
            combine.divisor) or any(data_address(part) % dtype.itemsize for part in parts):
        return None
    return compiled.code("sum", dtype_name(dtype), p)


class _Parts:
    """Vectors of one dtype in any memory that Python uses as one vector, one after the other."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts
        self.starts = [0, *itertools.accumulate(map(len, parts))]
        self.size = self.starts[-1]

    def __getitem__(self, piece: slice) -> Any:
        part = bisect.bisect_right(self.starts, piece.start) - 1
        start = self.starts[part]
        return self.parts[part][piece.start - start:piece.stop - start]


def rows_call(memory: NodeMemory, parts: Sequence[Any], piece_bytes: int,
              combine: Combine) -> tuple[NodeCall, Any]:
    """Return a part of an operation that reduces part r on rank r, and its vector.

    It is compiled if possible. The parts are contiguous vectors of one dtype in any memory, one per
    rank of the node. Their lengths are the same on all ranks. In a phase, a rank writes
    `piece_bytes`.
    """
    p, dtype, vector = len(memory.ranks), parts[0].dtype, _Parts(parts)
    half = memory.slots(0, dtype, None)[0].size // 2
    width = min(half, piece_bytes // dtype.itemsize) // p
    call = NodeCall(memory, dtype, vector.size, ROWS, combine)
    call.width, call.half = width, half
    call.last = max(0, -(-max(map(len, parts)) // width) - 1)
    code = _code_for(memory, parts, combine)
    call.starts, call.lengths = vector.starts if code is None else [
        (data_address(part) - data_address(parts[0])) // dtype.itemsize for part in parts
    ], list(map(len, parts))
    call.compile(code, int(combine.divisor))
    return call, vector if code is None else parts[0]


# The dialect. Its functions use the attributes of a NodeCall.

def _bind(call: Any, vector: Any) -> None:
    area = call.sequence % AREAS
    views = call.views[area]
    if views is None:
        views = call.views[area] = _views(call, call.memory.slots(area, call.dtype, None))
    call.x = vector
    call.slots, call.written, call.combined = views


def _views(call: Any, slots: Sequence[Array]) -> _Views:
    """Return the objects with which Python works in an area, given all ranks' slots there."""
    combined, written = None, None
    if call.kind == SLOTS:
        part = slice(call.reduce_start, call.reduce_start + call.reduce_length)
        combined = _reducer(call.combine, [slot[part] for slot in slots])
    if call.kind <= SLOTS:
        written = slots[call.rank][call.write_start:call.write_start + call.write_length]
    return slots, written, combined


def _all_arrived(call: Any, value: int) -> bool:
    flag = call.area
    for segment in call.segments:
        if segment[flag] < value:
            return False
    if REORDERS:
        NodeMemory.fence()
    return True


def _publish(segment: Any, word: int, value: int) -> None:
    NodeMemory.fence()
    segment[word] = value


def _relax() -> None:
    """Do nothing between two checks, because a check takes Python long enough."""


def _write_header(call: Any) -> None:
    call.memory.write_header(call.area, call.header)


def _write(call: Any, at: int, start: int, n: int) -> None:
    x = call.x
    if call.written is not None and n == x.size:
        np.copyto(call.written, x)
    elif n > 0:
        np.copyto(call.slots[call.rank][at:at + n], x[start:start + n])


def _read(call: Any, rank: int, at: int, start: int, n: int) -> None:
    if n > 0:
        np.copyto(call.x[start:start + n], call.slots[rank][at:at + n])


def _write_back(call: Any, rank: int, at: int, start: int, n: int) -> None:
    if n > 0:
        np.copyto(call.slots[rank][at:at + n], call.x[start:start + n])


def _reduce(call: Any, at: int, start: int, n: int) -> None:
    kind, x = call.kind, call.x
    if kind == SLOTS:
        if n > 0:
            call.combined(x if n == x.size else x[start:start + n])
    elif n > 0:
        sources = [slot[at:at + n] for slot in call.slots]
        sources[call.rank] = out = x[start:start + n]
        # Only slots of PIECES are read again.
        call.combine.combine(sources, *(sources if kind == PIECES else [out]))


def _count(call: Any, ns: int) -> int:
    counter = call.counter
    calls: int = counter.fast_calls
    counter.fast_ns += ns
    counter.fast_calls = calls + 1
    return calls


run_plain = protocol(SimpleNamespace(
    form=0, inlined=lambda function: function, counter=operator.attrgetter("counter"), bind=_bind,
    load=operator.getitem, all_arrived=_all_arrived, store=operator.setitem,
    publish=_publish if REORDERS else operator.setitem,
    write_header=_write_header, write=_write, read=_read, write_back=_write_back, reduce=_reduce,
    relax=_relax, give_way=waiting.give_way, now=time.monotonic_ns, count=_count))
