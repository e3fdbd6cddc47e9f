"""Calls of the ranks of a node, and the protocol in Python: the dialect of NumPy vectors."""

import bisect
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
    AREAS, AREA_WORDS, CALL_ADDRESS, CALL_AREA, CALL_BARRIERS, CALL_BASES, CALL_CLOCK, CALL_COUNT,
    CALL_COUNTER, CALL_DIGEST, CALL_DIVISOR, CALL_FIRST, CALL_HALF, CALL_HEADER, CALL_IDENTITY,
    CALL_IS_OPERATION, CALL_ITEMSIZE, CALL_KIND, CALL_LAST, CALL_LENGTH, CALL_NOTE, CALL_PHASE,
    CALL_POLLS, CALL_RANK, CALL_RANKS, CALL_REDUCE_LENGTH, CALL_REDUCE_START, CALL_SEQUENCE,
    CALL_SPINS, CALL_STAGE, CALL_VECTOR, CALL_WIDTH, CALL_WRITE_LENGTH, CALL_WRITE_START,
    CALL_YIELDS, COUNTER_CALLS, COUNTER_NANOSECONDS, DONE, FALLBACK, IDLE, PIECES, POLL,
    PUBLISH, READS, RESUME, ROWS, SLOTS, WINDOWS, WRITING, call_words)
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


class _Operands:
    """The objects with which Python runs a call, in place of addresses.

    Attributes:
        x, slots: Vector and all ranks' slots of the current operation.
        written: Part of this rank's slot to write.
        combined: Function that reduces all slots.
        views: Values of `slots`, `written` and `combined` for each area.
    """

    def __init__(self, memory: NodeMemory, dtype: "np.dtype[Any]", combine: Any) -> None:
        self.memory, self.dtype, self.combine = memory, dtype, combine
        self.segments, self.header = list[Any](memory.words), b""
        self.x: Any = None
        self.slots: Sequence[Array] = ()
        self.written: Array | None = None
        self.combined: Any = None
        self.views: list[_Views | None] = [None] * AREAS


