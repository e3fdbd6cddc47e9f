"""Tests that batches are within their budget, even and complete, and shares near the best."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiring.data.packing import TokenBudget, cuts, plan, shares
from mpiring.memory.digest import digest

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=300)


def best_of_all(lengths, size):
    """Return the load of the heaviest rank where it is lightest."""
    # The first sample's rank has no name.
    return min(max(sum(length for length, rank in zip(lengths, (0, *ranks), strict=True)
                       if rank == heaviest) for heaviest in range(size))
               for ranks in itertools.product(range(size), repeat=len(lengths) - 1))


@settings(deadline=None, max_examples=60)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=7), size=st.integers(1, 3))
def test_the_heaviest_rank_is_within_grahams_bound(lengths, size):
    load = max(sum(lengths[i] for i in share) for share in shares(lengths, size))
    assert load * 3 * size <= best_of_all(lengths, size) * (4 * size - 1)


def test_grahams_bound_is_reached():
    """His own example: twice 2p - 1 to p + 1, and a third p."""
    for size in range(2, 8):
        lengths = [*range(2 * size - 1, size, -1)] * 2 + [size] * 3
        load = max(sum(lengths[i] for i in share) for share in shares(lengths, size))
        assert load == 4 * size - 1 and sum(lengths) == 3 * size * size


def test_equal_samples_come_in_their_order():
    assert shares([5] * 5, 2) == [[0, 2, 4], [1, 3]]
    assert shares([], 2) == [[], []]


@given(lengths=LENGTHS, tokens=st.integers(60, 2000))
def test_batches_are_within_their_budget_and_none_is_tiny(lengths, tokens):
    lengths.sort(reverse=True)
    bounds = cuts(list(itertools.accumulate(lengths)), tokens)
    assert bounds[0] == 0 and bounds[-1] == len(lengths)
    sums = [sum(lengths[a:b]) for a, b in itertools.pairwise(bounds)]
    assert all(0 < total <= tokens for total in sums) and sum(sums) == sum(lengths)
    if sum(lengths) > tokens:
        assert min(sums) >= 7 / 8 * (tokens / 2 - lengths[0])
    else:
        assert len(sums) == 1


def test_a_batch_has_a_number_of_samples_that_ranks_can_share():
    bounds = cuts(list(itertools.accumulate([100] * 4000)), 2799)
    counts = np.diff(bounds)
    assert np.mean(counts == 24) > 0.9 and np.all(counts % 2 == 0) and counts.min() > 10


def test_batches_are_of_similar_lengths_and_in_no_order(random=np.random.default_rng(0)):
    lengths = np.minimum(random.exponential(200, 30_000).astype(np.int64) + 1, 1000)
    packed = plan(lengths, np.arange(30_000), TokenBudget(8000, None, 64), np.random.RandomState(1))
    padding, imbalance = packed.waste(4)
    assert padding < 0.03 and imbalance < 0.03
    means = [np.mean(packed.batch(index)[1]) for index in range(len(packed))]
    assert abs(np.corrcoef(means, range(len(packed)))[0, 1]) < 0.1
    assert lengths.sum() / len(packed) > 0.9 * 8000


@pytest.mark.parametrize("n", [0, 1, 4095, 8191, 8192])
def test_windows_of_any_size(n):
    packed = plan(np.full(n, 7), np.arange(n), TokenBudget(70, None, 1), np.random.RandomState(0))
    assert sorted(packed.order) == list(range(n))
    assert np.all(np.diff(packed.bounds) <= 10) and np.diff(packed.bounds).sum() == n


def test_an_order_is_the_same_for_ever():
    """States that were saved count on it."""
    lengths = np.random.RandomState(0).geometric(0.01, 20_000)
    packed = plan(lengths, np.arange(20_000, dtype=np.int32), TokenBudget(4000, 500, 8),
                  np.random.RandomState(np.random.MT19937(np.random.SeedSequence([1, 2, 0]))))
    order = packed.order.astype("<i4"), packed.bounds.astype("<i8")
    assert digest(order) == 11552057022355953732
