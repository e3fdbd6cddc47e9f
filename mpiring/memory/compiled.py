"""Compiles loops over vectors with numba: sums of float16 and bfloat16, and loops of codecs.

Only this file imports numba, and only when a loop is first needed: the import takes 0.2 s and
50 MB, compiling 0.1 to 0.6 s per loop, before the operation begins and on all ranks at once. Code
is not cached on disk: numba's cache is not made for many ranks, perhaps on different processors,
that fill it at the same time.
"""

import ctypes
import importlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .arrays import Array

Combine16 = Callable[[Callable[..., Any], Sequence[Array], float, Array], None]

# Elements that are summed at a time: at 4 bytes each, the sums stay in the level-1 cache.
_BLOCK = 4096

_log = logging.getLogger("mpiring")
_compiling = threading.Lock()
_functions: dict[Any, Any] = {}


class _Scratch(threading.local):
    """A thread's sums, and their address, for which NumPy takes a microsecond."""

    def __init__(self) -> None:
        self.total = np.empty(_BLOCK, np.float32)
        self.address = self.total.ctypes.data


_scratch = _Scratch()


def combiner(name: str) -> Combine16 | None:
    """Return a function with the results of `sixteen.combine`; None where numba is missing.

    Args:
        name: Of the dtype, "float16" or "bfloat16".
    """
    function = _once("16-bit sums", _combine_loop, _COMBINE, name)
    return None if function is None else _caller(function)


def loop(
    what: str, function: Callable[..., None], signature: str,
) -> Callable[..., None] | None:
    """Return a compiled loop over vectors; None where numba is missing or cannot compile it.

    The loop takes NumPy vectors, or None, for pointers, and checks neither dtypes, nor lengths,
    nor whether vectors are contiguous. Other threads run meanwhile. Division by zero gives Inf or
    NaN without a warning. LLVM does not vectorise an inner loop over vectors that may overlap.

    Args:
        what: What the loop computes, for the log: a plural.
        function: Of pointers and numbers, in the Python that numba compiles.
        signature: Their types, separated by spaces, such as "float32* int8* intp".
    """
    return _of_vectors(_once(what, function, signature, None))


def loop_16(
    what: str, make: Callable[..., Callable[..., None]], signature: str, name: str,
) -> Callable[..., None] | None:
    """Return a compiled loop, as `loop` does, of a function that converts 16-bit numbers.

    Args:
        what, signature: See `loop`.
        make: Returns the function, given two that convert one number: from the 16 bits of a
            uint16 to float32, and back.
        name: Of the dtype, "float16" or "bfloat16".
    """
    return _of_vectors(_once(what, make, signature, name))


def _once(what: str, make: Callable[..., Any], signature: str, name: str | None) -> Any:
    """Return a compiled function, made by the first thread that needs it; None without numba."""
    key = (make, name)
    if key not in _functions:
        with _compiling:
            if key not in _functions:
                _functions[key] = _made(what, make, signature, name)
    return _functions[key]


def _made(what: str, make: Callable[..., Any], signature: str, name: str | None) -> Any:
    try:
        numba = importlib.import_module("numba")
    except ImportError as error:
        # numba raises it, too, where NumPy is newer than it supports.
        _log.info("%s are made by NumPy, which takes longer: %s", what, error)
        return None
    _log.info("compiling %s, which takes about a second", what)
    try:
        function = make if name is None else make(*_conversions(numba, name))
        return _compiled(numba, function, signature.split())
    except numba.errors.NumbaError as error:
        _log.info("%s are made by NumPy, which takes longer: %s", what, error)
        return None


def _compiled(numba: Any, function: Callable[..., None], signature: Sequence[str]) -> Any:
    """Compile a function of pointers and numbers; return it as ctypes calls it."""
    types, c_types = [], []
    for name in signature:
        base = name.rstrip("*")
        kind = numba.from_dtype(np.dtype(base))
        for _ in range(len(name) - len(base)):
            kind = numba.types.CPointer(kind)
        types.append(kind)
        c_types.append(ctypes.c_void_p if name != base else np.ctypeslib.as_ctypes_type(base))
    kernel = numba.cfunc(numba.types.void(*types), error_model="numpy")(function)
    # ctypes releases Python's lock during the call.
    call = ctypes.CFUNCTYPE(None, *c_types)(kernel.address)
    call.kernel = kernel  # type: ignore[attr-defined]  # which owns the code
    return call


def _of_vectors(function: Any) -> Callable[..., None] | None:
    """Return a function that takes vectors where the compiled one takes addresses."""
    if function is None:
        return None

    def call(*arguments: Any) -> None:
        function(*[x.ctypes.data if isinstance(x, np.ndarray) else x for x in arguments])

    return call


_COMBINE = "uint16** intp intp bool float32 float32* uint16*"


def _combine_loop(widen: Any, narrow: Any) -> Callable[..., None]:
    """Return the loops over sources and blocks, given the conversions of one number."""
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

    return combine


def _caller(function: Any) -> Combine16:
    def combine(op: Callable[..., Any], sources: Sequence[Array], divisor: float,
                out: Array) -> None:
        p = len(sources)
        addresses = (ctypes.c_void_p * p)(*[x.ctypes.data for x in sources])
        function(addresses, p, out.size, op is np.multiply, divisor, _scratch.address,
                 out.ctypes.data)

    return combine


def _conversions(numba: Any, name: str) -> tuple[Any, Any]:
    """Return functions that convert the bits of a 16-bit number to float32, and back."""
    if name == "float16":
        return _half_conversions(numba)
    return numba.njit(_widen_bfloat), numba.njit(_narrow_bfloat)


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
    """Return conversions by the processor's own instructions, for which numba has no name."""
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
    """Raise where LLVM would call a function of a library that may be missing."""
    target, _, features = context.codegen().magic_tuple()
    if target.startswith("x86") and "+f16c" not in features.split(","):
        raise numba.errors.UnsupportedError("the processor does not convert float16 (F16C)")
