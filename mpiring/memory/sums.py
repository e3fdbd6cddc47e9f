"""Sums of float32 and float64 vectors in one pass over memory, compiled by numba."""

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import machine
from .arrays import Array

Sum = Callable[[Sequence[Array], float, Sequence[Array]], bool]

# Numbers that are added at a time: with those of four vectors they stay in the level-1 cache.
_BLOCK = 1024


class _Scratch(threading.local):
    """A thread's sums."""

    def __init__(self) -> None:
        self.total = ctypes.create_string_buffer(_BLOCK * 8)
        self.address = ctypes.addressof(self.total)


_scratch = _Scratch()


@functools.lru_cache
def combiner(dtype: np.dtype[Any]) -> Sum | None:
    """Return a function that adds vectors; None where numba is missing.

    It takes at least two vectors, what their sum is divided by, and the vectors that are to hold
    the result, each of which may be one of the former. The bits are NumPy's, added from left to
    right, but for payloads of NaN. It returns False, and has done nothing, if a vector's numbers
    do not lie at multiples of their size.

    Args:
        dtype: float32 or float64.
    """
    name = dtype.name
    signature = f"{name}** intp intp {name} {name}* {name}** intp"
    code = machine.code(f"sums of {name}", _alone, signature, _sum)
    return None if code is None else _caller(code.call, dtype.itemsize)


def _alone(intrinsics: Any, function: Callable[..., None]) -> Callable[..., None]:
    return function


def _caller(add: Callable[..., None], itemsize: int) -> Sum:
    def combine(sources: Sequence[Array], divisor: float, outs: Sequence[Array]) -> bool:
        p, q = len(sources), len(outs)
        addresses = [_address(x) for x in (*sources, *outs)]
        if any([address % itemsize for address in addresses]):
            return False
        pointers = (ctypes.c_void_p * (p + q))(*addresses)
        add(pointers, p, outs[0].size, divisor, _scratch.address, ctypes.byref(pointers, p * 8), q)
        return True

    return combine


def _address(x: Array) -> int:
    try:
        # In a fifth of the time of NumPy's own x.ctypes.data.
        return ctypes.addressof(ctypes.c_char.from_buffer(x.data))
    except TypeError:
        # Not to be written to.
        return int(x.ctypes.data)


def _sum(sources, p, n, divisor, total, outs, q):  # type: ignore[no-untyped-def]
    """Add up, several sources at a time: the more are read at once, the more is under way."""
    for start in range(0, n, _BLOCK):
        length = min(_BLOCK, n - start)
        a, b = sources[0], sources[1]
        if p == 2:
            for i in range(length):
                total[i] = a[start + i] + b[start + i]
        elif p == 3:
            c = sources[2]
            for i in range(length):
                total[i] = a[start + i] + b[start + i] + c[start + i]
        else:
            c, d = sources[2], sources[3]
            for i in range(length):
                total[i] = a[start + i] + b[start + i] + c[start + i] + d[start + i]
        for r in range(4, p - 1, 2):
            a, b = sources[r], sources[r + 1]
            for i in range(length):
                total[i] = total[i] + a[start + i] + b[start + i]
        if p > 4 and p % 2:
            a = sources[p - 1]
            for i in range(length):
                total[i] += a[start + i]
        if divisor != 1:
            for i in range(length):
                total[i] /= divisor
        # Only here, since what is written to may be one of the sources.
        for s in range(q):
            out = outs[s]
            for i in range(length):
                out[start + i] = total[i]
