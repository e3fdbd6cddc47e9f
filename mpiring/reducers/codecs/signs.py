"""Encodes blocks of float32 as one scale, the mean magnitude, and one bit per element."""

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...arguments import whole_number
from ...errors import ConfigError
from ...memory import compiled
from ...memory.arrays import Array
from ...memory.reduction import quietly
from . import pieces
from .pieces import APART, NOWHERE

# Sums of magnitudes are made in so many lanes, in the order of the elements, and these summed by
# halves: an order in which NumPy and a processor's vectors are both fast. It is also a word's.
_LANES = 32
_SIGN = np.uint32(0x80000000)
_NAN = np.float32(np.nan)

_ENCODE = "float32* float32* uint32* float32* intp intp intp float32*"
_DECODE = "float32* uint32* float32* intp intp bool"


@dataclass(frozen=True)
class Sign(pieces.InBlocks):
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
        scales, signs = self._parts(payload, x.size)
        loop = compiled.loop("signs", _encode_loop, _ENCODE)
        if loop is None:
            quietly(_encode, x, scales, signs, lost, self.block)
        else:
            place = pieces.place_of_lost(x, lost)
            lanes = pieces.scratch(_LANES)[0]
            loop(x, scales, signs, lost, x.size, self.block, place, lanes)

    def _decode(self, payload: Array, out: Array, adds: bool) -> None:
        scales, signs = self._parts(payload, out.size)
        loop = compiled.loop("sums of signs", _decode_loop, _DECODE)
        if loop is None:
            quietly(_decode, scales, signs, out, self.block, adds)
        else:
            loop(scales, signs, out, out.size, self.block, adds)


def _encode(x: Array, scales: Array, signs: Array, lost: Array | None, block: int) -> None:
    for here, blocks, shape in pieces.pieces(x.size, block):
        _mean_magnitudes(x[here], shape, scales[blocks])
        bits = signs[here.start // 8:-(-here.stop // _LANES) * 4]
        packed = np.packbits(np.signbit(x[here]), bitorder="little")
        bits[:packed.size] = packed
        bits[packed.size:] = 0
        if lost is not None:
            decoded = pieces.scratch(bits.size * 8)[0]
            _spread(bits, scales[blocks], shape, decoded)
            np.subtract(x[here], decoded[:x[here].size], out=lost[here])


def _mean_magnitudes(x: Array, shape: tuple[int, int], scales: Array) -> None:
    rows, length = shape
    padded = -(-length // _LANES) * _LANES
    magnitudes = pieces.scratch(rows * padded)[0]
    np.absolute(x, out=magnitudes[:x.size])
    magnitudes[x.size:] = 0
    lanes = np.add.reduce(magnitudes.reshape(rows, -1, _LANES), axis=1)
    half = _LANES
    while half > 1:
        half //= 2
        lanes = lanes[:, :half] + lanes[:, half:]
    np.divide(lanes[:, 0], np.float32(length), out=scales)
    scales[np.isnan(scales)] = _NAN


def _spread(bits: Array, scales: Array, shape: tuple[int, int], out: Array) -> None:
    """Write ±scale for each of the bits, those that pad the last word included."""
    words = out.view(np.uint32)
    np.take(_signs(), bits, axis=0, out=words.reshape(-1, 8), mode="clip")
    if shape[0] > 1:
        np.bitwise_xor(words.reshape(shape), scales.view(np.uint32)[:, None],
                       out=words.reshape(shape))
    else:
        np.bitwise_xor(words, scales.view(np.uint32)[0], out=words)


@functools.cache
def _signs() -> NDArray[np.uint32]:
    """Return, for each byte, the signs of 8 float32 numbers; only read."""
    every = np.arange(256, dtype=np.uint8)[:, None]
    signs: NDArray[np.uint32] = np.unpackbits(every, axis=1, bitorder="little") * _SIGN
    return signs


def _decode(scales: Array, signs: Array, out: Array, block: int, adds: bool) -> None:
    for here, blocks, shape in pieces.pieces(out.size, block):
        bits = signs[here.start // 8:-(-here.stop // _LANES) * 4]
        decoded = pieces.scratch(bits.size * 8)[0]
        _spread(bits, scales[blocks], shape, decoded)
        to = out[here]
        if adds:
            np.add(to, decoded[:to.size], out=to)
        else:
            np.copyto(to, decoded[:to.size])


def _encode_loop(x, scales, words, lost, n, block, place, lanes):  # type: ignore[no-untyped-def]
    """Do what `_encode` does, as numba compiles it."""
    for start in range(0, n, block):
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
        scales[start // block] = scale
        if place == APART:
            for i in range(start, end):
                lost[i] = x[i] - (scale if np.float32(x[i]).view(np.int32) >= 0 else -scale)
        elif place != NOWHERE:
            for i in range(start, end):
                lost[i] -= scale if np.float32(lost[i]).view(np.int32) >= 0 else -scale


def _decode_loop(scales, words, out, n, block, adds):  # type: ignore[no-untyped-def]
    for start in range(0, n, block):
        end = min(start + block, n)
        scale = np.float32(scales[start // block]).view(np.uint32)
        for first in range(start, end, _LANES):
            word = words[first // _LANES]
            length = min(_LANES, end - first)
            for j in range(length):
                sign = np.uint32(np.uint32(word >> np.uint32(j)) << np.uint32(31))
                decoded = np.uint32(scale ^ sign).view(np.float32)
                out[first + j] = out[first + j] + decoded if adds else decoded
