"""What compiled functions need and numba has no name for, in LLVM's terms.

Imported by `machine` alone, when something is compiled: it imports numba.
"""

from typing import Any

import numba.extending
import numpy as np
from llvmlite import ir
from numba import types


def conversions(name: str) -> tuple[Any, Any]:
    """Return functions that convert the bits of a 16-bit number to float32, and back.

    Args:
        name: Of the dtype, "float16" or "bfloat16".
    """
    return (_widen_half, _narrow_half) if name == "float16" else (_widen_bfloat, _narrow_bfloat)


@numba.njit
def _widen_bfloat(bits: Any) -> Any:
    return np.uint32(np.uint32(bits) << 16).view(np.float32)


@numba.njit
def _narrow_bfloat(x: Any) -> Any:
    # Without np.uint32 numba would go on in 64 bits, at half the speed.
    bits = np.float32(x).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> 16) & 1)
    rounded = np.uint32(np.uint32(bits + np.uint32(odd + 0x7fff)) >> 16)
    quiet_nan = np.uint32(np.uint32(bits >> 16) | 0x40)
    return np.uint16(rounded if x == x else quiet_nan)


@numba.extending.intrinsic
def _widen_half(typing: Any, bits: Any) -> Any:
    """Convert by the processor's own instruction."""
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        _refuse_without_instructions(context)
        return builder.fpext(builder.bitcast(values[0], ir.HalfType()), ir.FloatType())
    return types.float32(types.uint16), generate


@numba.extending.intrinsic
def _narrow_half(typing: Any, x: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.bitcast(builder.fptrunc(values[0], ir.HalfType()), ir.IntType(16))
    return types.uint16(types.float32), generate


def _refuse_without_instructions(context: Any) -> None:
    """Raise where LLVM would call a function of a library that may be missing."""
    target, _, features = context.codegen().magic_tuple()
    if target.startswith("x86") and "+f16c" not in features.split(","):
        raise numba.errors.UnsupportedError("the processor does not convert float16 (F16C)")
