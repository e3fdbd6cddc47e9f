"""Runs an operation of a node's ranks as one straight function: a round, see layout."""

import os
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..memory.arrays import data_address, dtype_name
from ..memory.reduction import reduction
from . import compiled_rounds
from .base import HEADER_BYTES, Array
from .layout import (
    AREAS, AREA_WORDS, BEGIN, BEGUN, COUNT_BITS, DIGEST_WORD, DISAGREE, DONE, ENDED, FORM_WORD,
    GATED, GO_ON, HEADER_WORD, LATE, LEDGER_GATE, LEDGER_NANOSECONDS, LEDGER_RING, LEDGER_ROUNDS,
    LEDGER_SEQUENCE, LEDGER_WRITTEN, LOOK, NOTE_WORD, NOTE_WORDS, NOTHING, OTHERWISE, PUBLISH,
    PUBLISHED, RING, RING_WORDS, ROUND_BARRIERS, ROUND_BASES, ROUND_BEGAN, ROUND_COMBINES,
    ROUND_DIGEST, ROUND_DIVISOR, ROUND_HEADER, ROUND_IDENTITY, ROUND_IN_PLACE, ROUND_LAYS,
    ROUND_LEDGER, ROUND_LENGTH, ROUND_NBYTES, ROUND_NOTE, ROUND_RANK, ROUND_RANKS, ROUND_SEQUENCE,
    ROUND_SPINS, ROUND_STAGE, ROUND_TAKES, ROUND_VECTOR, ROUND_YIELDS, round_words)
from .moves import Moves
from .node_memory import REORDERS, NodeMemory, SharedNode

# Given how (BEGIN, …) and the vector: runs a round as far as it goes, and returns DONE, LATE, …
Run = Callable[[int, Array], int]

# How often Python looks at a meeting, by how it runs: it keeps the core at first, since most ranks
# come within a few microseconds; then another rank may need it.
_TRIES = {BEGIN: 20, PUBLISH: 20, GO_ON: 300, LOOK: 1}
# How often compiled code does at first, and where ranks share cores.
_SPINS, _SPINS_TOGETHER = 200, 20

# An area is free when the operation AREAS before has ended in it: how far its flag then lies behind
# the count of this one's barriers.
_AHEAD = (AREAS << COUNT_BITS) - ENDED

_clock = time.monotonic_ns
_End = Callable[[Array], None]
_Area = tuple[int, Array, _End, int]
# Given per rank of the node what its note says, and this rank's vector: returns all ranks' vectors
# if they lie in one window.
Find = Callable[[Sequence[tuple[int, ...]], Array], Sequence[Array] | None]

give_way: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))


