"""Encodes blocks of float32 as one scale and 8 bits per element, with unbiased random rounding."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...arguments import whole_number
from ...jit import loops
from ...memory.arrays import Array
from .base import BlockCodec, mixed

_INFINITY = np.uint32(0x7f800000)               # the bits of float32 infinity
_NAN = np.float32(np.nan)
_SMALLEST = np.float32(2.0**-126)               # the smallest scale that is not subnormal
_STEPS = np.float32(127)
# The largest scale. The next larger number is the float32 maximum / 127, rounded; it overflows if
# multiplied by 127.
_LARGEST = np.nextafter(np.finfo(np.float32).max / _STEPS, np.float32(0))
# Numerator of the inverse scale. The margin below 127 covers the rounding of the product and one
# unit in its last place, so the sum with any u < 1 remains below 128.
_JUST_BELOW = np.float32(127 - 2.0**-15)
_GOLDEN, _FIRST, _SECOND = np.uint32(0x9e3779b1), np.uint32(0x7feb352d), np.uint32(0x846ca68b)
_FRACTION = np.float32(2.0**-23)

_ENCODE = "float32* float32* int8* float32* intp intp uint32 bool"
_DECODE = "float32* int8* float32* intp intp bool"

_ENCODE_BLOCK = f"""
        float x[ROWS];
        unsigned int peak = 0;
        long long at = 0;
        do {{
            load(x, job.x + start + at, size - at);
            #pragma unroll
            for (int row = 0; row < ROWS; ++row) {{
                const unsigned int bits = __float_as_uint(x[row]) & 0x7fffffffu;
                peak = bits > peak ? bits : peak;
            }}
        }} while (SEVERAL && (at += TILE) < size);
        #pragma unroll
        for (int other = 16; other; other /= 2) {{
            const unsigned int bits = __shfl_xor_sync(~0u, peak, other);
            peak = bits > peak ? bits : peak;
        }}
        const float largest = __uint_as_float(peak), most = {float(_LARGEST).hex()}f;
        float scale = largest / {_STEPS:.1f}f, inverse = 0;
        scale = scale < most ? scale : most;
        if (peak >= {_INFINITY:#x}u) scale = __uint_as_float({_NAN.view(np.uint32):#x}u);
        else if (scale < {float(_SMALLEST).hex()}f) scale = 0;
        else inverse = {float(_JUST_BELOW).hex()}f / largest;
        if (lane == 0) job.scales[block] = scale;
        at = 0;
        do {{
            signed char code[ROWS];
            if (SEVERAL) load(x, job.x + start + at, size - at);
            #pragma unroll
            for (int row = 0; row < ROWS; ++row) {{
                unsigned int h = (unsigned int)(start + at + 32 * row + lane);
                h = h * {_GOLDEN:#x}u + job.seed;
                h = (h ^ h >> 16) * {_FIRST:#x}u;
                h = (h ^ h >> 15) * {_SECOND:#x}u >> 9;
                const float u = (float)(int)h * {float(_FRACTION).hex()}f;
                // Inf times 0 is NaN, which becomes 0.
                code[row] = (signed char)__float2int_rd(x[row] * inverse + u);
            }}
            store(job.codes + start + at, code, size - at);
            if (job.lost) {{
                #pragma unroll
                for (int row = 0; row < ROWS; ++row) x[row] -= (float)code[row] * scale;
                store(job.lost + start + at, x, size - at);
            }}
        }} while (SEVERAL && (at += TILE) < size);
"""
_DECODE_BLOCK = """
        const float scale = job.scales[block];
        for (long long at = 0; at < size; at += TILE) {
            signed char code[ROWS];
            float out[ROWS];
            load(code, job.codes + start + at, size - at);
            if (job.adds) load(out, job.out + start + at, size - at);
            #pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                const float decoded = (float)code[row] * scale;
                out[row] = job.adds ? out[row] + decoded : decoded;
            }
            store(job.out + start + at, out, size - at);
        }
"""


@dataclass(frozen=True)
class EightBit(BlockCodec):
    """Rounds x to multiples of max|x| / 127 in each block, up or down at random.

    The code of x is floor(x / scale + u). The offset u, a hash of key and index, is uniform in
    [0, 1), so that the mean over keys is x. A block whose scale would be zero or subnormal gets
    scale 0, and becomes zero. A block with Inf or NaN becomes NaN. Payload: all scales, then an
    int8 of each element.

    Args:
        block: Number of elements that share a scale.

    Sources: Alistarh et al., QSGD, NeurIPS 2017. Wellons, hash-prospector, 2018, for the hash.
    """

    code_type, encode_text, decode_text = "signed char", _ENCODE_BLOCK, _DECODE_BLOCK

    def __post_init__(self) -> None:
        whole_number("block", self.block, 1)

    def payload_size(self, n: int) -> int:
        """Return 1 byte per element, and 4 bytes per block."""
        return n + 4 * -(-n // self.block)

    def _encode_loop(self) -> Callable[..., None] | None:
        return loops.loop("8-bit codes", _encode_loop, _ENCODE)

    def _decode_loop(self) -> Callable[..., None] | None:
        return loops.loop("sums of 8-bit codes", _decode_loop, _DECODE)

    def _loop_numbers(self, key: int | None) -> Sequence[Any]:
        return (self.block,) if key is None else (self.block, mixed(key))

    def _write(self, x: Array, fields: Sequence[Array], seed: int) -> None:
        scales, codes = fields
        peak = np.abs(self._rows(x)).max(axis=1)
        np.minimum(peak / _STEPS, _LARGEST, out=scales)
        scales[scales < _SMALLEST] = 0
        scales[~np.isfinite(peak)] = _NAN
        inverse = np.where(scales > 0, _JUST_BELOW / peak, np.float32(0))
        values = _uniform(x.size, seed)
        values += x * self._spread(inverse, x.size)
        np.floor(values, out=values)
        # Inf times 0 is NaN.
        values[np.isnan(values)] = 0
        codes.view(np.int8)[...] = values

    def _read(self, fields: Sequence[Array], out: Array) -> None:
        scales, codes = fields
        np.multiply(codes.view(np.int8), self._spread(scales, out.size), out=out)


def _uniform(n: int, seed: int) -> Array:
    """Return u for the elements 0 to n - 1."""
    h = np.arange(n, dtype=np.uint32)
    h *= _GOLDEN
    h += np.uint32(seed)
    h ^= h >> np.uint32(16)
    h *= _FIRST
    h ^= h >> np.uint32(15)
    h *= _SECOND
    h >>= np.uint32(9)
    # NumPy converts int32 faster than uint32.
    u = h.view(np.int32).astype(np.float32)
    u *= _FRACTION
    return u


def _encode_loop(x, scales, values, lost, n, block, seed, loses):  # type: ignore[no-untyped-def]
    """Encode, compiled by numba; conversions to uint32 prevent arithmetic in 64 bits."""
    for number in range(-(-n // block)):
        start = number * block
        end = min(start + block, n)
        peak = np.uint32(0)
        for i in range(start, end):
            peak = max(peak, np.uint32(np.float32(x[i]).view(np.uint32) & np.uint32(0x7fffffff)))
        largest = np.uint32(peak).view(np.float32)
        scale = min(largest / _STEPS, _LARGEST)
        inverse = np.float32(0)
        if peak >= _INFINITY:
            scale = _NAN
        elif scale < _SMALLEST:
            scale = np.float32(0)
        else:
            inverse = _JUST_BELOW / largest
        scales[number] = scale
        if inverse > 0:
            for i in range(start, end):
                h = np.uint32(np.uint32(np.uint32(i) * _GOLDEN) + seed)
                h = np.uint32(h ^ np.uint32(h >> np.uint32(16)))
                h = np.uint32(h * _FIRST)
                h = np.uint32(h ^ np.uint32(h >> np.uint32(15)))
                h = np.uint32(np.uint32(h * _SECOND) >> np.uint32(9))
                u = np.float32(np.int32(h)) * _FRACTION
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
        for i in range(start, end):
            decoded = np.float32(values[i]) * scale
            out[i] = out[i] + decoded if adds else decoded
