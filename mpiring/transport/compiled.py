"""The protocol in machine code: the dialect of numba's intrinsics, and its sums.

Addresses are int64. Python's lock is held while a short call begins, for a few microseconds at
most. It is released during longer waits, and for long vectors.
"""

import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..jit import cache
from ..jit.sums import adding, adding_both, of_two
from ..memory.arrays import SIXTEEN_BIT
from .base import HEADER_BYTES
from .layout import (
    CALL_AREA, CALL_BASES, CALL_COUNTER, CALL_DIVISOR, CALL_HEADER,
    CALL_ITEMSIZE, CALL_KIND, CALL_RANK, CALL_RANKS, CALL_VECTOR, COUNTER_CALLS,
    COUNTER_NANOSECONDS, HEADER_WORD, PIECES, ROWS, SLOTS, SLOT_WORD)
from .protocol import protocol

# The code for any dtype also runs calls that reduce nothing. Such calls use the code for this
# dtype.
COPIES = "float32"
# Dtypes of compiled sums and means (for integers, only sums).
DTYPES = ("float32", "float64", "int32", "int64", *SIXTEEN_BIT)
OPS = ("sum", "mean")
# Number of bytes that are added at a time. Four vectors' blocks fit into the level-1 cache.
_BLOCK_BYTES = 4096
# Python's lock prevents two threads from using the same operation number. If there is no lock,
# Python code runs the calls.
_HAS_LOCK: bool = getattr(sys, "_is_gil_enabled", lambda: True)()
_CLOCK = getattr(time, "CLOCK_MONOTONIC", 0)


def code(op: str, name: str, ranks: int, *, compiles: bool = False) -> cache.Code | None:
    """Return the code of calls for an op on a dtype, among some ranks; None if there is none.

    The op is "" for calls that reduce nothing. Only if `compiles`, compile it if necessary, for a
    second or two; otherwise use saved code.
    """
    if not op:
        op, name = "sum", COPIES
    if not is_compilable(op, name, ranks):
        return None
    return cache.code(f"sums of {name} on a node", _protocol, "int64 int64 -> int64", name,
                      compiles=compiles)


def is_compilable(op: str, name: str, ranks: int) -> bool:
    """Return whether numba could compile calls for an op on a dtype, among some ranks."""
    # Sums of more than four 16-bit vectors would be rounded several times, see sums.adding.
    return (_HAS_LOCK and op in OPS and name in DTYPES
            and not (ranks > 4 and name in SIXTEEN_BIT))


def _protocol(intrinsics: Any, name: str) -> Callable[..., Any]:
    """Return the function to compile for a dtype.

    Its arguments are the address of a call's words, a multiple of 8, plus the mode, and the address
    of the vector.
    """
    words_at = intrinsics.pointer_to(np.dtype(np.int64))
    run = intrinsics.inlined(protocol(_dialect(intrinsics, name, words_at)))

    def run_at(address_and_mode, vector):  # type: ignore[no-untyped-def]
        mode = address_and_mode & 7
        return run(words_at(address_and_mode - mode), mode, vector)

    return run_at


def _dialect(intrinsics: Any, name: str, words_at: Any) -> Any:
    """Return the protocol's dialect for a dtype; see protocol.protocol."""
    inlined, clock_gettime = intrinsics.inlined, intrinsics.clock_gettime
    add_atomic = intrinsics.add_atomic
    slot, write_header, write, read, write_back = _copying(intrinsics)

    @inlined
    def bind(call, vector):  # type: ignore[no-untyped-def]
        call[CALL_VECTOR] = vector

    @inlined
    def now(address):  # type: ignore[no-untyped-def]
        clock = words_at(address)
        clock_gettime(np.int32(_CLOCK), clock)
        return clock[0] * 1_000_000_000 + clock[1]

    @inlined
    def count(call, ns):  # type: ignore[no-untyped-def]
        add_atomic(call[CALL_COUNTER] + 8 * COUNTER_NANOSECONDS, ns)
        return add_atomic(call[CALL_COUNTER] + 8 * COUNTER_CALLS, 1)

    load, all_arrived, store, publish = _words(intrinsics, words_at)
    return SimpleNamespace(
        form=1, inlined=inlined, counter=inlined(lambda call: words_at(call[CALL_COUNTER])),
        bind=bind, load=load, all_arrived=all_arrived, store=store, publish=publish,
        write_header=write_header, write=write, read=read, write_back=write_back,
        reduce=_reducing(intrinsics, name, slot), now=now, count=count, relax=intrinsics.relax,
        give_way=intrinsics.give_way)


