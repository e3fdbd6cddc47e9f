"""Encodes blocks of float32 as one scale and 8 bits per element, rounded at random, unbiased."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...arguments import whole_number
from ...memory import compiled
from ...memory.arrays import Array
from ...memory.reduction import quietly
from .base import InBlocks, mixed

_INFINITY = np.uint32(0x7f800000)               # the bits of float32's
_NAN = np.float32(np.nan)
SMALLEST = np.float32(2.0**-126)               # a scale: the last that is not subnormal
STEPS = np.float32(127)
# 127 times the next one, float32's largest / 127 as it is rounded, would overflow.
LARGEST = np.nextafter(np.finfo(np.float32).max / STEPS, np.float32(0))
# So much is divided by the largest |x| and multiplied by x. It is as far below 127 as rounding
# may lift the product, plus 1 of its last bit: with any u < 1 the sum stays below 128.
JUST_BELOW = np.float32(127 - 2.0**-15)
GOLDEN, FIRST, SECOND = np.uint32(0x9e3779b1), np.uint32(0x7feb352d), np.uint32(0x846ca68b)
FRACTION = np.float32(2.0**-23)

_ENCODE = "float32* float32* int8* float32* intp intp uint32 bool"
_DECODE = "float32* int8* float32* intp intp bool"


@dataclass(frozen=True)
class EightBit(InBlocks):
    """Multiples of max|x| / 127 in each block, rounded up or down at random: floor(x / scale + u).

    u is uniform in [0, 1), a hash of key and index, so that the mean over keys is x. A block
    whose scale would be zero or subnormal gets scale 0, and is lost as a whole; one with Inf or
    NaN becomes NaN as a whole. Payload: all scales, then an int8 of each element.

    Args:
        block: Elements that share a scale.

    Source: Alistarh et al., QSGD, NeurIPS 2017; the hash: Wellons, hash-prospector, 2018.
    """

    def __post_init__(self) -> None:
        whole_number("block", self.block, 1)

    def payload_size(self, n: int) -> int:
        """Return 1 byte for each of `n` elements, and 4 for each block."""
        return n + 4 * -(-n // self.block)

    def encode(self, x: Array, payload: Array, lost: Array | None, key: int) -> None:
        """See `Codec.encode`."""
        scales, codes = self._fields(payload, x.size)
        loop = compiled.loop("8-bit codes", _encode_loop, _ENCODE)
        seed = mixed(key)
        if loop is None:
            quietly(self._encode_by_numpy, x, scales, codes, lost, seed)
        else:
            loop(x, scales, codes, lost, x.size, self.block, seed, lost is not None)

    def _encode_by_numpy(self, x: Array, scales: Array, codes: Array, lost: Array | None,
                         seed: int) -> None:
        peak = np.abs(self._rows(x)).max(axis=1)
        np.minimum(peak / STEPS, LARGEST, out=scales)
        scales[scales < SMALLEST] = 0
        scales[~np.isfinite(peak)] = _NAN
        inverse = np.where(scales > 0, JUST_BELOW / peak, np.float32(0))
        values = _uniform(x.size, seed)
        values += x * self._spread(inverse, x.size)
        np.floor(values, out=values)
        # Inf times 0 is NaN.
        values[np.isnan(values)] = 0
        np.copyto(codes.view(np.int8), values, casting="unsafe")
        if lost is not None:
            np.subtract(x, self._decoded(scales, codes, x.size), out=lost)

    def _decode_loop(self) -> Callable[..., None] | None:
        return compiled.loop("sums of 8-bit codes", _decode_loop, _DECODE)

    def _decoded(self, scales: Array, codes: Array, n: int) -> Array:
        return codes.view(np.int8) * self._spread(scales, n)


def _uniform(n: int, seed: int) -> Array:
    """Return u of the elements 0 to n - 1."""
    h = np.arange(n, dtype=np.uint32)
    h *= GOLDEN
    h += np.uint32(seed)
    h ^= h >> np.uint32(16)
    h *= FIRST
    h ^= h >> np.uint32(15)
    h *= SECOND
    h >>= np.uint32(9)
    # NumPy converts int32 faster than uint32.
    u: Array = h.view(np.int32).astype(np.float32)
    u *= FRACTION
    return u


def _encode_loop(x, scales, values, lost, n, block, seed, loses):  # type: ignore[no-untyped-def]
    """Encode, as numba compiles it: uint32 everywhere, or it would go on in 64 bits."""
    for number in range(-(-n // block)):
        start = number * block
        end = min(start + block, n)
        peak = np.uint32(0)
        for i in range(start, end):
            peak = max(peak, np.uint32(np.float32(x[i]).view(np.uint32) & np.uint32(0x7fffffff)))
        largest = np.uint32(peak).view(np.float32)
        scale = min(largest / STEPS, LARGEST)
        inverse = np.float32(0)
        if peak >= _INFINITY:
            scale = _NAN
        elif scale < SMALLEST:
            scale = np.float32(0)
        else:
            inverse = JUST_BELOW / largest
        scales[number] = scale
        if inverse > 0:
            for i in range(start, end):
                h = np.uint32(np.uint32(np.uint32(i) * GOLDEN) + seed)
                h = np.uint32(h ^ np.uint32(h >> np.uint32(16)))
                h = np.uint32(h * FIRST)
                h = np.uint32(h ^ np.uint32(h >> np.uint32(15)))
                h = np.uint32(np.uint32(h * SECOND) >> np.uint32(9))
                u = np.float32(np.int32(h)) * FRACTION
                values[i] = np.int8(np.int32(np.floor(x[i] * inverse + u)))
        else:
            for i in range(start, end):
                values[i] = np.int8(0)
        if loses:
            for i in range(start, end):
                lost[i] = x[i] - np.float32(values[i]) * scale


def _decode_loop(scales, values, out, n, block, adds):  # type: ignore[no-untyped-def]
    for number in range(-(-n // block)):
        start = number * block
        end = min(start + block, n)
        scale = scales[number]
        if adds:
            for i in range(start, end):
                out[i] += np.float32(values[i]) * scale
        else:
            for i in range(start, end):
                out[i] = np.float32(values[i]) * scale
