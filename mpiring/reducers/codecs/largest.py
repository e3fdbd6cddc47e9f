"""Finds the largest elements of a vector, and packs sparse vectors."""

import numpy as np
from numpy.typing import NDArray

from ...memory.arrays import Array, is_finite
from .base import check_size, mixed

# Elements whose positions fit in 16 bits.
BLOCK = 1 << 16

# Sample from which the threshold is guessed. 0.1 % of it are 16: rough, so that twice as many
# elements are collected as are wanted, but a sample 4 times as large (1.6 ms instead of 0.4, of
# 4 Mi elements) took longer than it saved.
_SAMPLE = 16 << 10
# Standard deviations by which a guess, and a second one, ask for more than k elements, before the
# exact way without a guess.
_MARGINS = (3, 12)

_MAGNITUDE = np.int32(0x7fffffff)
_INFINITY = 0x7f800000
_NONE = -1                                      # a threshold that every magnitude is above

Indices = NDArray[np.int64]


def select_largest(x: Array, k: int, key: int) -> tuple[Indices, bool]:
    """Return where the `k` elements of largest magnitude are, and whether all are finite.

    Magnitudes are compared by their bits, as integers, in which Inf and NaN are the largest. A
    threshold guessed from a sample keeps nearly all elements out; whenever many more than `k`
    are above it, all but the `k` largest of these are dropped, and it rises. So the result is
    exact, from any threshold that leaves `k`; where it did not, a lower one is tried.

    Args:
        x: float32, shape (n,), contiguous; only read.
        k: From 0 to n.
        key: Chooses the sample, on which only the time taken, and which of equal elements are
            taken, depend.

    Returns:
        Indices, ascending, and False if `x` has Inf or NaN: then these are among the first taken.

    Source: Lin et al., Deep Gradient Compression, ICLR 2018, section 3 (sampling, hierarchical
        selection).
    """
    bits = x.view(np.int32)
    if k == 0:
        return np.empty(0, np.int64), is_finite(x)
    for threshold in _thresholds(bits, k, key):
        indices = _above(bits, threshold, k)
        if indices.size >= k:
            break
    indices = np.sort(_largest(bits, indices, k))
    return indices, int(_magnitudes(bits, indices).max()) < _INFINITY


def packed_size(k: int, n: int) -> int:
    """Return how many bytes `k` elements of a vector of `n` take, packed."""
    return 6 * k + 4 * -(-n // BLOCK)


def pack(values: Array, indices: Indices, n: int, payload: Array) -> None:
    """Write a sparse vector: values, how many are in each 65,536 elements, their positions there.

    Args:
        values: float32, shape (k,).
        indices: Shape (k,), ascending, each once, from 0 to n - 1.
        n: The length of the vector.
        payload: uint8, shape (packed_size(k, n),), overwritten.
    """
    k = values.size
    check_size(payload, n, packed_size(k, n))
    payload[:4 * k].view(np.float32)[:] = values
    counts, positions = _index(payload, k)
    bounds = np.searchsorted(indices, np.arange(counts.size + 1) * BLOCK)
    counts[:] = np.diff(bounds)
    positions[:] = indices & BLOCK - 1


def unpack(payload: Array, k: int, n: int) -> tuple[NDArray[np.float32], Indices]:
    """Return the values, a copy, and the indices, ascending, that `pack` wrote."""
    check_size(payload, n, packed_size(k, n))
    counts, positions = _index(payload, k)
    indices = np.repeat(np.arange(counts.size, dtype=np.int64) * BLOCK, counts)
    np.add(indices, positions, out=indices)
    return payload[:4 * k].view(np.float32).copy(), indices


def _index(payload: Array, k: int) -> tuple[NDArray[np.uint32], NDArray[np.uint16]]:
    """Return the counts and the positions within a payload."""
    end = payload.size - 2 * k
    return payload[4 * k:end].view(np.uint32), payload[end:].view(np.uint16)


def _thresholds(bits: Array, k: int, key: int) -> list[int]:
    """Return magnitudes that likely k elements are above, ever lower; at last, one below all."""
    n = bits.size
    if n < 4 * _SAMPLE:
        return [_NONE]
    # One from each stretch of equal length: no pattern in x can be in step with the hash.
    stretch = n // _SAMPLE
    jitter = (np.arange(_SAMPLE, dtype=np.uint32) * np.uint32(0x9e3779b1)
              ^ np.uint32(mixed(key)))
    jitter *= np.uint32(0x7feb352d)
    positions = np.arange(_SAMPLE) * stretch + (jitter >> np.uint32(8)) % np.uint32(stretch)
    sample = _magnitudes(bits, positions)
    expected = k * _SAMPLE / n
    ranks = [int(expected + margin * (expected**0.5 + 1)) for margin in _MARGINS]
    ranks = [_SAMPLE - 1 - rank for rank in ranks if rank < _SAMPLE]
    if ranks:
        sample.partition(ranks)
    # Inf and NaN must be above it.
    guesses = [min(int(sample[rank]), _INFINITY - 1) for rank in ranks]
    return [*dict.fromkeys(guesses), _NONE]


def _above(bits: Array, threshold: int, k: int) -> Indices:
    """Return where magnitudes are above the threshold, or the largest, at least k of them."""
    parts, count = [np.empty(0, np.int64)], 0
    for start in range(0, bits.size, BLOCK):
        indices = np.flatnonzero((bits[start:start + BLOCK] & _MAGNITUDE) > threshold)
        parts.append(indices + start)
        count += indices.size
        if count >= 2 * k + BLOCK:
            best = _largest(bits, np.concatenate(parts), k)
            # Any k that are left out from now on may be: as many are no smaller.
            parts, count, threshold = [best], k, int(_magnitudes(bits, best).min())
    return np.concatenate(parts)


def _largest(bits: Array, indices: Indices, k: int) -> Indices:
    """Return k of at least k elements, none smaller than one that is left out."""
    if indices.size == k:
        return indices
    return indices[np.argpartition(_magnitudes(bits, indices), -k)[-k:]]


def _magnitudes(bits: Array, indices: Indices) -> Array:
    magnitudes: Array = bits[indices] & _MAGNITUDE
    return magnitudes
