"""Encodes blocks of float32 as one scale, the mean magnitude, and one bit per element."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...arguments import whole_number
from ...errors import ConfigError
from ...jit import loops
from .base import BlockCodec

# Number of lanes that add magnitudes in the order of the elements; the lanes are then added in
# pairs. NumPy and vector instructions are both fast in this order. It is also the number of bits in
# a word of signs.
_LANES = 32
_NAN = np.float32(np.nan)

_ENCODE = "float32* float32* uint32* float32* intp intp float32* bool"
_DECODE = "float32* uint32* float32* intp intp bool"


@dataclass(frozen=True)
class Sign(BlockCodec):
    """Encodes the sign of each element, times the mean of |x| in its block.

    A block with Inf or NaN, or with an overflowing sum of |x|, becomes Inf or NaN. Payload: all
    scales, then the signs. A little-endian word has 32 of them, the first in its lowest bit.

    Args:
        block: Number of elements that share a scale; a multiple of 32.

    Sources: Bernstein et al., signSGD, ICML 2018. Karimireddy et al., ICML 2019, for the scale.
    """

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

    def _write(self, xp: Any, x: Any, fields: Sequence[Any], key: int) -> None:
        scales, signs = fields
        rows = self._rows(xp, xp.abs(x)).reshape(-1, self.block // _LANES, _LANES)
        # Not by `sum`, whose order depends on the array package.
        lanes = rows[:, 0]
        for i in range(1, rows.shape[1]):
            lanes += rows[:, i]
        half = _LANES
        while half > 1:
            half //= 2
            lanes = lanes[:, :half] + lanes[:, half:]
        counts = xp.minimum(x.size - xp.arange(0, x.size, self.block), self.block)
        xp.divide(lanes[:, 0], counts.astype(np.float32), out=scales)
        scales[xp.isnan(scales)] = _NAN
        bits = xp.packbits(xp.signbit(x), bitorder="little")
        signs[:bits.size], signs[bits.size:] = bits, 0

    def _read(self, xp: Any, fields: Sequence[Any], out: Any) -> None:
        scales, codes = fields
        signs = 1 - 2 * xp.unpackbits(codes, bitorder="little")[:out.size].view(np.int8)
        xp.multiply(signs, self._spread(xp, scales, out.size), out=out)


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