class Round:
    """A call that the ranks of a node make again and again.

    A collective on vectors that fit into slots; or an allreduce of vectors in windows, in place,
    which takes compiled code.

    Args:
        memory: Where the ranks meet.
        identity: What stands for the call in the ledger.
        header, digest: Of the call, as for NodeMemory.node.
        dtype, n: Of the vectors.
        moves: What this rank lays down, and combines or takes.
        op: Of what is combined; "" where nothing is.
        compiled: Run it in compiled code, if there is some for the op and the dtype.
        note: What this rank tells the others of where its vector is, and always will be.
        barriers: How many it has come to when its vector lies in its slot.
        find: For a round in place: finds all ranks' vectors; `run` may return OTHERWISE then.

    Attributes:
        words: See layout; `round_words` of them.
        memory, header, digest: As above.
        dtype, n, moves, op: As above.
        run: Runs it; see `Run`. May be another one for each operation, and each stage.
        begin: Compiled code that does as `run(BEGIN, x)`, after `bound(x)`, with less to do for
            Python; it may also return OTHERWISE: go on with `run`. None where there is none.
    """

    def __init__(self, memory: NodeMemory, identity: int, header: bytes, digest: int,
                 dtype: "np.dtype[Any]", n: int, moves: Moves, op: str = "", *,
                 compiled: bool, note: tuple[int, int] = (0, 0), barriers: int = 1,
                 find: Find | None = None) -> None:
        ranks = len(memory.ranks)
        self.memory, self.header, self.digest = memory, header, digest
        self.dtype, self.n, self.moves, self.op = dtype, n, moves, op
        self.words = words = array("q", bytes(8 * round_words(ranks)))
        words[ROUND_IDENTITY], words[ROUND_DIGEST] = identity, digest
        words[ROUND_RANKS], words[ROUND_RANK] = ranks, memory.rank
        words[ROUND_DIVISOR], words[ROUND_TAKES] = ranks if op == "mean" else 1, not op
        words[ROUND_NOTE], words[ROUND_NOTE + 1], words[ROUND_BARRIERS] = *note, barriers
        words[ROUND_IN_PLACE], self._find = find is not None, find
        self._move_by_bytes()
        self.run: Run = self._go_on_in_place if find is not None else _Plain(self).run
        code = compiled and compiled_rounds.code(op, dtype_name(dtype), ranks)
        self.begin: Callable[[int], int] | None = None
        if code:
            by_code = compiled_rounds.CompiledRound(self, code, self.run)
            self.run, self.begin = by_code.run, by_code.begin

    @property
    def in_place(self) -> bool:
        """Whether it combines vectors in windows."""
        return self._find is not None

    def node(self) -> SharedNode:
        """Return its meeting place, after the first barrier."""
        node = self.memory.node(self.words[ROUND_SEQUENCE], self.header, self.digest)
        node.arrived(node.count + 1)
        return node

    def _move_by_bytes(self) -> None:
        """Tell compiled code what moves."""
        words, (lays, combines, takes), itemsize = self.words, self.moves, self.dtype.itemsize
        words[ROUND_LAYS], words[ROUND_NBYTES] = _bytes_of(lays, itemsize)
        if combines is not None:
            words[ROUND_COMBINES] = combines.start * itemsize
            words[ROUND_LENGTH] = combines.stop - combines.start
        first = ROUND_BASES + len(self.memory.ranks)
        for rank, part in enumerate(takes):
            words[first + 2 * rank], words[first + 2 * rank + 1] = _bytes_of(part, itemsize)

    def _go_on_in_place(self, how: int, x: Array) -> int:
        """Go on where vectors are not where they were; see `Run`."""
        words, ranks = self.words, len(self.memory.ranks)
        notes = self.node().notes(2)
        vectors = self._find and self._find(notes, x)
        addresses = [data_address(vector) for vector in vectors or ()]
        # At an odd place only NumPy can make sums.
        if self.begin is None or not addresses or any(a % x.itemsize for a in addresses):
            return OTHERWISE
        first = ROUND_BASES + ranks
        for rank, (address, (window, offset)) in enumerate(zip(addresses, notes)):
            words[first + rank] = address
            words[first + ranks + 2 * rank], words[first + ranks + 2 * rank + 1] = window, offset
        return self.run(how, x)

    def bound(self, x: Array) -> int:
        """Let `begin` work on a vector until another one runs; return what to call it with."""
        self.words[ROUND_VECTOR] = data_address(x)
        return self.words.buffer_info()[0] + BEGIN

    def address(self) -> int:
        """Complete the words for compiled code, and return where they lie."""
        words, memory = self.words, self.memory
        words[ROUND_LEDGER] = memory.ledger.buffer_info()[0]
        words[ROUND_HEADER] = np.frombuffer(self.header, np.uint8).ctypes.data
        words[ROUND_SPINS] = _SPINS if _has_cores(len(memory.ranks)) else _SPINS_TOGETHER
        words[ROUND_YIELDS] = _TRIES[GO_ON]
        for rank, segment in enumerate(memory.segments):
            words[ROUND_BASES + rank] = segment.ctypes.data
        return words.buffer_info()[0]


