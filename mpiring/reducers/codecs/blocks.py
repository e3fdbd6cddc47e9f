"""Encodes blocks of float32 as one scale and 8 bits per element, rounded at random, unbiased."""

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...arguments import whole_number
from ...memory import compiled
from ...memory.arrays import Array
from ...memory.reduction import quietly
from . import pieces
from .pieces import APART, NOWHERE

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

_ENCODE = "float32* float32* int8* float32* intp intp uint32 intp"
_DECODE = "float32* int8* float32* intp intp bool"


@dataclass(frozen=True)
class EightBit(pieces.InBlocks):
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
        scales, codes = self._parts(payload, x.size)
        values = codes.view(np.int8)
        loop = compiled.loop("8-bit codes", _encode_loop, _ENCODE)
        seed = pieces.mixed(key)
        if loop is None:
            quietly(_encode, x, scales, values, lost, self.block, seed)
        else:
            place = pieces.place_of_lost(x, lost)
            loop(x, scales, values, lost, x.size, self.block, seed, place)

    def _decode(self, payload: Array, out: Array, adds: bool) -> None:
        scales, codes = self._parts(payload, out.size)
        values = codes.view(np.int8)
        loop = compiled.loop("sums of 8-bit codes", _decode_loop, _DECODE)
        if loop is None:
            quietly(_decode, scales, values, out, self.block, adds)
        else:
            loop(scales, values, out, out.size, self.block, adds)


def _encode(x: Array, scales: Array, values: Array, lost: Array | None, block: int,
            seed: int) -> None:
    for here, blocks, shape in pieces.pieces(x.size, block):
        rows = x[here].reshape(shape)
        product, u = (piece.reshape(shape) for piece in pieces.scratch(rows.size))
        _uniform(here.start, seed, u.reshape(-1), product.reshape(-1).view(np.uint32))
        finite, inverse = _scale(np.maximum.reduce(np.absolute(rows, out=product), axis=1),
                                 scales[blocks])
        np.multiply(rows, inverse[:, None], out=product)
        np.add(product, u, out=product)
        np.floor(product, out=product)
        if not finite.all():
            product[~finite] = 0
        np.copyto(values[here].reshape(shape), product, casting="unsafe")
        if lost is not None:
            np.multiply(product, scales[blocks, None], out=product)
            np.subtract(rows, product, out=lost[here].reshape(shape))


def _scale(peak: Array, scales: Array) -> tuple[Array, Array]:
    """Write the scales of blocks; return which are finite, and by what to multiply them.

    Args:
        peak: The largest |x| of each.
        scales: Overwritten.
    """
    finite = np.isfinite(peak)
    np.minimum(peak / STEPS, LARGEST, out=scales)
    some = scales >= SMALLEST
    scales[~some] = 0
    scales[~finite] = _NAN
    return finite, np.where(some & finite, JUST_BELOW / peak, np.float32(0))


def _uniform(start: int, seed: int, u: Array, h: Array) -> None:
    """Write the u of consecutive elements from index `start` on; `h` is scratch memory."""
    t = u.view(np.uint32)
    np.add(_multiples(max(u.size, pieces.PIECE))[:u.size],
           np.uint32((start * int(GOLDEN) + seed) & 0xffffffff), out=h)
    np.right_shift(h, np.uint32(16), out=t)
    np.bitwise_xor(h, t, out=h)
    np.multiply(h, FIRST, out=h)
    np.right_shift(h, np.uint32(15), out=t)
    np.bitwise_xor(h, t, out=h)
    np.multiply(h, SECOND, out=h)
    np.right_shift(h, np.uint32(9), out=h)
    np.copyto(u, h.view(np.int32), casting="unsafe")
    np.multiply(u, FRACTION, out=u)


@functools.lru_cache(maxsize=4)
def _multiples(n: int) -> NDArray[np.uint32]:
    """Return the first multiples of the golden ratio of 2**32, 0 first; only read."""
    multiples: NDArray[np.uint32] = np.arange(n, dtype=np.uint32) * GOLDEN
    return multiples


def _decode(scales: Array, values: Array, out: Array, block: int, adds: bool) -> None:
    for here, blocks, shape in pieces.pieces(out.size, block):
        rows, to = values[here].reshape(shape), out[here].reshape(shape)
        decoded = pieces.scratch(to.size)[0].reshape(shape) if adds else to
        np.copyto(decoded, rows)
        np.multiply(decoded, scales[blocks, None], out=decoded)
        if adds:
            np.add(to, decoded, out=to)


def _encode_loop(x, scales, values, lost, n, block, seed, place):  # type: ignore[no-untyped-def]
    """Do what `_encode` does, as numba compiles it: uint32 everywhere, or it goes on in 64 bits."""
    for start in range(0, n, block):
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
        scales[start // block] = scale
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
        if place == APART:
            for i in range(start, end):
                lost[i] = x[i] - np.float32(values[i]) * scale
        elif place != NOWHERE:
            for i in range(start, end):
                lost[i] -= np.float32(values[i]) * scale


def _decode_loop(scales, values, out, n, block, adds):  # type: ignore[no-untyped-def]
    for start in range(0, n, block):
        end = min(start + block, n)
        scale = scales[start // block]
        if adds:
            for i in range(start, end):
                out[i] += np.float32(values[i]) * scale
        else:
            for i in range(start, end):
                out[i] = np.float32(values[i]) * scale
