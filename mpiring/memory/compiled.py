"""Combines float16 and bfloat16 in one pass through memory, by code that numba compiles.

Only here is numba imported, and only when 16 bits are first to be combined: that takes 0.2 s and
50 MB, and compiling 0.6 s for each of the two dtypes, before the operation begins and on all ranks
at the same time. Nothing is kept on a disk: numba's cache is not made for many ranks, perhaps of
several kinds of processor, that fill it at once.
"""

import ctypes
import functools
import importlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .arrays import Array

Combine16 = Callable[[Callable[..., Any], Sequence[Array], float, Array], None]

# Elements whose sums are kept at a time: 4 bytes each, in the level-1 cache.
_BLOCK = 4096

_log = logging.getLogger("mpiring")
_compiling = threading.Lock()


class _Scratch(threading.local):
    """A thread's sums, and where they are, which takes NumPy a microsecond to tell."""

    def __init__(self) -> None:
        self.total = np.empty(_BLOCK, np.float32)
        self.address = self.total.ctypes.data


_scratch = _Scratch()


def combiner(name: str) -> Combine16 | None:
    """Return a function that does what `sixteen.combine` does, bit by bit; None if there is none.

    Args:
        name: Of the dtype, "float16" or "bfloat16".
    """
    with _compiling:
        return _combiner(name)


@functools.cache
def _combiner(name: str) -> Combine16 | None:
    try:
        numba = importlib.import_module("numba")
    except ImportError as error:
        # numba also refuses a version of NumPy that it does not know.
        _log.info("16-bit sums are made by NumPy, which takes longer: %s", error)
        return None
    _log.info("compiling 16-bit sums, which takes about a second")
    try:
        widen, narrow = _half_conversions(numba) if name == "float16" else (
            numba.njit(_widen_bfloat), numba.njit(_narrow_bfloat))
        return _caller(_compiled(numba, widen, narrow))
    except numba.errors.NumbaError as error:
        _log.info("%s sums are made by NumPy, which takes longer: %s", name, error)
        return None


def _compiled(numba: Any, widen: Any, narrow: Any) -> Any:
    """Compile the loops over sources and blocks, given the conversions of one number."""
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
            # Only here, since `out` may be one of the sources; and no loop has two vectors that
            # may overlap, or LLVM would not vectorise it.
            for i in range(length):
                out[start + i] = narrow(total[i])

    types = numba.types
    vector = types.CPointer(types.uint16)
    return numba.cfunc(types.void(
        types.CPointer(vector), types.intp, types.intp, types.boolean, types.float32,
        types.CPointer(types.float32), vector))(combine)


def _caller(kernel: Any) -> Combine16:
    # ctypes lets other threads run meanwhile.
    function = ctypes.CFUNCTYPE(
        None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_ssize_t, ctypes.c_bool, ctypes.c_float,
        ctypes.c_void_p, ctypes.c_void_p)(kernel.address)

    def combine(op: Callable[..., Any], sources: Sequence[Array], divisor: float,
                out: Array) -> None:
        p = len(sources)
        addresses = (ctypes.c_void_p * p)(*[x.ctypes.data for x in sources])
        function(addresses, p, out.size, op is np.multiply, divisor, _scratch.address,
                 out.ctypes.data)

    combine.kernel = kernel  # type: ignore[attr-defined]  # which owns the code
    return combine


def _widen_bfloat(bits: Any) -> Any:
    return np.uint32(np.uint32(bits) << 16).view(np.float32)


def _narrow_bfloat(x: Any) -> Any:
    # Without np.uint32 numba would go on in 64 bits, at half the speed.
    bits = np.float32(x).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> 16) & 1)
    rounded = np.uint32(np.uint32(bits + np.uint32(odd + 0x7fff)) >> 16)
    quiet_nan = np.uint32(np.uint32(bits >> 16) | 0x40)
    return np.uint16(rounded if x == x else quiet_nan)


def _half_conversions(numba: Any) -> tuple[Any, Any]:
    """Return conversions by the processor's own instructions, to which numba has no name."""
    from llvmlite import ir
    intrinsic, types = numba.extending.intrinsic, numba.types

    def widen(typing: Any, bits: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            _refuse_without_instructions(numba, context)
            return builder.fpext(builder.bitcast(values[0], ir.HalfType()), ir.FloatType())
        return types.float32(types.uint16), generate

    def narrow(typing: Any, x: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.bitcast(builder.fptrunc(values[0], ir.HalfType()), ir.IntType(16))
        return types.uint16(types.float32), generate

    return intrinsic(widen), intrinsic(narrow)


def _refuse_without_instructions(numba: Any, context: Any) -> None:
    """Raise where LLVM would call a library's function instead, which need not be there."""
    target, _, features = context.codegen().magic_tuple()
    if target.startswith("x86") and "+f16c" not in features.split(","):
        raise numba.errors.UnsupportedError("the processor does not convert float16 (F16C)")