class _Plain:
    """A round in Python.

    Args:
        round_: What it is of.
    """

    __slots__ = ("_words", "_ledger", "_memory", "_everybody", "_others", "_mine", "_header",
                 "_digest", "_identity", "_note", "_barriers", "_areas", "_part")

    def __init__(self, round_: Round) -> None:
        memory = self._memory = round_.memory
        self._words, self._ledger = round_.words, memory.ledger
        self._everybody, self._others = memory.words, memory.others
        self._mine = memory.words[memory.rank]
        self._header, self._digest = round_.header, round_.digest
        self._identity = round_.words[ROUND_IDENTITY]
        self._note = tuple(round_.words[ROUND_NOTE:ROUND_NOTE + 2])
        self._barriers = round_.words[ROUND_BARRIERS]
        # What is laid down; None for all of the vector.
        part = round_.moves.lays
        self._part = None if part == slice(0, round_.n) else part
        # Per area: its flag, where in this rank's slot that lies, what combines or takes all ranks'
        # parts, where its header is noted.
        self._areas: list[_Area] = [
            (area * AREA_WORDS, slots[memory.rank][part], _ending(round_, slots),
             LEDGER_WRITTEN + area)
            for area in range(AREAS) for slots in [memory.slots(area, round_.dtype, round_.n)]]

    def run(self, how: int, x: Array) -> int:
        """Run it; see `Run`."""
        words = self._words
        if how <= PUBLISH:
            ledger = self._ledger
            if words[ROUND_STAGE] or ledger[LEDGER_GATE]:
                return GATED
            # First: who meets an interrupt finds that something has begun.
            words[ROUND_STAGE] = BEGUN
            words[ROUND_BEGAN] = _clock()
            words[ROUND_SEQUENCE] = sequence = ledger[LEDGER_SEQUENCE]
            ledger[LEDGER_SEQUENCE] = sequence + 1
        else:
            sequence = words[ROUND_SEQUENCE]
        area, count = self._areas[sequence % AREAS], (sequence + 1) << COUNT_BITS
        if words[ROUND_STAGE] == BEGUN:
            if not self._publish(how, x, area, count):
                return LATE
            if how == PUBLISH:
                return DONE
        return self._finish(how, x, area, count)

    def _publish(self, how: int, x: Array, area: "_Area", count: int) -> bool:
        """Lay the vector down and arrive; return whether the area was free."""
        flag, slot, _, written = area
        free, mine = count - _AHEAD, self._mine
        if free > ENDED:
            for theirs in self._everybody:
                if theirs[flag] < free and _is_late(self._everybody, flag, free, how):
                    return False
        slot[...] = x if self._part is None else x[self._part]
        mine[flag + DIGEST_WORD] = self._digest
        mine[flag + FORM_WORD] = 0
        if self._barriers > 1:
            # Only then anybody looks at it.
            start = flag + NOTE_WORD + NOTE_WORDS
            mine[start], mine[start + 1] = self._note
        if self._ledger[written] != self._identity:
            self._write_header(flag)
            self._ledger[written] = self._identity
        if REORDERS:
            self._memory.fence()
        mine[flag] = count + self._barriers
        self._words[ROUND_STAGE] = PUBLISHED
        return True

    def _write_header(self, flag: int) -> None:
        start = (flag + HEADER_WORD) * 8
        self._memory.texts[self._memory.rank][start:start + HEADER_BYTES] = self._header

    def _finish(self, how: int, x: Array, area: "_Area", count: int) -> int:
        """Meet the others, combine or take what they have laid down, and leave."""
        flag, _, end, _ = area
        words, others, digest = self._words, self._others, self._digest
        arrived = count + self._barriers
        for theirs in others:
            if theirs[flag] < arrived and _is_late(others, flag, arrived, how):
                return LATE
        if REORDERS:
            self._memory.fence()
        for theirs in others:
            if theirs[flag + DIGEST_WORD] != digest:
                return DISAGREE
        end(x)
        if REORDERS:
            self._memory.fence()
        self._mine[flag] = count | ENDED
        if began_ns := words[ROUND_BEGAN]:
            ended_ns = _clock()
            note(self._ledger, self._identity, words[ROUND_SEQUENCE], began_ns, ended_ns,
                 ended_ns - began_ns)
        # Last: it may begin again in another thread.
        words[ROUND_STAGE] = NOTHING
        return DONE


def _bytes_of(part: slice, itemsize: int) -> tuple[int, int]:
    """Return where a part of a vector begins, and how long it is, in bytes."""
    return part.start * itemsize, (part.stop - part.start) * itemsize


def _ending(round_: Round, slots: Sequence[Array]) -> _End:
    """Return a function that combines all slots into a vector, or takes what is in them."""
    part = round_.moves.combines
    if part is not None:
        sources = [slot[part] for slot in slots]
        combine = reduction(round_.op, round_.dtype, len(slots)).of(sources)
        if not sources[0].size:
            return _nothing
        return combine if sources[0].size == round_.n else lambda x: combine(x[part])
    takes = [(part, slot[part]) for slot, part in zip(slots, round_.moves.takes)
             if part.stop > part.start]

    def take(x: Array) -> None:
        for part, source in takes:
            x[part] = source

    return take


def _nothing(x: Array) -> None:
    """Combine vectors without elements."""


def _has_cores(ranks: int) -> bool:
    """Return whether each rank of a node has a core of its own, as far as one can tell."""
    every = os.cpu_count() or 1
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else every
    # A rank that is bound to one core (of two threads) does not share it.
    return ranks <= (every if mine <= 2 else mine)


def _is_late(memories: Sequence[memoryview], flag: int, value: int, how: int) -> bool:
    """Return whether a flag of any rank has not come to a value after a while."""
    for _ in range(_TRIES[how]):
        for words in memories:
            if words[flag] < value:
                break
        else:
            return False
        if how == GO_ON:
            give_way()
    return True


def note(ledger: "array[int]", identity: int, sequence: int, began_ns: int, ended_ns: int,
         waited_ns: int) -> None:
    """Note a complete round in the ledger, and how long callers have waited for it."""
    rounds = ledger[LEDGER_ROUNDS]
    entry = LEDGER_RING + rounds % RING * RING_WORDS
    ledger[entry] = identity
    ledger[entry + 1] = sequence
    ledger[entry + 2] = began_ns
    ledger[entry + 3] = ended_ns
    ledger[LEDGER_NANOSECONDS] += waited_ns
    ledger[LEDGER_ROUNDS] = rounds + 1
