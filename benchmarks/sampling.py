"""Ways to share samples of different lengths among ranks, batch by batch."""

import itertools
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from mpiring.data import TokenBatches
from mpiring.memory.arrays import Array
from mpiring.tools.bench.world import World

EQUAL, PADDED, APART, TOGETHER, OURS = (
    "equal lengths", "DistributedSampler", "buckets of a rank", "buckets of all ranks",
    "TokenBatches")
# Batches in a window that is sorted by length, as in Transformers' LengthGroupedSampler.
_WINDOW = 50

# Given samples' lengths, returns the samples of this rank, batch by batch, without an end.
Sampling = Callable[[World, Namespace, Array], Iterator[list[int]]]


def _at_random(world: World, options: Namespace, lengths: Array) -> Iterator[list[int]]:
    """Draw batches of equally many samples, by PyTorch's own sampler."""
    from torch.utils.data import DistributedSampler
    count = options.samples
    sampler = DistributedSampler(range(len(lengths)), world.size, world.rank, seed=options.seed,
                                 drop_last=True)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        mine = list(sampler)
        yield from (mine[end - count:end] for end in range(count, len(mine) + 1, count))


def _in_buckets(world: World, options: Namespace, lengths: Array, *, together: bool,
                ) -> Iterator[list[int]]:
    """Draw batches of equally many samples of similar lengths, the order of batches by chance.

    Args:
        together: All ranks take their share of the same batches; otherwise each has samples and
            batches of its own.
    """
    first, ranks = (0, 1) if together else (world.rank, world.size)
    count = options.samples * world.size // ranks
    for epoch in itertools.count():
        mine = np.random.default_rng([options.seed, epoch]).permutation(len(lengths))
        mine = mine[first:len(mine) - len(mine) % (options.samples * world.size):ranks]
        windows = [mine[begin:begin + _WINDOW * count]
                   for begin in range(0, len(mine), _WINDOW * count)]
        by_length = np.concatenate(
            [window[lengths[window].argsort(kind="stable")] for window in windows])
        batches = by_length.reshape(-1, count)
        for batch in np.random.default_rng([options.seed, epoch, first]).permutation(batches):
            yield batch[world.rank::world.size].tolist() if together else batch.tolist()


def _by_tokens(world: World, options: Namespace, lengths: Array) -> Iterator[list[int]]:
    """Draw batches of as many tokens as the others' have on average."""
    tokens = round(options.samples * world.size * float(lengths.mean()))
    batches = TokenBatches(lengths, world.comm, tokens=tokens, seed=options.seed)
    while True:
        yield from batches


SAMPLINGS: dict[str, Sampling] = {
    EQUAL: _at_random,
    PADDED: _at_random,
    APART: partial(_in_buckets, together=False),
    TOGETHER: partial(_in_buckets, together=True),
    OURS: _by_tokens,
}
