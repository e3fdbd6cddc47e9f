"""The sums of compiled rounds: of all ranks' slots, or of a slice of all windows, in place."""

from typing import Any

import numpy as np

from ..memory.arrays import SIXTEEN_BIT
from ..memory.sums import adding_both, of_two
from .layout import (
    ROUND_BASES, ROUND_COMBINES, ROUND_DIVISOR, ROUND_IN_PLACE, ROUND_LENGTH, ROUND_RANK,
    ROUND_RANKS, ROUND_VECTOR, SLOT_WORD)

# Of more than two windows, so many bytes are added up at a time: with those of four vectors they
# stay in the level-1 cache.
_BLOCK_BYTES = 4096


def combining(intrinsics: Any, name: str) -> Any:
    """Return a function that combines slots into the vector, or a slice of all windows."""
    inlined, stored = intrinsics.inlined, np.dtype(np.uint16 if name in SIXTEEN_BIT else name)
    pointer, itemsize = intrinsics.pointer_to(stored), stored.itemsize
    number, widen, narrow, divides = _arithmetic(intrinsics, name)
    both = adding_both(inlined, pointer, *of_two(inlined, widen, narrow), divides)
    if name == "bfloat16":
        both = _by_pairs(intrinsics, both)
    add = _adding(inlined, pointer, widen, *_finishing(inlined, name, narrow, divides))
    block = _BLOCK_BYTES // itemsize

    @inlined
    def combine(words, area):  # type: ignore[no-untyped-def]
        p, n, rank = words[ROUND_RANKS], words[ROUND_LENGTH], words[ROUND_RANK]
        divisor = number(words[ROUND_DIVISOR])
        slot, out = area + 8 * SLOT_WORD, words[ROUND_VECTOR] + words[ROUND_COMBINES]
        first, offset, step, at, stop = ROUND_BASES, slot + words[ROUND_COMBINES], n, 0, n
        if words[ROUND_IN_PLACE] != 0:
            # This rank's slice, see memory.arrays.slice_of, by way of its slot.
            first, offset, step = ROUND_BASES + p, 0, block
            at, stop = rank * n // p, (rank + 1) * n // p
            out = words[ROUND_BASES + rank] + slot
            if p == 2:
                both(words[first] + at * itemsize, words[first + 1] + at * itemsize, stop - at,
                     divisor)
                return
        while at < stop:
            length, total = min(step, stop - at), pointer(out)
            add(words, first, offset + at * itemsize, length, total, divisor)
            # Not a variable: the loop would be compiled twice.
            if words[ROUND_IN_PLACE] != 0:
                for r in range(first, first + p):
                    target = pointer(words[r] + at * itemsize)
                    for i in range(length):
                        target[i] = total[i]
            at += step

    return combine


def _arithmetic(intrinsics: Any, name: str) -> tuple[Any, Any, Any, bool]:
    """Return of a dtype: what makes its divisor; what widens its numbers, and narrows a sum; and
    whether a sum may be divided."""
    if name in SIXTEEN_BIT:
        return np.float32, *intrinsics.conversions(name), True
    same = intrinsics.inlined(lambda x: x)
    # Integers have no mean.
    return np.dtype(name).type, same, same, np.dtype(name).kind == "f"


def _by_pairs(intrinsics: Any, one_by_one: Any) -> Any:
    """Return what does as `one_by_one` with bfloat16, but two at a time where these are words."""
    inlined, pointer = intrinsics.inlined, intrinsics.pointer_to(np.dtype(np.uint32))
    first, second, two = (
        intrinsics.first_bfloat, intrinsics.second_bfloat, intrinsics.two_bfloats)

    @inlined
    def add(x, y):  # type: ignore[no-untyped-def]
        return two(first(x) + first(y), second(x) + second(y))

    @inlined
    def mean(x, y, divisor):  # type: ignore[no-untyped-def]
        return two((first(x) + first(y)) / divisor, (second(x) + second(y)) / divisor)

    pair_by_pair = adding_both(inlined, pointer, add, mean, True)

    @inlined
    def both(a, b, n, divisor):  # type: ignore[no-untyped-def]
        pairs = 0
        if (a | b) & 3 == 0:
            pairs = n // 2
            pair_by_pair(a, b, pairs, divisor)
        one_by_one(a + 4 * pairs, b + 4 * pairs, n - 2 * pairs, divisor)

    return both


def _finishing(inlined: Any, name: str, narrow: Any, divides: bool) -> tuple[Any, bool]:
    """Return what is done with a sum before it is stored, and whether it is divided afterwards."""
    if name in SIXTEEN_BIT:
        # Rounded once, at the end.
        return inlined(lambda x, divisor: narrow(x / divisor)), False
    return inlined(lambda x, divisor: x), divides


def _adding(inlined: Any, pointer: Any, widen: Any, finish: Any, divides: bool) -> Any:
    """Return a function that adds up n numbers of each rank, in rank order, and divides.

    Their addresses are `offset` beyond what stands in the words from `first` on.
    """
    @inlined
    def sums(words, first, offset, n, out, divisor):  # type: ignore[no-untyped-def]
        p = words[ROUND_RANKS]
        a, b = pointer(words[first] + offset), pointer(words[first + 1] + offset)
        if p == 2:
            for i in range(n):
                out[i] = finish(widen(a[i]) + widen(b[i]), divisor)
            return
        c = pointer(words[first + 2] + offset)
        if p == 3:
            for i in range(n):
                out[i] = finish(widen(a[i]) + widen(b[i]) + widen(c[i]), divisor)
            return
        d = pointer(words[first + 3] + offset)
        for i in range(n):
            out[i] = finish(widen(a[i]) + widen(b[i]) + widen(c[i]) + widen(d[i]), divisor)
        # Not of 16 bits, see compiled_rounds.code: a sum has the type of `out`.
        for r in range(4, p):
            e = pointer(words[first + r] + offset)
            for i in range(n):
                out[i] += e[i]

    @inlined
    def add(words, first, offset, n, out, divisor):  # type: ignore[no-untyped-def]
        sums(words, first, offset, n, out, divisor)
        if divides and divisor != 1:
            for i in range(n):
                out[i] /= divisor

    return add
