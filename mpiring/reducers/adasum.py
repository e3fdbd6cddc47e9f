"""Adasum: adds gradients that are orthogonal, and averages gradients that are parallel."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..buckets.bucket import Bucket
from ..errors import ConfigError
from ..memory.arrays import FLOATING, Array, dtype_name
from ..memory.scratch import BLOCK_BYTES, thread_scratch
from ..operations.collectives import Collectives
from ..transport.base import Channel, Schedule

# Dot products of a pair of vectors, per tensor: a·b, |a|², |b|². Shape (3, tensors).
Dots = NDArray[np.float64]


class Adasum:
    """Combines gradients so that the learning rate need not depend on the number of ranks.

    Two gradients a and b of a tensor become `(1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b`. This is
    their sum if they are orthogonal, and their mean if they are parallel. A factor is 1 if its
    norm is 0. Pairs of ranks are combined, then pairs of pairs, and so on. The result is not the
    mean over ranks.

    The number of ranks p is arbitrary. Let p' be the largest power of two up to p. Each rank
    r ≥ p' first sends its gradients to rank r - p', which combines the pair, and receives the
    result at the end.

    Elements and dot products are computed in float64, and results of each combination are rounded
    to the dtype. The norms of float64 gradients should be between 1e-140 and 1e150: the squares of
    larger norms are Inf, and the result is NaN. Gradients on a GPU are combined in a copy in host
    memory.

    Source: Maleki et al., "Scaling distributed training with adaptive summation", 2020,
    arXiv 2006.02924.
    """

    on_gpus = False

    def __repr__(self) -> str:
        return "Adasum()"

    def reduce(self, collectives: Collectives, bucket: Bucket) -> Schedule[None]:
        """Return the schedule that combines each tensor of the bucket over ranks.

        Args:
            collectives: Collective operations of the ranks.
            bucket: Bucket of gradients; `bucket.flat` becomes the result.

        Raises:
            ConfigError: The bucket's dtype is not floating.
        """
        # If a tensor has become NaN, its padding is also NaN.
        bucket.clear_padding()
        sizes = [tensor.padded_size for tensor in bucket.plan.tensors]
        yield from self.schedule_for(collectives, bucket.flat, [0, *itertools.accumulate(sizes)])

    @staticmethod
    def schedule_for(collectives: Collectives, x: Array,
                     bounds: Sequence[int]) -> Schedule[None]:
        """Return the schedule that replaces the vector `x` by its Adasum over ranks.

        Recursive halving with distance doubling: after level k, a rank has 1/2^k of the combination
        of 2^k ranks. An allgather follows. Each rank sends 2(p'-1)/p' of `x`; for p', see `Adasum`.
        Each rank r ≥ p' sends all of `x` to a partner, which returns the complete result.

        Args:
            x: Shape (n,), contiguous, floating, in host memory. Overwritten by the same bits on all
                ranks. A tensor becomes NaN or Inf if it was not finite on any rank.
            bounds: Offsets of the tensors in `x`, from 0 to n, ascending; the same on all ranks.

        Source: Maleki et al. 2020, recursive vector halving with distance doubling.
        """
        if dtype_name(x.dtype) not in FLOATING:
            raise ConfigError(
                f"rank {collectives.rank}: Adasum of {dtype_name(x.dtype)} ({x.size},): it is "
                f"defined for floating dtypes; convert to one of them, or take the sum")
        return collectives.confirmed(_adasum(collectives, x, bounds))


def _adasum(collectives: Collectives, x: Array, bounds: Sequence[int]) -> Schedule[None]:
    net = collectives.net
    p, r = net.size, net.rank
    # This is p' in the docstring.
    paired = 1 << p.bit_length() - 1
    if r >= paired:
        yield (net.isend(x, r - paired),)
        yield (net.irecv(x, r - paired),)
        return
    extra = r + paired
    with collectives.borrow(x.size if extra < p else -(-x.size // 2), x.dtype) as inbox:
        if extra < p:
            yield (net.irecv(inbox, extra),)
            pair = _Pair(x, inbox, 0, bounds)
            pair.combine(pair.dots(), x)
        start, stop, d = 0, x.size, 1
        gathers: list[tuple[int, Array, Array]] = []
        while d < paired:
            other, middle = r ^ d, (start + stop) // 2
            halves = x[start:middle], x[middle:stop]
            # The lower rank keeps the lower half.
            keep, give = halves if r < other else halves[::-1]
            received = inbox[:keep.size]
            yield net.irecv(received, other), net.isend(give, other)
            start, stop = (start, middle) if r < other else (middle, stop)
            pair = _Pair(*((keep, received) if r < other else (received, keep)), start, bounds)
            dots = yield from _sum_dots(net, pair.dots(), d)
            pair.combine(dots, keep)
            gathers.append((other, keep, give))
            d *= 2
    for other, keep, give in reversed(gathers):
        yield net.irecv(give, other), net.isend(keep, other)
    if extra < p:
        yield (net.isend(x, extra),)


def _sum_dots(net: Channel, dots: Dots, d: int) -> Schedule[Dots]:
    """Sum the dot products over the 2d ranks that have parts of a pair, bitwise identically."""
    distance = 1
    while distance <= d:
        other, received = net.rank ^ distance, np.empty_like(dots)
        yield (net.irecv(received.reshape(-1), other), net.isend(dots.reshape(-1), other))
        dots = dots + received
        distance *= 2
    return dots


@dataclass(frozen=True)
class _Pair:
    """Corresponding parts of two vectors to combine.

    The parts begin at `start` of the vectors; `bounds` are the offsets of the tensors in these.
    """

    a: Array
    b: Array
    start: int
    bounds: Sequence[int]

    def dots(self) -> Dots:
        """Return the dot products of these parts."""
        dots = np.zeros((3, len(self.bounds) - 1))
        with np.errstate(all="ignore"):
            for tensor, _, a, b in self._blocks():
                dots[:, tensor] += a.dot(b), a.dot(a), b.dot(b)
        return dots

    def combine(self, dots: Dots, out: Array) -> None:
        """Store the combination in `out`, which may be `a` or `b`, by dots of the whole vectors."""
        with np.errstate(all="ignore"):
            # If the norm is 0, any finite factor gives the same result.
            factors = np.where(dots[1:] == 0, 1, 1 - dots[0] / (2 * dots[1:]))
            for tensor, block, a, b in self._blocks():
                a *= factors[0, tensor]
                b *= factors[1, tensor]
                a += b
                np.copyto(out[block], a, casting="unsafe")

    def _blocks(self) -> Iterator[tuple[int, slice, Array, Array]]:
        """Yield copies of `a` and `b` in float64, block by block, with the tensor of each.

        If one gradient is much shorter than the other, factors may be too large for float32.
        """
        wide = np.result_type(self.a.dtype, np.float64)
        step = BLOCK_BYTES // (2 * wide.itemsize)
        scratch = thread_scratch.acquire()
        copies = scratch.memory.view(wide).reshape(2, step)
        for tensor, (first, last) in enumerate(zip(self.bounds, self.bounds[1:])):
            last = min(last - self.start, self.a.size)
            for begin in range(max(first - self.start, 0), last, step):
                block = slice(begin, min(begin + step, last))
                a, b = copies[:, :block.stop - begin]
                np.copyto(a, self.a[block])
                np.copyto(b, self.b[block])
                yield tensor, block, a, b
        thread_scratch.release(scratch)
