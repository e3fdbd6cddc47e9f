"""The compiled form of a round: sums, means and copies of vectors, from end to end.

Whatever is not plain (a rank that is late, another call, a closed gate, a rank that combines by
NumPy) is handed back to Python; see layout. Python's lock is held while a short round begins, for
some microseconds at most, and released while it waits for longer, and for long vectors.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..memory import machine
from ..memory.arrays import SIXTEEN_BIT, Array, data_address
from .base import HEADER_BYTES
from .layout import (
    AREAS, AREA_WORDS, BEGIN, BEGUN, COMBINED, COUNT_BITS, DIGEST_WORD, DISAGREE, DONE, ENDED,
    FORM_WORD, GATED, GO_ON, HEADER_WORD, LATE, LEDGER_GATE, LEDGER_NANOSECONDS, LEDGER_RING,
    LEDGER_ROUNDS, LEDGER_SEQUENCE, LEDGER_WRITTEN, LOOK, NOTE_WORD, NOTE_WORDS, NOTHING,
    OTHERWISE, PUBLISH, PUBLISHED, RING, RING_BEGAN, RING_ENDED, RING_IDENTITY, RING_SEQUENCE,
    RING_WORDS, ROUND_BARRIERS, ROUND_BASES, ROUND_BEGAN, ROUND_CLOCK, ROUND_DIGEST, ROUND_HEADER,
    ROUND_IDENTITY, ROUND_IN_PLACE, ROUND_LAYS, ROUND_LEDGER, ROUND_NBYTES, ROUND_NOTE, ROUND_RANK,
    ROUND_RANKS, ROUND_SEQUENCE, ROUND_SPINS, ROUND_STAGE, ROUND_TAKES, ROUND_VECTOR, ROUND_YIELDS,
    SLOT_WORD)
from .round_sums import combining

if TYPE_CHECKING:
    from .rounds import Round, Run

# What is compiled: sums and means (of integers: sums). The code for any dtype also runs rounds that
# combine nothing; this one is taken for them.
COPIES = "float32"
DTYPES = ("float32", "float64", "int32", "int64", *SIXTEEN_BIT)
OPS = ("sum", "mean")

# For longer ones, Python's lock is not held.
_WITH_LOCK_BYTES = 64 << 10
# Where a rank's note of the first barrier lies, see NOTE_WORD.
_NOTE = NOTE_WORD + NOTE_WORDS

_CLOCK = getattr(time, "CLOCK_MONOTONIC", 0)
# See layout: a flag of the operation AREAS before lies so far behind the count of this one.
_AHEAD = (AREAS << COUNT_BITS) - ENDED


class CompiledRound:
    """A round in compiled code, with Python's form to fall back on.

    Args:
        round_: What it is of.
        code: The code for its dtype.
        otherwise: Goes on with it in Python; see rounds.Run.

    Attributes:
        begin: See rounds.Round.
    """

    __slots__ = ("begin", "_round", "_words", "_address", "_go_on", "_otherwise")

    def __init__(self, round_: "Round", code: machine.Code, otherwise: "Run") -> None:
        # Owns what the code is given addresses of.
        self._round, self._words = round_, round_.words
        self._address = round_.address()
        is_short = round_.n * round_.dtype.itemsize <= _WITH_LOCK_BYTES
        self.begin = code.call_with_lock if is_short else code.call
        self._go_on, self._otherwise = code.call, otherwise

    def run(self, how: int, x: Array) -> int:
        """Run it; see rounds.Run."""
        if how <= PUBLISH and self._words[ROUND_STAGE]:
            # Another thread's vector is in it.
            return GATED
        self._words[ROUND_VECTOR] = data_address(x)
        run = self._go_on if how == GO_ON else self.begin
        status: int = run(self._address + how)
        return self._otherwise(GO_ON, x) if status == OTHERWISE else status


def code(op: str, name: str, ranks: int, *, compiles: bool = False) -> machine.Code | None:
    """Return the code of rounds for an op on a dtype, among some ranks; None where there is none.

    Args:
        op: "" for rounds that combine nothing.
        name: Of the dtype.
        compiles: Compile it if need be, for a second or two; else only what is on disk is taken.
    """
    if not op:
        op, name = "sum", COPIES
    # See round_sums: more vectors of 16 bits would be rounded on the way.
    if op not in OPS or name not in DTYPES or ranks > 4 and name in SIXTEEN_BIT:
        return None
    find = machine.code if compiles else machine.saved
    return find(f"short sums of {name}", _round, "int64 -> int64", name)


def _round(intrinsics: Any, name: str) -> Callable[..., Any]:
    """Return what numba compiles: it runs a round, given the address of its words, and how."""
    words_at = intrinsics.pointer_to(np.dtype(np.int64))
    now, note = _notes(intrinsics, words_at)
    meet = _meeting(intrinsics)
    begin = _beginning(intrinsics, words_at, now)
    publish = _publishing(intrinsics, words_at)
    finish = _finishing(intrinsics, name, words_at, meet, note)

    def run(address_and_how):  # type: ignore[no-untyped-def]
        how = address_and_how & 7
        address = address_and_how - how
        words, clock = words_at(address), words_at(address + 8 * ROUND_CLOCK)
        if (how == BEGIN or how == PUBLISH) and not begin(words, clock):
            return GATED
        sequence = words[ROUND_SEQUENCE]
        area, count = sequence % AREAS * (8 * AREA_WORDS), (sequence + 1) << COUNT_BITS
        if words[ROUND_STAGE] == BEGUN:
            if sequence >= AREAS and not meet(words, area, count - _AHEAD, how):
                return LATE
            publish(words, area, sequence % AREAS, count + words[ROUND_BARRIERS])
            if how == PUBLISH:
                return DONE
        return finish(words, clock, area, count, how)

    return run


def _beginning(intrinsics: Any, words_at: Any, now: Any) -> Any:
    """Return a function that takes the next number, if the gate is open; whether it was."""
    load_acquire = intrinsics.load_acquire

    @intrinsics.inlined
    def begin(words, clock):  # type: ignore[no-untyped-def]
        ledger = words_at(words[ROUND_LEDGER])
        if words[ROUND_STAGE] != NOTHING or load_acquire(
                words[ROUND_LEDGER] + 8 * LEDGER_GATE) != 0:
            return False
        words[ROUND_STAGE] = BEGUN
        words[ROUND_BEGAN] = now(clock)
        words[ROUND_SEQUENCE] = ledger[LEDGER_SEQUENCE]
        ledger[LEDGER_SEQUENCE] += 1
        return True

    return begin


def _finishing(intrinsics: Any, name: str, words_at: Any, meet: Any, note: Any) -> Any:
    """Return a function that runs a round from where it is published to its end."""
    inlined, store_release = intrinsics.inlined, intrinsics.store_release
    end, agreement = _ending(intrinsics, name), _agreeing(intrinsics, words_at)

    @inlined
    def finish(words, clock, area, count, how):  # type: ignore[no-untyped-def]
        mine = words[ROUND_BASES + words[ROUND_RANK]] + area
        if words[ROUND_STAGE] == PUBLISHED:
            if not meet(words, area, count + words[ROUND_BARRIERS], how):
                return LATE
            status = agreement(words, area)
            if status != DONE:
                return status
            end(words, area)
            if words[ROUND_IN_PLACE] != 0:
                store_release(mine, count + 2)
                words[ROUND_STAGE] = COMBINED
        if words[ROUND_STAGE] == COMBINED and not meet(words, area, count + 2, how):
            return LATE
        store_release(mine, count + ENDED)
        if words[ROUND_BEGAN] != 0:
            note(words, clock)
        # Last: another thread may begin it again.
        words[ROUND_STAGE] = NOTHING
        return DONE

    return finish


def _agreeing(intrinsics: Any, words_at: Any) -> Any:
    """Return a function that compares what all ranks have published: DONE, DISAGREE, OTHERWISE."""
    @intrinsics.inlined
    def agreement(words, area):  # type: ignore[no-untyped-def]
        otherwise, p = False, words[ROUND_RANKS]
        for r in range(p):
            theirs = words_at(words[ROUND_BASES + r] + area)
            if theirs[DIGEST_WORD] != words[ROUND_DIGEST]:
                return DISAGREE
            if words[ROUND_IN_PLACE] != 0:
                known = ROUND_BASES + 2 * (p + r)
                otherwise |= theirs[_NOTE] != words[known]
                otherwise |= theirs[_NOTE + 1] != words[known + 1]
            elif words[ROUND_TAKES] == 0:
                otherwise |= theirs[FORM_WORD] == 0
        return OTHERWISE if otherwise else DONE

    return agreement


def _notes(intrinsics: Any, words_at: Any) -> tuple[Any, Any]:
    """Return functions: the time in ns, and one that notes a round in the ledger."""
    clock_gettime = intrinsics.clock_gettime

    @intrinsics.inlined
    def now(clock):  # type: ignore[no-untyped-def]
        clock_gettime(np.int32(_CLOCK), clock)
        return clock[0] * 1_000_000_000 + clock[1]

    @intrinsics.inlined
    def note(words, clock):  # type: ignore[no-untyped-def]
        ledger = words_at(words[ROUND_LEDGER])
        began, ended, rounds = words[ROUND_BEGAN], now(clock), ledger[LEDGER_ROUNDS]
        entry = LEDGER_RING + rounds % RING * RING_WORDS
        ledger[entry + RING_IDENTITY] = words[ROUND_IDENTITY]
        ledger[entry + RING_SEQUENCE] = words[ROUND_SEQUENCE]
        ledger[entry + RING_BEGAN] = began
        ledger[entry + RING_ENDED] = ended
        ledger[LEDGER_NANOSECONDS] += ended - began
        ledger[LEDGER_ROUNDS] = rounds + 1

    return now, note


def _meeting(intrinsics: Any) -> Any:
    """Return a function that waits a while for all ranks' flags to come to a value."""
    load_acquire, relax = intrinsics.load_acquire, intrinsics.relax
    give_way = intrinsics.give_way

    @intrinsics.inlined
    def meet(words, flag, value, how):  # type: ignore[no-untyped-def]
        r, p = 0, words[ROUND_RANKS]
        tries = words[ROUND_SPINS]
        if how == GO_ON:
            tries = words[ROUND_YIELDS]
        elif how == LOOK:
            tries = 1
        for _ in range(tries):
            while r < p and load_acquire(words[ROUND_BASES + r] + flag) >= value:
                r += 1
            if r == p:
                return True
            if how == GO_ON:
                give_way()
            else:
                relax()
        return False

    return meet


