"""Encodes blocks of float32 as one scale, the mean magnitude, and one bit per element."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...arguments import whole_number
from ...errors import ConfigError
from ...memory import compiled
from ...memory.arrays import Array
from ...memory.reduction import quietly
from .base import InBlocks

# Sums of magnitudes are made in so many lanes, in the order of the elements, and these summed by
# halves: an order in which NumPy and a processor's vectors are both fast. It is also a word's.
_LANES = 32
_NAN = np.float32(np.nan)

_ENCODE = "float32* float32* uint32* float32* intp intp bool float32*"
_DECODE = "float32* uint32* float32* intp intp bool"


@dataclass(frozen=True)
class Sign(InBlocks):
    """The sign of each element, times the mean of |x| in its block.

    A block with Inf or NaN, or whose sum of |x| overflows, becomes Inf or NaN as a whole.
    Payload: all scales, then the signs, 32 to a little-endian word, the first in its lowest bit.

    Args:
        block: Elements that share a scale, a multiple of 32.

    Source: Bernstein et al., signSGD, ICML 2018; Karimireddy et al., ICML 2019, for the scale.
    """

    def __post_init__(self) -> None:
        if whole_number("block", self.block, 1) % _LANES:
            raise ConfigError(f"block={self.block}: expected a multiple of {_LANES}")

    def payload_size(self, n: int) -> int:
        """Return 4 bytes for each block of `n` elements, and 4 for each 32 elements."""
        return 4 * -(-n // self.block) + 4 * -(-n // _LANES)

    def encode(self, x: Array, payload: Array, lost: Array | None, key: int) -> None:
        """See `Codec.encode`; nothing is random."""
        scales, signs = self._fields(payload, x.size)
        loop = compiled.loop("signs", _encode_loop, _ENCODE)
        if loop is None:
            quietly(self._encode_by_numpy, x, scales, signs, lost)
        else:
            lanes = np.empty(_LANES, np.float32)
            loop(x, scales, signs, lost, x.size, self.block, lost is not None, lanes)

    def _encode_by_numpy(self, x: Array, scales: Array, signs: Array,
                         lost: Array | None) -> None:
        rows = self._rows(np.abs(x))
        lanes = np.add.reduce(rows.reshape(len(rows), self.block // _LANES, _LANES), axis=1)
        half = _LANES
        while half > 1:
            half //= 2
            lanes = lanes[:, :half] + lanes[:, half:]
        starts = np.arange(0, x.size, self.block)
        np.divide(lanes[:, 0], np.minimum(x.size - starts, self.block).astype(np.float32),
                  out=scales)
        scales[np.isnan(scales)] = _NAN
        bits = np.packbits(np.signbit(x), bitorder="little")
        signs[:bits.size], signs[bits.size:] = bits, 0
        if lost is not None:
            np.subtract(x, self._decoded(scales, signs, x.size), out=lost)

    def _decode_loop(self) -> Callable[..., None] | None:
        return compiled.loop("sums of signs", _decode_loop, _DECODE)

    def _decoded(self, scales: Array, codes: Array, n: int) -> Array:
        signs = 1 - 2 * np.unpackbits(codes, count=n, bitorder="little").view(np.int8)
        return signs * self._spread(scales, n)


def _encode_loop(x, scales, words, lost, n, block, loses, lanes):  # type: ignore[no-untyped-def]
    """Encode, as numba compiles it: the bits of `_encode_by_numpy`."""
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
