"""The protocol in machine code: the dialect of numba's intrinsics, and its sums.

Addresses are int64. Python's lock is held while a short call begins, for a few microseconds at
most. It is released during longer waits, and for long vectors.
"""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..jit import cache
from ..jit.sums import adding, adding_both, of_two
from ..memory.arrays import SIXTEEN_BIT
from .base import HEADER_BYTES
from .layout import (
    CALL_ARRAYS, CALL_CONSTANTS, CALL_VARIABLES, COUNTER_ARRAYS, COUNTER_WORDS, HEADER_WORD, PIECES,
    ROWS, SLOTS, SLOT_WORD)
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
_FAST_CALLS, _FAST_NS = (8 * COUNTER_WORDS.index(name) for name in ("fast_calls", "fast_ns"))


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

    Its arguments are the address of a call, a multiple of 8, plus the mode, and the address of the
    vector.
    """
    call_at = intrinsics.struct_at(CALL_VARIABLES + CALL_CONSTANTS, CALL_ARRAYS)
    run = intrinsics.inlined(protocol(_dialect(intrinsics, name)))

    def run_at(address_and_mode, vector):  # type: ignore[no-untyped-def]
        mode = address_and_mode & 7
        return run(call_at(address_and_mode - mode), mode, vector)

    return run_at


def _dialect(intrinsics: Any, name: str) -> Any:
    """Return the protocol's dialect for a dtype; see protocol.protocol."""
    inlined, add_atomic = intrinsics.inlined, intrinsics.add_atomic
    counter_at = intrinsics.struct_at(COUNTER_WORDS, COUNTER_ARRAYS)
    slot, write_header, write, read, write_back = _copying(intrinsics)

    @inlined
    def bind(call, vector):  # type: ignore[no-untyped-def]
        call.vector = vector

    @inlined
    def count(call, ns):  # type: ignore[no-untyped-def]
        add_atomic(call.counter + _FAST_NS, ns)
        return add_atomic(call.counter + _FAST_CALLS, 1)

    load, all_arrived, store, publish = _words(intrinsics)
    return SimpleNamespace(
        form=1, inlined=inlined, counter=inlined(lambda call: counter_at(call.counter)),
        bind=bind, load=load, all_arrived=all_arrived, store=store, publish=publish,
        write_header=write_header, write=write, read=read, write_back=write_back,
        reduce=_reducing(intrinsics, name, slot), now=intrinsics.monotonic_ns, count=count,
        relax=intrinsics.relax, give_way=intrinsics.give_way)


def _words(intrinsics: Any) -> tuple[Any, Any, Any, Any]:
    """Return the functions that load and store words of segments."""
    inlined, words_at = intrinsics.inlined, intrinsics.pointer_to(np.dtype(np.int64))
    load_acquire, store_release = intrinsics.load_acquire, intrinsics.store_release

    @inlined
    def load(base, word):  # type: ignore[no-untyped-def]
        return load_acquire(base + 8 * word)

    @inlined
    def all_arrived(call, value):  # type: ignore[no-untyped-def]
        for r in range(call.ranks):
            if load(call.segments[r], call.area) < value:
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
        return call.segments[r] + 8 * (call.area + SLOT_WORD) + at * call.itemsize

    @inlined
    def write_header(call):  # type: ignore[no-untyped-def]
        copy_bytes(call.segments[call.rank] + 8 * (call.area + HEADER_WORD),
                   call.header_address, HEADER_BYTES)

    @inlined
    def write(call, at, start, n):  # type: ignore[no-untyped-def]
        size = call.itemsize
        copy_bytes(slot(call, call.rank, at), call.vector + start * size, n * size)

    @inlined
    def read(call, r, at, start, n):  # type: ignore[no-untyped-def]
        size = call.itemsize
        copy_bytes(call.vector + start * size, slot(call, r, at), n * size)

    @inlined
    def write_back(call, r, at, start, n):  # type: ignore[no-untyped-def]
        size = call.itemsize
        copy_bytes(slot(call, r, at), call.vector + start * size, n * size)

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
        p, kind, divisor = call.ranks, call.kind, number(call.divisor)
        vector, slot = call.vector + start * itemsize, slot_of(call, call.rank, at)
        # The sources begin `offset` bytes after the addresses in `sources`.
        sources, offset, out, step = call.segments, slot - call.segments[call.rank], vector, n
        if kind != SLOTS:
            sources, offset, out, step = call.vectors, start * itemsize, slot, block
        if kind == PIECES or kind == ROWS:
            for r in range(p):
                sources[r] = slot_of(call, r, at)
            sources[call.rank], offset = vector, 0
        if kind != SLOTS and p == 2:
            add_both(sources[0] + offset, sources[1] + offset, n, divisor)
            return
        done = 0
        while done < n:
            length, total = min(step, n - done), pointer(out)
            add(sources, p, offset + done * itemsize, length, total, divisor)
            # With the variable `kind`, the compiler would duplicate the loop.
            if call.kind != SLOTS:
                for r in range(p):
                    result = pointer(sources[r] + offset + done * itemsize)
                    for i in range(length):
                        result[i] = total[i]
            done += step

    return reduce


def _sums(intrinsics: Any, name: str, pointer: Any) -> tuple[Any, Any, Any]:
    """Return functions for a dtype that convert the divisor, and that add two vectors into both.

    A third function adds n numbers of each rank, at `offset` from the addresses of its vectors.
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
    def add(sources, p, offset, n, out, divisor):  # type: ignore[no-untyped-def]
        # Sums of more than four vectors are stored in `out` on the way. They are never 16-bit, see
        # is_compilable.
        sums(sources, p, offset, n, out, divisor)
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