def _publishing(intrinsics: Any, words_at: Any) -> Any:
    """Return a function that lays the vector down, and all that goes with it, and arrives."""
    copy_bytes, store_release = intrinsics.copy_bytes, intrinsics.store_release

    @intrinsics.inlined
    def publish(words, area, number, arrived):  # type: ignore[no-untyped-def]
        base = words[ROUND_BASES + words[ROUND_RANK]] + area
        mine, ledger = words_at(base), words_at(words[ROUND_LEDGER])
        if words[ROUND_IN_PLACE] == 0:
            copy_bytes(base + 8 * SLOT_WORD + words[ROUND_LAYS],
                       words[ROUND_VECTOR] + words[ROUND_LAYS], words[ROUND_NBYTES])
        mine[_NOTE], mine[_NOTE + 1] = words[ROUND_NOTE], words[ROUND_NOTE + 1]
        mine[DIGEST_WORD] = words[ROUND_DIGEST]
        # Whoever lays a vector down after a round in place, does it by NumPy.
        mine[FORM_WORD] = 1 - words[ROUND_IN_PLACE]
        if ledger[LEDGER_WRITTEN + number] != words[ROUND_IDENTITY]:
            copy_bytes(base + 8 * HEADER_WORD, words[ROUND_HEADER], HEADER_BYTES)
            ledger[LEDGER_WRITTEN + number] = words[ROUND_IDENTITY]
        store_release(base, arrived)
        words[ROUND_STAGE] = PUBLISHED

    return publish


def _ending(intrinsics: Any, name: str) -> Any:
    """Return a function that combines, or copies what each rank has laid down for this one."""
    copy_bytes, combine = intrinsics.copy_bytes, combining(intrinsics, name)

    @intrinsics.inlined
    def end(words, area):  # type: ignore[no-untyped-def]
        if words[ROUND_TAKES] == 0:
            combine(words, area)
            return
        p, vector = words[ROUND_RANKS], words[ROUND_VECTOR]
        for r in range(p):
            part, slot = ROUND_BASES + p + 2 * r, words[ROUND_BASES + r] + area + 8 * SLOT_WORD
            copy_bytes(vector + words[part], slot + words[part], words[part + 1])

    return end
