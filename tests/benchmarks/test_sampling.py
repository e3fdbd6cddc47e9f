"""Tests the ways to share samples that TokenBatches is compared with."""

from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.batches import APART, SAMPLINGS, TOGETHER

RANKS, COUNT = 3, 4


@pytest.mark.parametrize("name", [APART, TOGETHER])
def test_buckets_have_equally_many_samples_of_similar_length(name):
    lengths = np.random.default_rng(0).geometric(0.01, 500)
    options = SimpleNamespace(samples=COUNT, seed=1)
    steps = len(lengths) // (RANKS * COUNT)
    epochs = [list(islice(SAMPLINGS[name](SimpleNamespace(rank=rank, size=RANKS), options, lengths),
                          2 * steps)) for rank in range(RANKS)]
    for first in (0, steps):
        drawn = np.array([batches[first:first + steps] for batches in epochs])
        assert drawn.shape == (RANKS, steps, COUNT)
        assert len(np.unique(drawn)) == drawn.size, "each sample once"
        longest = lengths[drawn].max(axis=2)
        padding = 1 - lengths[drawn].sum() / (COUNT * longest.sum())
        imbalance = longest.max(axis=0).sum() / longest.mean(axis=0).sum() - 1
        assert padding < 0.1 and (imbalance < 0.1) == (name == TOGETHER)
