"""Draws from the TokenBatches of all ranks of a job, in one process and without MPI."""

import json

import numpy as np

from mpiring.data import TokenBatches

LENGTHS = np.random.default_rng(3).integers(1, 400, 5000)


class Comm:
    """A rank of a job whose ranks pass the same arguments."""

    def __init__(self, rank=0, size=1):
        self.rank, self.size = rank, size

    def allgather_object(self, obj, *, label=None):
        return [obj] * self.size


def on_ranks(size, lengths=LENGTHS, state=None, **options):
    """Return the batches of every rank."""
    ranks = [TokenBatches(lengths, Comm(rank, size), **{"tokens": 6000, **options})
             for rank in range(size)]
    for batches in ranks:
        if state is not None:
            batches.load_state_dict(json.loads(json.dumps(state)))
    return ranks


def drawn(ranks, batches=None):
    """Return the batches over all ranks, as sets; at most a number of them."""
    batches_drawn = []
    for shares in zip(*ranks, strict=True):
        together = [sample for share in shares for sample in share]
        assert all(type(sample) is int for sample in together)
        assert len(set(together)) == len(together)
        batches_drawn.append(frozenset(together))
        if len(batches_drawn) == batches:
            break
    return batches_drawn


def counts(batches, n=len(LENGTHS)):
    """Return the number of times that each sample was drawn."""
    return np.bincount([sample for batch in batches for sample in batch], minlength=n)
