"""Finds the largest elements of a vector, and packs sparse vectors."""

import numpy as np
from numpy.typing import NDArray

from ...memory.arrays import Array, is_finite
from .base import check_size, mixed

# Number of elements whose positions fit in 16 bits.
BLOCK = 1 << 16

# Size of the sample for the threshold. With k = n / 1000, only 16 elements of the sample exceed the
# threshold, so about twice as many elements as needed exceed it. A sample of 4 times the size took
# longer than it saved (1.6 instead of 0.4 ms for 4 Mi elements).
_SAMPLE = 16 << 10
# Margins of the first and the second threshold, in standard deviations of the number of elements
# above the threshold. If both thresholds are too high, all elements are compared.
_MARGINS = (3, 12)

_MAGNITUDE = np.int32(0x7fffffff)
_INFINITY = 0x7f800000
_NONE = -1                                      # a threshold below every magnitude

Indices = NDArray[np.int64]


def select_largest(x: Array, k: int, key: int) -> tuple[Indices, bool]:
    """Return the indices of the `k` elements of largest magnitude, and whether all are finite.

    Magnitudes are compared by their bits, as integers; Inf and NaN are the largest. A threshold,
    estimated from a sample, excludes nearly all elements. If many more than `k` elements exceed it,
    the `k` largest are kept and the threshold is raised. If fewer than `k` elements exceed it, a
    lower threshold is tried. The result is exact.

    Args:
        x: float32, shape (n,), contiguous; only read.
        k: Number of elements, from 0 to n.
        key: Seed of the sample. It affects only the run time and the choice between equal
            elements.

    Returns:
        Ascending indices, and false if `x` has Inf or NaN, which are selected first.

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
    """Return the number of bytes of `k` packed elements of a vector of `n`."""
    return 6 * k + 4 * -(-n // BLOCK)


def pack(values: Array, indices: Indices, n: int, payload: Array) -> None:
    """Write a sparse vector: values, counts per 65,536 elements, and positions within these.

    Args:
        values: float32, shape (k,).
        indices: Shape (k,), ascending, unique, from 0 to n - 1.
        n: Length of the vector.
        payload: uint8, shape (packed_size(k, n),); overwritten.
    """
    k = values.size
    check_size(payload, n, packed_size(k, n))
    payload[:4 * k].view(np.float32)[:] = values
    counts, positions = _index(payload, k)
    bounds = np.searchsorted(indices, np.arange(counts.size + 1) * BLOCK)
    counts[:] = np.diff(bounds)
    positions[:] = indices & BLOCK - 1


def unpack(payload: Array, k: int, n: int) -> tuple[NDArray[np.float32], Indices]:
    """Return a copy of the values, and the ascending indices, that `pack` wrote."""
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
    """Return descending thresholds that k elements probably exceed; the last excludes none."""
    n = bits.size
    if n < 4 * _SAMPLE:
        return [_NONE]
    # Stratified sampling: one random element from each stretch of equal length.
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
    # Inf and NaN must be above the threshold.
    guesses = [min(int(sample[rank]), _INFINITY - 1) for rank in ranks]
    return [*dict.fromkeys(guesses), _NONE]


def _above(bits: Array, threshold: int, k: int) -> Indices:
    """Return the indices of all elements above the threshold, or at least of the k largest."""
    parts, count = [np.empty(0, np.int64)], 0
    for start in range(0, bits.size, BLOCK):
        indices = np.flatnonzero((bits[start:start + BLOCK] & _MAGNITUDE) > threshold)
        parts.append(indices + start)
        count += indices.size
        if count >= 2 * k + BLOCK:
            best = _largest(bits, np.concatenate(parts), k)
            # Elements that do not exceed the k-th largest so far can be excluded from now on.
            parts, count, threshold = [best], k, int(_magnitudes(bits, best).min())
    return np.concatenate(parts)


def _largest(bits: Array, indices: Indices, k: int) -> Indices:
    """Return the given indices whose elements are the k largest."""
    if indices.size == k:
        return indices
    return indices[np.argpartition(_magnitudes(bits, indices), -k)[-k:]]


def _magnitudes(bits: Array, indices: Indices) -> Array:
    magnitudes: Array = bits[indices] & _MAGNITUDE
    return magnitudes