class NodeCall:
    """A call that the ranks of a node make, once or many times.

    It is a part of an operation, unless `make_operation` makes it a complete one. For its kind, see
    layout. Its `combine` is None if nothing is reduced.

    Attributes:
        words: Words of the call, see layout: an array for compiled code, or, for Python, a list
            with objects instead of addresses. Python reads a list in a third of the time.
        code: Compiled code of the call; None if Python runs it.
        is_short: If true, the code may begin with Python's lock held. Then `begin(address,
            data_address(x))` does the same as `run(BEGIN, x)` in less time; continue with `run` if
            the status is not DONE.
    """

    def __init__(self, memory: NodeMemory, dtype: "np.dtype[Any]", n: int, kind: int,
                 combine: Any) -> None:
        self.memory, self.dtype = memory, dtype
        self.words: Any = [0] * call_words(len(memory.ranks))
        self._compiled_words: Any = None
        self.operands = _Operands(memory, dtype, combine)
        self.code: Code | None = None
        self.is_short, self.address = False, 0
        self.call: Any = None
        self.op = ""
        self._find: Find | None = None
        self[CALL_RANKS], self[CALL_RANK] = len(memory.ranks), memory.rank
        self[CALL_KIND], self[CALL_LENGTH], self[CALL_POLLS] = kind, n, 1
        self[CALL_LAST] = int(kind == WINDOWS)
        self[CALL_SPINS], self[CALL_YIELDS] = memory.patience.spins, memory.patience.yields
        self._set_objects()

    def _set_objects(self) -> None:
        words, segments = self.words, self.operands.segments
        words[CALL_ADDRESS], words[CALL_COUNTER] = self.operands, self.memory.counter
        words[CALL_CLOCK] = time.CLOCK_MONOTONIC
        words[CALL_BASES:CALL_BASES + len(segments)] = segments

    def __getitem__(self, word: int) -> Any:
        return self.words[word]

    def __setitem__(self, word: int, value: int) -> None:
        self.words[word] = value

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
        self[CALL_IS_OPERATION], self._find, self.op = 1, find, op
        self[CALL_NOTE], self[CALL_NOTE + 1], self[CALL_BARRIERS] = *note, barriers
        self.compile(code, self[CALL_RANKS] if op == "mean" else 1)

    def rename(self, call: Any, identity: int) -> None:
        """Let ranks compare another call; see `make_operation`. No run may be in progress."""
        self.call, self.operands.header = call, call.header
        self[CALL_IDENTITY], self[CALL_DIGEST] = identity, call.digest
        if self._compiled_words is not None:
            self[CALL_HEADER] = data_address(np.frombuffer(call.header, np.uint8))

    def compile(self, code: Code | None, divisor: int) -> None:
        """Use compiled code, if there is any, to run the call; `divisor` is the divisor of sums."""
        self.code = code
        if code is None:
            return
        header = self.operands.header
        self.words = self._compiled_words = array("q", [
            word if isinstance(word, int) else 0 for word in self.words])
        self[CALL_ITEMSIZE] = self.dtype.itemsize
        self[CALL_DIVISOR] = divisor
        self[CALL_SPINS] = self.memory.patience.compiled_spins
        if self[CALL_KIND] >= PIECES:
            self[CALL_POLLS] = waiting.PIECE_POLLS
        self[CALL_COUNTER] = self.memory.counter.buffer_info()[0]
        if header:
            self[CALL_HEADER] = data_address(np.frombuffer(header, np.uint8))
        self[CALL_ADDRESS] = self.address = self._compiled_words.buffer_info()[0]
        self[CALL_CLOCK] = self.address + 8 * (CALL_CLOCK + 1)
        for rank, segment in enumerate(self.memory.segments):
            self[CALL_BASES + rank] = data_address(segment)
        self.begin: Callable[[int, int], int] = code.call_with_lock
        self.is_short = self[CALL_LENGTH] * self.dtype.itemsize <= _WITH_LOCK_BYTES

    def join(self, sequence: int, count: int, x: Any) -> None:
        """Begin as a part of operation number `sequence`, after its barrier number `count`."""
        self[CALL_SEQUENCE], self[CALL_COUNT] = sequence, count
        self[CALL_AREA] = sequence % AREAS * AREA_WORDS
        self[CALL_STAGE], self[CALL_PHASE] = WRITING, self[CALL_FIRST]
        if self.code is None:
            _bind(self.words, x)
        else:
            self[CALL_VECTOR] = data_address(x)

    def run(self, mode: int, x: Array) -> int:
        """Run the call as far as possible, in a mode of layout; return its status.

        Add HELD to BEGIN when holding the counter's lock.
        """
        code = self.code
        if code is None or self.words is not self._compiled_words:
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
        status: int = run_plain(self.words, mode, x)
        if self.words[CALL_STAGE] == IDLE:
            # A call that is kept must not keep the array alive.
            self.operands.x = None
            if self.code is not None:
                # The next run uses compiled code again.
                self.words = self._compiled_words
                self.words[CALL_STAGE] = IDLE
        return status

    def _fall_back(self, mode: int, x: Array) -> int:
        """Continue in Python, or with the current positions of the vectors."""
        mode = POLL if mode == POLL else RESUME
        if self[CALL_KIND] == PIECES:
            return FALLBACK
        if self._find is None:
            self.words = list(self._compiled_words)
            self._set_objects()
            _bind(self.words, x)
            return self._run_in_python(mode, x)
        notes = self.node().notes(2)
        addresses = [data_address(vector) for vector in self._find(notes, x) or ()]
        # Only NumPy can add vectors at unaligned addresses.
        if not addresses or any(a % x.itemsize for a in addresses):
            return FALLBACK
        ranks = self[CALL_RANKS]
        first = CALL_BASES + ranks
        for rank, (address, (window, offset)) in enumerate(zip(addresses, notes)):
            self[first + rank] = address
            self[first + ranks + 2 * rank], self[first + ranks + 2 * rank + 1] = window, offset
        return self.run(mode, x)

    @property
    def by_slices(self) -> bool:
        """Whether each rank reduces one slice of the vectors, or of each piece of them."""
        return bool(self[CALL_KIND] >= WINDOWS)

    def node(self) -> SharedNode:
        """Return the node of the operation, after the first barrier."""
        node = self.memory.node(
            self[CALL_SEQUENCE], self.operands.header, self[CALL_DIGEST])
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
    ranges = [(CALL_WRITE_START, plan.writes), (CALL_REDUCE_START, plan.reduces or slice(0, 0))]
    first = CALL_BASES + 2 * len(memory.ranks)
    ranges += [(first + 2 * rank, part) for rank, part in enumerate(plan.reads)]
    # The length of a range is in the word after its start.
    for word, part in ranges:
        call[word], call[word + 1] = part.start, part.stop - part.start
    return call


