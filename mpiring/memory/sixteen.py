"""Converts float16 and bfloat16 to float32 and back, and combines them in float32.

Where numba is installed, `compiled` combines them. What is here needs only NumPy, whose own
casts of these types go element by element; shifts and masks of whole blocks are several
times faster.

A float16 s|eeeee|mmmmmmmmmm, spread out to s000eeeeemmmmmmmmmm0000000000000, is a
float32 that is 2**-112 times as large, subnormal numbers included: the smallest
normal exponent of float32 then stands where float16 has its own. Sums can be made
and rounded at that scale, and no exponent need be converted. Only Inf, NaN and
what would overflow do not survive it: blocks with any of these go another way.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from . import compiled
from .arrays import Array, dtype_name

# Elements in a block. A sum uses two scratch blocks of 4 bytes per element, which stay in
# a level-2 cache of 1 MiB; shorter blocks cost more calls, longer ones more misses.
BLOCK = 48 << 10

# A mean over more ranks is divided at its true scale: at float16's, a quotient is rounded
# to 2**-37 first, which could then make a tie (an odd multiple of 2**-25) of what is none.
_MOST_DIVIDED = 4096

_SCALE, _UNSCALE = np.float32(2.0**112), np.float32(2.0**-112)
_INFINITY = 0x7c00                          # the bits of float16's
_QUIET = np.uint32(0x40)                    # the bit of a quiet NaN in bfloat16
_LARGEST = np.float32(65519.996)            # the last that rounds to a finite float16
_SPREAD = np.int32(-0x70002000)             # 0x8fffe000: all but three copies of the sign
_SUBNORMAL = np.float32(2.0**-130)
_EXPONENT, _SIGN = np.int32(0x7f800000), np.int32(-0x80000000)

Wide = NDArray[np.float32]


class _Form(NamedTuple):
    """How a 16-bit number lies in a float32: see _round_off."""

    dropped: np.int32
    sign_and_last: np.int32
    below_half: np.int32


_HALF = _Form(np.int32(13), np.int32(0x10000001), np.int32(0x0fff))
_BFLOAT = _Form(np.int32(16), np.int32(1), np.int32(0x7fff))


class _Spare:
    """A thread's scratch blocks."""

    def __init__(self) -> None:
        self.blocks = np.empty((3, BLOCK), np.float32)
        self.smallest_normal = np.full(BLOCK, 2.0**-14, np.float32)


_of_this_thread = threading.local()


def _spare() -> _Spare:
    """Return this thread's scratch blocks, made when they are first needed."""
    try:
        spare: _Spare = _of_this_thread.spare
    except AttributeError:
        spare = _of_this_thread.spare = _Spare()
    return spare


def combiner(dtype: DTypeLike) -> compiled.Combine16:
    """Return the fastest way there is to do what `combine` does: numba's, or else NumPy's."""
    return compiled.combiner(dtype_name(dtype)) or combine


def widen(x: Array, out: Wide) -> None:
    """Convert a float16 or bfloat16 vector to float32, exactly.

    Args:
        x: Shape (n,), contiguous. As uint16 it is taken for the bits of bfloat16.
        out: Shape (n,), overwritten.
    """
    with np.errstate(all="ignore"):
        for start in range(0, x.size, BLOCK):
            _widen(x[start:start + BLOCK], out[start:start + BLOCK])


def narrow(x: Wide, out: Array) -> None:
    """Round a float32 vector to float16 or bfloat16: to nearest, ties to even.

    What is too large becomes Inf; NaN stays NaN, a quiet one.

    Args:
        x: Shape (n,), contiguous.
        out: Shape (n,), overwritten. As uint16 it is given the bits of bfloat16.
    """
    with np.errstate(all="ignore"):
        for start in range(0, x.size, BLOCK):
            _narrow(x[start:start + BLOCK], out[start:start + BLOCK])


def combine(
    op: Callable[..., Any], sources: Sequence[Array], divisor: float, out: Array,
) -> None:
    """Combine vectors of 16 bits in float32, in the order given, and round once, at the end.

    Args:
        op: numpy.add or numpy.multiply.
        sources: Vectors of float16 or of bfloat16, contiguous, of one length.
        divisor: The result is divided by it before it is rounded.
        out: Overwritten by the result; may be one of the sources.
    """
    for start in range(0, out.size, BLOCK):
        here = slice(start, start + BLOCK)
        _combine_block(op, [x[here] for x in sources], divisor, out[here])


def _combine_block(
    op: Callable[..., Any], sources: Sequence[Array], divisor: float, out: Array,
) -> None:
    half = out.dtype == np.float16
    if half and op is np.add and _sum_of_halves(sources, divisor, out):
        return
    total, term = _spare().blocks[:2, :out.size]
    _widen(sources[0], total)
    for x in sources[1:]:
        _widen(x, term)
        op(total, term, out=total)
    if divisor != 1:
        np.divide(total, np.float32(divisor), out=total)
    if half:
        _narrow(total, out)
    else:
        # A NaN that comes of bfloat16 numbers has no bits that could carry, so none is looked for.
        _round_off(total, out, _BFLOAT, term)


