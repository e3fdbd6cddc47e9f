"""Converts float16 and bfloat16 to float32 and back, and combines them in float32, with NumPy.

If numba is installed, `jit.loops` combines them several times as fast.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .arrays import Array
from .scratch import BLOCK_BYTES, thread_scratch

# Number of elements in a block: two blocks of float32 fill a thread's scratch memory. Shorter ones
# cost more calls. Measured.
BLOCK = BLOCK_BYTES // 8


def widen(x: Array, out: Array) -> None:
    """Convert a float16 or bfloat16 vector to float32, exactly.

    The vectors are contiguous. A uint16 vector holds the bits of bfloat16.
    """
    if x.dtype == np.uint16:
        np.left_shift(x, 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        with np.errstate(all="ignore"):
            out[...] = x


def narrow(x: Array, out: Array) -> None:
    """Round a float32 vector to float16 or bfloat16: to nearest, ties to even.

    Numbers that are too large become Inf; NaN stays NaN. For the vectors, see `widen`.
    """
    with np.errstate(all="ignore"):
        for start in range(0, x.size, BLOCK):
            block = x[start:start + BLOCK]
            if out.dtype == np.uint16:
                block = _bfloat_bits(block)
            elif out.dtype == np.float16:
                # This makes a signaling NaN quiet, like a processor's conversion.
                block = block * np.float32(1)
            out[start:start + BLOCK] = block


def _bfloat_bits(x: Array) -> Array:
    bits = x.view(np.uint32)
    # A carry would turn NaN into Inf or zero.
    return np.where(np.isnan(x), bits >> 16 | 0x40, bits + (bits >> 16 & 1) + 0x7fff >> 16)


def combine(
    op: Callable[..., Any], sources: Sequence[Array], divisor: float, out: Array,
) -> None:
    """Add or multiply 16-bit vectors in float32, in the given order, and round once, at the end.

    The vectors are contiguous; `out` may be one of the sources. The divisor applies before
    rounding.
    """
    borrowed = thread_scratch.acquire()
    scratch = borrowed.memory.view(np.float32).reshape(2, BLOCK)
    for start in range(0, out.size, BLOCK):
        block = slice(start, start + BLOCK)
        total, term = scratch[:, :out[block].size]
        np.copyto(total, sources[0][block])
        for x in sources[1:]:
            np.copyto(term, x[block])
            op(total, term, out=total)
        if divisor != 1:
            np.divide(total, np.float32(divisor), out=total)
        np.copyto(out[block], total, casting="unsafe")
    thread_scratch.release(borrowed)
