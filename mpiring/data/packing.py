"""Packs samples into batches of a token budget, and shares a batch among ranks."""

import functools
import heapq
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..memory.arrays import Array

# A window has at least so many samples: with fewer, samples of a batch differ more in length, and
# padding grows (of 18,814 functions of Python's library: 2.9 % at 2048, 1.3 % at 4096).
_LEAST_SAMPLES = 4096
# A batch gives up at most an eighth of its samples to have a number that many sizes divide.
_GIVEN_UP = 1 / 8


@dataclass(frozen=True)
class TokenBudget:
    """How samples are packed.

    Attributes:
        tokens: At most so many in a batch of all ranks.
        longest: Longer samples count as so many tokens; None: all count whole.
        window: Samples are sorted by length within windows of so many batches, about.
    """

    tokens: int
    longest: int | None
    window: int


class EpochPlan:
    """The batches of an epoch, of all ranks together.

    Args:
        order: Samples, batch after batch, within a batch longest first.
        bounds: Where in `order` batches begin; the last one is its length.
        lengths: Of all samples, in tokens, whether or not they are in `order`.
        longest: Longer samples count as so many.
    """

    def __init__(self, order: Array, bounds: Array, lengths: Array, longest: int | None) -> None:
        self.order, self.bounds = order, bounds
        self._lengths, self._longest = lengths, longest

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def batch(self, index: int) -> tuple[list[int], list[int]]:
        """Return the samples of a batch, and how many tokens each counts."""
        samples = self.order[self.bounds[index]:self.bounds[index + 1]]
        return samples.tolist(), _counted(self._lengths[samples], self._longest).tolist()

    def shares(self, index: int, size: int) -> list[list[int]]:
        """Return each rank's samples of a batch."""
        samples, lengths = self.batch(index)
        return [[samples[position] for position in share] for share in shares(lengths, size)]

    def waste(self, size: int) -> tuple[float, float]:
        """Return `TokenBatches.padding` and `TokenBatches.imbalance`, for so many ranks."""
        tokens = padded = heaviest = 0
        for index in range(len(self)):
            _, lengths = self.batch(index)
            loads = [[lengths[position] for position in share]
                     for share in shares(lengths, size)]
            tokens += sum(lengths)
            padded += sum(len(load) * max(load, default=0) for load in loads)
            heaviest += max(map(sum, loads))
        return (1 - tokens / padded, heaviest * size / tokens - 1) if tokens else (0.0, 0.0)


def plan(lengths: Array, samples: Array, budget: TokenBudget,
         random: np.random.RandomState | None) -> EpochPlan:
    """Pack samples into batches of about equally many tokens, of samples of similar length.

    Samples are shuffled and cut into windows; those of a window are sorted by length and cut into
    batches, whose order is shuffled. What a batch has depends on no number of ranks.

    Args:
        lengths: Of all samples, in tokens: a vector of whole numbers.
        samples: Those to pack: a vector of indices. It becomes the plan's order, in place.
        random: Shuffles; None leaves the order of samples, and has a window's longest first.
    """
    if random is not None:
        random.shuffle(samples)
    counted = _counted(lengths[samples], budget.longest)
    sizes: list[npt.NDArray[np.int64]] = []
    for window in _windows(counted, budget):
        longest_first = counted[window].argsort(kind="stable")[::-1]
        ends = counted[window][longest_first].cumsum(dtype=np.int64).tolist()
        bounds = np.array(cuts(ends, budget.tokens))
        if random is not None:
            longest_first, bounds = _batches_shuffled(longest_first, bounds, random)
        samples[window] = samples[window][longest_first]
        sizes.append(np.diff(bounds))
    bounds = np.concatenate([np.zeros(1, np.int64), *sizes]).cumsum()
    return EpochPlan(samples, bounds, lengths, budget.longest)


def _counted(lengths: Array, longest: int | None) -> Array:
    """Return how many tokens samples count, in a dtype as small as may be: it sorts faster."""
    if longest is None or not lengths.size or longest >= lengths.max():
        return lengths
    return np.minimum(lengths, longest).astype(np.min_scalar_type(longest))


def _windows(counted: Array, budget: TokenBudget) -> Iterator[slice]:
    """Cut samples into windows that are equally long, but for one sample."""
    n = len(counted)
    batches = int(counted.sum(dtype=np.int64)) / budget.tokens
    count = max(1, min(n // _LEAST_SAMPLES, int(batches / budget.window))) if n else 0
    for index in range(count):
        yield slice(index * n // count, (index + 1) * n // count)


def cuts(ends: Sequence[int], tokens: int) -> list[int]:
    """Cut samples, longest first, into batches that are even, so that the last is no tiny one.

    A batch is as long as what is left, cut evenly, allows; with a number of samples that a power
    of two divides, so that ranks get equally many (with 4 ranks and 27 samples of equal length,
    three would wait for a seventh of the step).

    Args:
        ends: How many tokens the samples up to and with each one have together; none has more
            than `tokens`.
        tokens: No batch has more.

    Returns:
        Where batches begin, and how many samples there are.
    """
    bounds, begin, before = [0], 0, 0
    while begin < len(ends):
        left = ends[-1] - before
        even = before + left // -(-left // tokens)
        end = bisect_right(ends, even, begin)
        if end == begin:
            end += 1    # One sample alone is more.
        elif end < len(ends) and (ends[end] + ends[end - 1] < 2 * even
                                  and ends[end] - before <= tokens):
            end += 1    # One more is nearer to even.
        if end < len(ends):
            end = begin + _divisible(end - begin)
        bounds.append(end)
        begin, before = end, ends[end - 1]
    return bounds


@functools.lru_cache(10_000)
def _divisible(count: int) -> int:
    """Return the number not much below `count` that the highest power of two divides."""
    power = 1
    while count % (2 * power) <= count * _GIVEN_UP:
        power *= 2
    return count - count % power


def _batches_shuffled(positions: Array, bounds: Array, random: np.random.RandomState) -> tuple[
        Array, Array]:
    """Return the batches' samples in an order of batches by chance, and where batches begin."""
    order = random.permutation(len(bounds) - 1)
    sizes = np.diff(bounds)[order]
    shuffled = np.concatenate([np.zeros(1, bounds.dtype), sizes.cumsum()])
    moved = np.repeat(bounds[order] - shuffled[:-1], sizes)
    return positions[moved + np.arange(len(positions))], shuffled


def shares(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Share a batch among ranks: the longest sample first, each to the rank with fewest tokens.

    The heaviest rank has at most 4/3 - 1/(3 size) times as many tokens as in the best of all ways.

    Returns:
        For each rank, positions in `lengths`, longest first; of equal ranks the lower one comes
        first, so that every rank finds the same.

    Source: LPT, R. L. Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math.
    17 (1969).
    """
    positions: list[list[int]] = [[] for _ in range(size)]
    ranks: list[tuple[int, int]] = [(0, rank) for rank in range(size)]
    for position in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        load, rank = ranks[0]
        positions[rank].append(position)
        heapq.heapreplace(ranks, (load + lengths[position], rank))
    return positions