def piece_call(memory: NodeMemory, dtype: "np.dtype[Any]", n: int, piece_bytes: int,
               combine: Combine) -> NodeCall:
    """Return a call that reduces private vectors, in pieces of at most `piece_bytes` bytes."""
    p, half = len(memory.ranks), memory.slots(0, dtype, None)[0].size // 2
    longest = min(half, piece_bytes // dtype.itemsize) // p
    # Pieces use the halves of a slot alternately: one is read while the next is written.
    width = -(-n // max(1, -(-n // (longest * p)) * p))
    call = NodeCall(memory, dtype, n, PIECES, combine)
    call[CALL_LAST] = 1 - (-n // max(1, width * p))
    call[CALL_WIDTH], call[CALL_HALF] = width, half
    return call


def piece_part(memory: NodeMemory, x: Array, piece_bytes: int, combine: Combine) -> NodeCall:
    """Return a `piece_call` that is a part of an operation, compiled if possible."""
    call = piece_call(memory, x.dtype, x.size, piece_bytes, combine)
    call[CALL_FIRST] = 1
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
    call[CALL_WIDTH], call[CALL_HALF] = width, half
    call[CALL_LAST] = max(0, -(-max(map(len, parts)) // width) - 1)
    code = _code_for(memory, parts, combine)
    starts = vector.starts if code is None else [
        (data_address(part) - data_address(parts[0])) // dtype.itemsize for part in parts]
    first = CALL_BASES + 2 * p
    for rank, part in enumerate(parts):
        call[first + 2 * rank], call[first + 2 * rank + 1] = starts[rank], len(part)
    call.compile(code, int(combine.divisor))
    return call, vector if code is None else parts[0]


# The dialect. In it, a call is the list of its words.

def _bind(words: Any, vector: Any) -> None:
    operands, area = words[CALL_ADDRESS], words[CALL_SEQUENCE] % AREAS
    views = operands.views[area]
    if views is None:
        views = operands.views[area] = _views(
            words, operands.memory.slots(area, operands.dtype, None))
    operands.x = vector
    operands.slots, operands.written, operands.combined = views


def _views(words: Any, slots: Sequence[Array]) -> _Views:
    """Return the objects with which Python works in an area, given all ranks' slots there."""
    combined, written = None, None
    if words[CALL_KIND] == SLOTS:
        part = slice(words[CALL_REDUCE_START], words[CALL_REDUCE_START] + words[CALL_REDUCE_LENGTH])
        combined = _reducer(words[CALL_ADDRESS].combine, [slot[part] for slot in slots])
    if words[CALL_KIND] <= SLOTS:
        start = words[CALL_WRITE_START]
        written = slots[words[CALL_RANK]][start:start + words[CALL_WRITE_LENGTH]]
    return slots, written, combined


def _all_arrived(words: Any, flag: int, value: int) -> bool:
    operands = words[CALL_ADDRESS]
    for segment in operands.segments:
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


def _write_header(words: Any) -> None:
    operands = words[CALL_ADDRESS]
    operands.memory.write_header(words[CALL_AREA], operands.header)


def _write(words: Any, at: int, start: int, n: int) -> None:
    operands = words[CALL_ADDRESS]
    x = operands.x
    if operands.written is not None and n == x.size:
        np.copyto(operands.written, x)
    elif n > 0:
        np.copyto(operands.slots[words[CALL_RANK]][at:at + n], x[start:start + n])


def _read(words: Any, rank: int, at: int, start: int, n: int) -> None:
    if n > 0:
        operands = words[CALL_ADDRESS]
        np.copyto(operands.x[start:start + n], operands.slots[rank][at:at + n])


def _write_back(words: Any, rank: int, at: int, start: int, n: int) -> None:
    if n > 0:
        operands = words[CALL_ADDRESS]
        np.copyto(operands.slots[rank][at:at + n], operands.x[start:start + n])


def _reduce(words: Any, at: int, start: int, n: int) -> None:
    operands, kind = words[CALL_ADDRESS], words[CALL_KIND]
    x = operands.x
    if kind == SLOTS:
        if n > 0:
            operands.combined(x if n == x.size else x[start:start + n])
    elif n > 0:
        sources = [slot[at:at + n] for slot in operands.slots]
        sources[words[CALL_RANK]] = out = x[start:start + n]
        # Only slots of PIECES are read again.
        operands.combine.combine(sources, *(sources if kind == PIECES else [out]))


def _count(words: Any, ns: int) -> int:
    counter = words[CALL_COUNTER]
    calls: int = counter[COUNTER_CALLS]
    counter[COUNTER_NANOSECONDS] += ns
    counter[COUNTER_CALLS] = calls + 1
    return calls


run_plain = protocol(SimpleNamespace(
    form=0, inlined=lambda function: function, counter=operator.itemgetter(CALL_COUNTER),
    bind=_bind, load=operator.getitem, all_arrived=_all_arrived, store=operator.setitem,
    publish=_publish if REORDERS else operator.setitem,
    write_header=_write_header, write=_write, read=_read, write_back=_write_back, reduce=_reduce,
    relax=_relax, give_way=waiting.give_way, now=time.clock_gettime_ns, count=_count))