def _sum_of_halves(sources: Sequence[Array], divisor: float, out: Array) -> bool:
    """Sum float16 at its own scale; return False, and do nothing, where that cannot be sure."""
    p = len(sources)
    # p numbers below 2**(16 - k), where p <= 2**k, have a sum below the largest float16.
    k = (p - 1).bit_length() if divisor < p else 0
    if (divisor > _MOST_DIVIDED or _flushes_subnormals()
            or any(peak(x) >= _INFINITY - (k << 10) for x in sources)):
        return False
    total, term = _spare().blocks[:2, :out.size]
    _spread(sources[0], total)
    for x in sources[1:]:
        _spread(x, term)
        np.add(total, term, out=total)
    if divisor != 1:
        np.divide(total, np.float32(divisor), out=total)
    _round_off(total, out, _HALF, term)
    return True


def peak(x: Array) -> int:
    """Return the bits of the largest magnitude in a vector of 16-bit floats that is not empty."""
    positive = np.maximum.reduce(x.view(np.int16))
    negative = np.maximum.reduce(x.view(np.uint16))
    return max(int(positive), int(negative) - 0x8000)


def _flushes_subnormals() -> bool:
    """Return whether this thread takes float32's subnormal numbers for zero.

    Some libraries, such as those built with -ffast-math, let the processor do so. Float16's
    own subnormal numbers, which gradients often are, are no such numbers of float32 and must
    survive it: but not at their own scale, where they are.
    """
    return bool(_SUBNORMAL * np.float32(1) == 0)


def _spread(x: Array, out: Wide) -> None:
    """Write float16 numbers, 2**-112 times as large, as float32."""
    bits = out.view(np.int32)
    np.copyto(bits, x.view(np.int16))
    np.left_shift(bits, _HALF.dropped, out=bits)
    np.bitwise_and(bits, _SPREAD, out=bits)


def _round_off(x: Wide, out: Array, form: _Form, spare: Wide) -> None:
    """Round to bfloat16, or numbers that are 2**-112 times as large to float16."""
    bits, t = x.view(np.int32), spare.view(np.int32)
    # Add what carries into the kept bits where these must grow: just below half of the last
    # one, and 1 more if it is odd; and the sign where, once shifted, float16 has it.
    np.right_shift(bits, form.dropped, out=t)
    np.bitwise_and(t, form.sign_and_last, out=t)
    np.add(t, form.below_half, out=t)
    np.add(t, bits, out=t)
    np.right_shift(t, form.dropped, out=t)
    np.copyto(out.view(np.int16), t, casting="unsafe")


def _widen(x: Array, out: Wide) -> None:
    if x.dtype != np.float16:
        bits = out.view(np.int32)
        np.copyto(bits, x.view(np.int16))
        np.left_shift(bits, _BFLOAT.dropped, out=bits)
    elif peak(x) < _INFINITY and not _flushes_subnormals():
        _spread(x, out)
        np.multiply(out, _SCALE, out=out)
    else:
        np.copyto(out, x)


def _narrow(x: Wide, out: Array) -> None:
    """Round a block, which may be the first of this thread's scratch blocks."""
    spare, rounded = _spare().blocks[1:, :x.size]
    # A carry could turn NaN into Inf or zero, and 2**16 at float16's scale is beyond Inf.
    if out.dtype != np.float16:
        _round_off(x, out, _BFLOAT, spare)
        if np.isnan(np.maximum.reduce(x)):
            nan = np.isnan(x)
            out.view(np.uint16)[nan] = x.view(np.uint32)[nan] >> _BFLOAT.dropped | _QUIET
        return
    if not _flushes_subnormals() and np.maximum.reduce(np.absolute(x, out=spare)) <= _LARGEST:
        _round_to_half(x, rounded, spare)
        np.multiply(rounded, _UNSCALE, out=rounded)
        return _round_off(rounded, out, _HALF, spare)
    # NumPy's cast; the multiplication makes NaN quiet.
    np.copyto(out, x * np.float32(1), casting="unsafe")


def _round_to_half(x: Wide, out: Wide, spare: Wide) -> None:
    """Round float32 numbers to those that float16 has, by adding and subtracting a large one.

    Only then are they exact at float16's scale, where small ones have fewer bits.
    """
    t = spare.view(np.int32)
    np.bitwise_and(x.view(np.int32), _EXPONENT, out=t)      # the power of two below each
    np.maximum(spare, _spare().smallest_normal[:x.size], out=spare)
    # 13 bits further up, its float32 neighbours are as far apart as those of x in float16.
    np.multiply(spare, np.float32(1.5 * 2**13), out=spare)
    np.add(x, spare, out=out)
    np.subtract(out, spare, out=out)
    np.bitwise_and(x.view(np.int32), _SIGN, out=t)          # what became zero has lost it
    np.bitwise_or(out.view(np.int32), t, out=out.view(np.int32))
