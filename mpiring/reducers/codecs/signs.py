"""Encodes blocks of float32 as one scale, the mean magnitude, and one bit per element."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...arguments import whole_number
from ...errors import ConfigError
from ...jit import loops
from ...memory.arrays import Array
from .base import BlockCodec

# Number of lanes that add magnitudes in the order of the elements; the lanes are then added in
# pairs. NumPy and vector instructions are both fast in this order. It is also the number of bits in
# a word of signs.
_LANES = 32
_NAN = np.float32(np.nan)

_ENCODE = "float32* float32* uint32* float32* intp intp float32* bool"
_DECODE = "float32* uint32* float32* intp intp bool"

# A word of signs is a row of a tile, and a lane adds the magnitudes in its column.
_ENCODE_BLOCK = f"""
        float x[ROWS], total = 0;
        long long at = 0;
        do {{
            load(x, job.x + start + at, size - at);
            unsigned int word = 0;
            #pragma unroll
            for (int row = 0; row < ROWS; ++row) {{
                const unsigned int bits = __float_as_uint(x[row]);
                total += __uint_as_float(bits & 0x7fffffffu);
                const unsigned int signs = __ballot_sync(~0u, bits >> 31);
                if (lane == row) word = signs;
            }}
            if (lane < ROWS && at + 32 * lane < size) job.codes[(start + at) / 32 + lane] = word;
        }} while (SEVERAL && (at += TILE) < size);
        float scale = sum_of_lanes(total) / (float)size;
        if (scale != scale) scale = __uint_as_float({_NAN.view(np.uint32):#x}u);
        if (lane == 0) job.scales[block] = scale;
        if (job.lost) {{
            at = 0;
            do {{
                if (SEVERAL) load(x, job.x + start + at, size - at);
                #pragma unroll
                for (int row = 0; row < ROWS; ++row)
                    x[row] -= __float_as_uint(x[row]) >> 31 ? -scale : scale;
                store(job.lost + start + at, x, size - at);
            }} while (SEVERAL && (at += TILE) < size);
        }}
"""
_DECODE_BLOCK = """
        const unsigned int scale = __float_as_uint(job.scales[block]);
        for (long long at = 0; at < size; at += TILE) {
            unsigned int word[ROWS];
            float out[ROWS];
            #pragma unroll
            for (int row = 0; row < ROWS; ++row)
                word[row] = at + 32 * row < size ? job.codes[(start + at) / 32 + row] : 0;
            if (job.adds) load(out, job.out + start + at, size - at);
            #pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                const float decoded = __uint_as_float(scale ^ word[row] >> lane << 31);
                out[row] = job.adds ? out[row] + decoded : decoded;
            }
            store(job.out + start + at, out, size - at);
        }
"""


@dataclass(frozen=True)
class Sign(BlockCodec):
    """Encodes the sign of each element, times the mean of |x| in its block.

    A block with Inf or NaN, or with an overflowing sum of |x|, becomes Inf or NaN. Payload: all
    scales, then the signs. A little-endian word has 32 of them, the first in its lowest bit.

    Args:
        block: Number of elements that share a scale; a multiple of 32.

    Sources: Bernstein et al., signSGD, ICML 2018. Karimireddy et al., ICML 2019, for the scale.
    """

    code_type, encode_text, decode_text = "unsigned int", _ENCODE_BLOCK, _DECODE_BLOCK

    def __post_init__(self) -> None:
        if whole_number("block", self.block, 1) % _LANES:
            raise ConfigError(f"block={self.block}: expected a multiple of {_LANES}")

    def payload_size(self, n: int) -> int:
        """Return 4 bytes per block, and 4 bytes per 32 elements."""
        return 4 * -(-n // self.block) + 4 * -(-n // _LANES)

    def _encode_loop(self) -> Callable[..., None] | None:
        return loops.loop("signs", _encode_loop, _ENCODE)

    def _decode_loop(self) -> Callable[..., None] | None:
        return loops.loop("sums of signs", _decode_loop, _DECODE)

    def _loop_numbers(self, key: int | None) -> Sequence[Any]:
        # Encoding also needs scratch memory.
        return (self.block,) if key is None else (self.block, np.empty(_LANES, np.float32))

    def _write(self, x: Array, fields: Sequence[Array], seed: int) -> None:
        scales, signs = fields
        rows = self._rows(np.abs(x)).reshape(-1, self.block // _LANES, _LANES)
        # Not by `sum`, which adds in another order.
        lanes = rows[:, 0]
        for i in range(1, rows.shape[1]):
            lanes += rows[:, i]
        half = _LANES
        while half > 1:
            half //= 2
            lanes = lanes[:, :half] + lanes[:, half:]
        counts = np.minimum(x.size - np.arange(0, x.size, self.block), self.block)
        np.divide(lanes[:, 0], counts.astype(np.float32), out=scales)
        scales[np.isnan(scales)] = _NAN
        bits = np.packbits(np.signbit(x), bitorder="little")
        signs[:bits.size], signs[bits.size:] = bits, 0

    def _read(self, fields: Sequence[Array], out: Array) -> None:
        scales, codes = fields
        signs = 1 - 2 * np.unpackbits(codes, bitorder="little")[:out.size].view(np.int8)
        np.multiply(signs, self._spread(scales, out.size), out=out)


def _encode_loop(x, scales, words, lost, n, block, lanes, loses):  # type: ignore[no-untyped-def]
    """Encode, compiled by numba, with the bits of `Sign._write`."""
    for number in range(-(-n // block)):
        start = number * block
        end = min(start + block, n)
        for j in range(_LANES):
            lanes[j] = np.float32(0)
        for first in range(start, end, _LANES):
            word = np.uint32(0)
            if first + _LANES <= end:
                for j in range(_LANES):
                    lanes[j] += abs(x[first + j])
                for j in range(_LANES):
                    bits = np.float32(x[first + j]).view(np.uint32)
                    word |= np.uint32(np.uint32(bits >> np.uint32(31)) << np.uint32(j))
            else:
                for j in range(end - first):
                    lanes[j] += abs(x[first + j])
                    bits = np.float32(x[first + j]).view(np.uint32)
                    word |= np.uint32(np.uint32(bits >> np.uint32(31)) << np.uint32(j))
            words[first // _LANES] = word
        half = _LANES
        while half > 1:
            half //= 2
            for j in range(half):
                lanes[j] += lanes[half + j]
        scale = lanes[0] / np.float32(end - start)
        scale = scale if scale == scale else _NAN
        scales[number] = scale
        if loses:
            for i in range(start, end):
                lost[i] = x[i] - (scale if np.float32(x[i]).view(np.int32) >= 0 else -scale)


def _decode_loop(scales, words, out, n, block, adds):  # type: ignore[no-untyped-def]
    for number in range(-(-n // block)):
        start = number * block
        end = min(start + block, n)
        scale = np.float32(scales[number]).view(np.uint32)
        for first in range(start, end, _LANES):
            word = words[first // _LANES]
            length = min(_LANES, end - first)
            for j in range(length):
                sign = np.uint32(np.uint32(word >> np.uint32(j)) << np.uint32(31))
                decoded = np.uint32(scale ^ sign).view(np.float32)
                out[first + j] = out[first + j] + decoded if adds else decoded
