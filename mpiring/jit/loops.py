"""Compiled loops over vectors: sums of float16 and bfloat16, and loops of codecs and optimizers.

They are loaded, or compiled, when first needed; see `cache`.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..memory.arrays import Array
from ..memory.scratch import thread_scratch
from . import cache

Combine16 = Callable[[Callable[..., Any], Sequence[Array], float, Array], None]

# Number of elements summed at a time, so that the sums (4 bytes each) stay in the level-1 cache.
_BLOCK = 4096


def combiner(name: str) -> Combine16 | None:
    """Return a function with the results of `sixteen.combine` for a dtype; None without numba."""
    code = cache.code("16-bit sums", _with_conversions, _COMBINE, _combine_loop, name)
    if code is None:
        return None
    function = code.call

    def combine(op: Callable[..., Any], sources: Sequence[Array], divisor: float,
                out: Array) -> None:
        p = len(sources)
        addresses = (ctypes.c_void_p * p)(*[x.ctypes.data for x in sources])
        block = thread_scratch.acquire()
        function(addresses, p, out.size, op is np.multiply, divisor, block.address,
                 out.ctypes.data)
        thread_scratch.release(block)

    return combine


def loop(
    label: str, function: Callable[..., None], signature: str,
) -> Callable[..., None] | None:
    """Return a compiled loop over vectors; None if numba is missing or cannot compile it.

    The loop accepts NumPy vectors, or None, as pointers. It does not check dtypes, lengths or
    contiguity. It runs without Python's lock. Division by zero gives Inf or NaN without a warning.
    LLVM does not vectorize an inner loop over vectors that may overlap.

    For the arguments, see `cache.code`.
    """
    return _of_vectors(cache.code(label, _identity, signature, function))


def loop_16(
    label: str, make: Callable[..., Callable[..., None]], signature: str, name: str,
) -> Callable[..., None] | None:
    """Return a compiled loop, like `loop`, that converts 16-bit numbers.

    Given two conversions of one number, from the 16 bits of a uint16 to float32 and back, `make`
    returns the function to compile.
    """
    return _of_vectors(cache.code(label, _with_conversions, signature, make, name))


def _identity(intrinsics: Any, function: Callable[..., None]) -> Callable[..., None]:
    return function


def _with_conversions(intrinsics: Any, make: Callable[..., Callable[..., None]],
                      name: str) -> Callable[..., None]:
    return make(*intrinsics.conversions(name))


def _of_vectors(code: cache.Code | None) -> Callable[..., None] | None:
    if code is None:
        return None
    function = code.call

    def call(*arguments: Any) -> None:
        function(*[x.ctypes.data if isinstance(x, np.ndarray) else x for x in arguments])

    return call


_COMBINE = "uint16** intp intp bool float32 float32* uint16*"


def _combine_loop(widen: Any, narrow: Any) -> Callable[..., None]:
    def combine(sources, p, n, multiplies, divisor, total, out):  # type: ignore[no-untyped-def]
        for start in range(0, n, _BLOCK):
            length = min(_BLOCK, n - start)
            for r in range(p):
                x = sources[r]
                if r == 0:
                    for i in range(length):
                        total[i] = widen(x[start + i])
                elif multiplies:
                    for i in range(length):
                        total[i] *= widen(x[start + i])
                else:
                    for i in range(length):
                        total[i] += widen(x[start + i])
            if divisor != 1:
                for i in range(length):
                    total[i] /= divisor
            # This comes last, because `out` may be one of the sources. No loop has two vectors that
            # may overlap, because LLVM would not vectorize it.
            for i in range(length):
                out[start + i] = narrow(total[i])

    return combine