def _words(intrinsics: Any, words_at: Any) -> tuple[Any, Any, Any, Any]:
    """Return the functions that load and store words of segments."""
    inlined = intrinsics.inlined
    load_acquire, store_release = intrinsics.load_acquire, intrinsics.store_release

    @inlined
    def load(base, word):  # type: ignore[no-untyped-def]
        return load_acquire(base + 8 * word)

    @inlined
    def all_arrived(call, flag, value):  # type: ignore[no-untyped-def]
        for r in range(call[CALL_RANKS]):
            if load(call[CALL_BASES + r], flag) < value:
                return False
        return True

    @inlined
    def store(base, word, value):  # type: ignore[no-untyped-def]
        words_at(base)[word] = value

    @inlined
    def publish(base, word, value):  # type: ignore[no-untyped-def]
        store_release(base + 8 * word, value)

    return load, all_arrived, store, publish


def _copying(intrinsics: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Return functions that compute the address of an element of a slot, and that copy."""
    inlined, copy_bytes = intrinsics.inlined, intrinsics.copy_bytes

    @inlined
    def slot(call, r, at):  # type: ignore[no-untyped-def]
        return (call[CALL_BASES + r] + 8 * (call[CALL_AREA] + SLOT_WORD)
                + at * call[CALL_ITEMSIZE])

    @inlined
    def write_header(call):  # type: ignore[no-untyped-def]
        copy_bytes(call[CALL_BASES + call[CALL_RANK]] + 8 * (call[CALL_AREA] + HEADER_WORD),
                   call[CALL_HEADER], HEADER_BYTES)

    @inlined
    def write(call, at, start, n):  # type: ignore[no-untyped-def]
        size = call[CALL_ITEMSIZE]
        copy_bytes(slot(call, call[CALL_RANK], at), call[CALL_VECTOR] + start * size, n * size)

    @inlined
    def read(call, r, at, start, n):  # type: ignore[no-untyped-def]
        size = call[CALL_ITEMSIZE]
        copy_bytes(call[CALL_VECTOR] + start * size, slot(call, r, at), n * size)

    @inlined
    def write_back(call, r, at, start, n):  # type: ignore[no-untyped-def]
        size = call[CALL_ITEMSIZE]
        copy_bytes(slot(call, r, at), call[CALL_VECTOR] + start * size, n * size)

    return slot, write_header, write, read, write_back


def _reducing(intrinsics: Any, name: str, slot_of: Any) -> Any:
    """Return a function that adds n numbers of each rank: the dialect's `reduce`.

    For SLOTS, it adds the slots into the vector. For the other kinds, the sources are the vectors
    (WINDOWS), or this rank's vector and the other ranks' slots. It adds them block by block in this
    rank's slot, and copies the sums to all sources.
    """
    stored = np.dtype(np.uint16 if name in SIXTEEN_BIT else name)
    pointer, itemsize = intrinsics.pointer_to(stored), stored.itemsize
    number, add_both, add = _sums(intrinsics, name, pointer)
    block = _BLOCK_BYTES // itemsize

    @intrinsics.inlined
    def reduce(call, at, start, n):  # type: ignore[no-untyped-def]
        p, kind, divisor = call[CALL_RANKS], call[CALL_KIND], number(call[CALL_DIVISOR])
        vector, slot = call[CALL_VECTOR] + start * itemsize, slot_of(call, call[CALL_RANK], at)
        # The sources begin `offset` bytes after the addresses in the words from `first` on.
        first, offset, out, step = CALL_BASES, slot - call[CALL_BASES + call[CALL_RANK]], vector, n
        if kind != SLOTS:
            first, offset, out, step = CALL_BASES + p, start * itemsize, slot, block
        if kind == PIECES or kind == ROWS:
            for r in range(p):
                call[first + r] = slot_of(call, r, at)
            call[first + call[CALL_RANK]], offset = vector, 0
        if kind != SLOTS and p == 2:
            add_both(call[first] + offset, call[first + 1] + offset, n, divisor)
            return
        done = 0
        while done < n:
            length, total = min(step, n - done), pointer(out)
            add(call, first, offset + done * itemsize, length, total, divisor)
            # With the variable `kind`, the compiler would duplicate the loop.
            if call[CALL_KIND] != SLOTS:
                for r in range(first, first + p):
                    result = pointer(call[r] + offset + done * itemsize)
                    for i in range(length):
                        result[i] = total[i]
            done += step

    return reduce


def _sums(intrinsics: Any, name: str, pointer: Any) -> tuple[Any, Any, Any]:
    """Return functions for a dtype that convert the divisor, and that add two vectors into both.

    A third function adds n numbers of each rank, at `offset` from the addresses in the words from
    `first` on.
    """
    inlined = intrinsics.inlined
    number, widen, narrow, divides = _arithmetic(intrinsics, name)
    add_both = adding_both(inlined, pointer, *of_two(inlined, widen, narrow), divides)
    if name == "bfloat16":
        add_both = _pairwise(intrinsics, add_both)
    finish = inlined(lambda x, divisor: x)
    if name in SIXTEEN_BIT:
        # Each sum is divided and rounded once, at the end.
        finish, divides = inlined(lambda x, divisor: narrow(x / divisor)), False
    sums = adding(inlined, pointer, widen, finish)

    @inlined
    def add(call, first, offset, n, out, divisor):  # type: ignore[no-untyped-def]
        # Sums of more than four vectors are stored in `out` on the way. They are never 16-bit, see
        # is_compilable.
        sums(call, first, call[CALL_RANKS], offset, n, out, divisor)
        if divides and divisor != 1:
            for i in range(n):
                out[i] /= divisor

    return number, add_both, add


def _arithmetic(intrinsics: Any, name: str) -> tuple[Any, Any, Any, bool]:
    """Return functions for a dtype that convert a divisor, widen a number and narrow a sum.

    Also return whether a sum may be divided.
    """
    if name in SIXTEEN_BIT:
        return np.float32, *intrinsics.conversions(name), True
    same = intrinsics.inlined(lambda x: x)
    # Integers have no mean.
    return np.dtype(name).type, same, same, np.dtype(name).kind == "f"


def _pairwise(intrinsics: Any, add_each: Any) -> Any:
    """Return `add_each` for bfloat16, but adding two numbers at a time if they are aligned."""
    inlined, pointer = intrinsics.inlined, intrinsics.pointer_to(np.dtype(np.uint32))
    first, second, two = (
        intrinsics.first_bfloat, intrinsics.second_bfloat, intrinsics.two_bfloats)

    @inlined
    def add(x, y):  # type: ignore[no-untyped-def]
        return two(first(x) + first(y), second(x) + second(y))

    @inlined
    def mean(x, y, divisor):  # type: ignore[no-untyped-def]
        return two((first(x) + first(y)) / divisor, (second(x) + second(y)) / divisor)

    add_pairs = adding_both(inlined, pointer, add, mean, True)

    @inlined
    def add_both(a, b, n, divisor):  # type: ignore[no-untyped-def]
        pairs = 0
        if (a | b) & 3 == 0:
            pairs = n // 2
            add_pairs(a, b, pairs, divisor)
        add_each(a + 4 * pairs, b + 4 * pairs, n - 2 * pairs, divisor)

    return add_both
