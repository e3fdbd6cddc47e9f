"""Sums of float32 and float64 vectors in one pass over memory, compiled by numba."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..memory.arrays import Array, data_address
from ..memory.scratch import thread_scratch
from . import cache

DTYPES = ("float32", "float64")
# Dtypes by character, because asking NumPy for a name takes 2 µs.
_NAMES = {np.dtype(name).char: name for name in DTYPES}
# Number of elements added at a time: the sums and blocks of four vectors fit in the level-1 cache.
_BLOCK = 1024


def add(sources: Sequence[Array], divisor: float, outs: Sequence[Array]) -> bool:
    """Add vectors, divide, and store the result; return False if there is no code for this.

    The result is bitwise identical to NumPy's sum from left to right, except for payloads of NaN.

    There are two or more sources of a dtype of DTYPES. All vectors are contiguous and of one
    length. Outs may be among the sources, but must not otherwise overlap with the sources or each
    other.
    """
    x = outs[0]
    machine_code = code(_NAMES[x.dtype.char])
    if machine_code is None:
        return False
    p, q = len(sources), len(outs)
    addresses = [data_address(y) for y in (*sources, *outs)]
    for address in addresses:
        if address % x.itemsize:
            # Only NumPy can add vectors at unaligned addresses.
            return False
    pointers = (ctypes.c_int64 * (p + q))(*addresses)
    first = ctypes.addressof(pointers)
    block = thread_scratch.acquire()
    machine_code.call(first, p, x.size, divisor, block.address, first + 8 * p, q)
    thread_scratch.release(block)
    return True


def code(name: str, *, compiles: bool = False) -> cache.Code | None:
    """Return the code of `add` for a dtype of DTYPES; None if there is none.

    If `compiles`, compile it if necessary, which takes a second; otherwise, use only saved code.
    """
    return cache.code(f"long sums of {name}", _add,
                      "int64 int64 int64 float64 int64 int64 int64 -> int64", name,
                      compiles=compiles)


def _add(intrinsics: Any, name: str) -> Callable[..., Any]:
    """Return the function to compile, which adds p vectors and stores the result in q vectors.

    Its arguments are the address of the sources' addresses, p, n, the divisor, the address of
    scratch memory, the address of the results' addresses, and q.
    """
    words_at = intrinsics.pointer_to(np.dtype(np.int64))
    pointer, number = intrinsics.pointer_to(np.dtype(name)), np.dtype(name).type
    inlined, opaque, itemsize = intrinsics.inlined, intrinsics.opaque, np.dtype(name).itemsize
    same = inlined(lambda x: x)
    add = adding(inlined, pointer, same, inlined(lambda x, divisor: x))
    both = adding_both(inlined, pointer, *of_two(inlined, same, same), True)

    @inlined
    def add_up(sources_at, p, n, divisor, total_at, outs_at, q):  # type: ignore[no-untyped-def]
        sources, outs, total = words_at(sources_at), words_at(outs_at), pointer(total_at)
        if p == 2 and q == 2 and sources[0] == outs[0] and sources[1] == outs[1]:
            both(sources[0], sources[1], n, number(divisor))
            return
        divides = np.int64(divisor != 1)
        for start in range(0, n, _BLOCK):
            length = min(_BLOCK, n - start)
            # `opaque` keeps the compiler from making a separate copy of the code for each case.
            add(sources, opaque(p), start * itemsize, length, total, number(divisor))
            if opaque(divides):
                for i in range(length):
                    total[i] /= number(divisor)
            # This comes last, because a result may be one of the sources.
            for s in range(q):
                out = pointer(outs[s])
                for i in range(length):
                    out[start + i] = total[i]

    # Without this function between ctypes and the loops, two vectors take a third longer. Measured.
    def run(sources, p, n, divisor, total, outs, q):  # type: ignore[no-untyped-def]
        add_up(sources, p, n, divisor, total, outs, q)
        return 0

    return run


def of_two(inlined: Any, widen: Any, narrow: Any) -> tuple[Any, Any]:
    """Return two functions: the sum of two numbers, and their sum divided by a divisor.

    `widen` returns the value of a number to add, and `narrow` the value of a sum to store.
    """
    return (inlined(lambda x, y: narrow(widen(x) + widen(y))),
            inlined(lambda x, y, divisor: narrow((widen(x) + widen(y)) / divisor)))


def adding_both(inlined: Any, pointer: Any, add: Any, mean: Any, divides: bool) -> Any:
    """Return a function for compiled code that adds two vectors, and stores the result in both.

    Its arguments are their addresses, their length, and the divisor. A cache line that is loaded
    and stored immediately moves between the caches of two cores only once. Work in blocks would
    take twice the time for vectors of up to several MiB.

    If `divides` is false, the divisor is always 1. `add` and `mean` come from `of_two`.
    """
    @inlined
    def both(first, second, n, divisor):  # type: ignore[no-untyped-def]
        a, b = pointer(first), pointer(second)
        if divides and divisor != 1:
            for i in range(n):
                total = mean(a[i], b[i], divisor)
                a[i] = total
                b[i] = total
            return
        for i in range(n):
            total = add(a[i], b[i])
            a[i] = total
            b[i] = total

    return both


def adding(inlined: Any, pointer: Any, widen: Any, finish: Any) -> Any:
    """Return a function for compiled code that adds p vectors, at least two, in their order.

    Its arguments are a pointer to the vectors' addresses, p, and the offset in bytes from these
    addresses to the numbers. Then follow the count of numbers, a pointer to the result, and a
    divisor for `finish`. The function reads several vectors at a time, which keeps more loads in
    flight.

    `widen` and `finish` are functions of a number and of a sum, for up to four vectors. They return
    the value to add and the value to store.
    """
    @inlined
    def first_ones(sources, p, offset, n, out, divisor):  # type: ignore[no-untyped-def]
        a, b = pointer(sources[0] + offset), pointer(sources[1] + offset)
        if p == 2:
            for i in range(n):
                out[i] = finish(widen(a[i]) + widen(b[i]), divisor)
            return
        c = pointer(sources[2] + offset)
        if p == 3:
            for i in range(n):
                out[i] = finish(widen(a[i]) + widen(b[i]) + widen(c[i]), divisor)
            return
        d = pointer(sources[3] + offset)
        if p < 8:
            for i in range(n):
                out[i] = finish(widen(a[i]) + widen(b[i]) + widen(c[i]) + widen(d[i]), divisor)
            return
        e, f = pointer(sources[4] + offset), pointer(sources[5] + offset)
        g, h = pointer(sources[6] + offset), pointer(sources[7] + offset)
        for i in range(n):
            out[i] = a[i] + b[i] + c[i] + d[i] + e[i] + f[i] + g[i] + h[i]

    @inlined
    def add(sources, p, offset, n, out, divisor):  # type: ignore[no-untyped-def]
        first_ones(sources, p, offset, n, out, divisor)
        for r in range(8 if p >= 8 else 4, p - 1, 2):
            a, b = pointer(sources[r] + offset), pointer(sources[r + 1] + offset)
            for i in range(n):
                out[i] = out[i] + a[i] + b[i]
        if p > 4 and p % 2 == 1:
            a = pointer(sources[p - 1] + offset)
            for i in range(n):
                out[i] += a[i]

    return add
