"""Draws batches of a token budget through loaders of PyTorch and of torchdata, with workers."""

import warnings

import numpy as np
import pytest
from drawn_batches import LENGTHS, counts, drawn, on_ranks
from launching import needed

from mpiring.data import prefetch

pytestmark = [
    # PyTorch's own, where a process with threads forks, and of what torchdata calls.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning")]

SAMPLES = 700
WORKERS = [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]


def as_it_is(samples):
    """Collate nothing: a batch is the list of its samples."""
    return samples


def loaders(kind, size, state=None, workers=(), **options):
    """Return each rank's loader, and what it draws from."""
    ranks = on_ranks(size, LENGTHS[:SAMPLES], **options)
    of_ranks = [kind(range(SAMPLES), batch_sampler=batches, collate_fn=as_it_is, **dict(workers))
                for batches in ranks]
    for loader in of_ranks if state is not None else ():
        loader.load_state_dict(state)
    return of_ranks, ranks


def stateful():
    """Return torchdata's loader."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return needed("torchdata.stateful_dataloader").StatefulDataLoader


@pytest.fixture(scope="module")
def epochs():
    """Return two epochs."""
    ranks = on_ranks(1, LENGTHS[:SAMPLES])
    return [drawn(ranks), drawn(ranks)]


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_pytorchs_loader_with_batches_in_flight(workers, epochs):
    kind = needed("torch.utils.data").DataLoader
    for done in (1, 9, len(epochs[0])):
        first, ranks = loaders(kind, 2, workers=workers)
        assert len(first[0]) == len(epochs[0])
        assert drawn(first, done) == epochs[0][:done]
        state = ranks[0].state_dict(seen=done)
        second, ranks = loaders(kind, 3)
        for batches in ranks:
            batches.load_state_dict(state)
        assert drawn(second) == epochs[0][done:]
        assert drawn(second) == epochs[1]


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_torchdatas_loader_with_batches_in_flight(workers, epochs):
    for done in (1, 9, len(epochs[0])):
        first, _ = loaders(stateful(), 2, workers=workers)
        assert drawn(first, done) == epochs[0][:done]
        states = [loader.state_dict() for loader in first]
        # Any rank's state is good for any other.
        second, ranks = loaders(stateful(), 3, states[1], workers)
        assert drawn(second) == epochs[0][done:]
        assert drawn(second) == epochs[1]
        assert ranks[0].epoch == 2


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_torchdatas_loader_between_epochs_and_with_another_budget(workers, epochs):
    first, _ = loaders(stateful(), 1, workers=workers)
    assert drawn(first) == epochs[0]
    second, _ = loaders(stateful(), 2, first[0].state_dict(), workers)
    assert drawn(second, 5) == epochs[1][:5]
    third, _ = loaders(stateful(), 3, second[0].state_dict(), workers, tokens=2500)
    rest = drawn(third)
    assert np.all(counts([*epochs[1][:5], *rest], SAMPLES) == 1) and len(rest) > len(epochs[1])


@pytest.mark.parametrize("workers", WORKERS[:2], ids=str)
def test_prefetch_ahead_of_torchdatas_loader(workers, epochs):
    first, _ = loaders(stateful(), 2, workers=workers)
    fetched = [prefetch(loader, "cpu") for loader in first]
    assert drawn(fetched, 7) == epochs[0][:7]
    second, _ = loaders(stateful(), 3, fetched[0].state_dict(), workers)
    assert drawn(second) == epochs[0][7:]


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_prefetch_over_epochs_of_torchdatas_loader(workers, epochs):
    """It stops when the thread has begun the next epoch."""
    def fetched(size, state=None):
        made = [prefetch(loader, epochs=range(2)) for loader in loaders(
            stateful(), size, workers=workers)[0]]
        for one in made if state is not None else ():
            one.load_state_dict(state)
        return made

    everything = epochs[0] + epochs[1]
    assert drawn(fetched(1)) == everything
    for done in (7, len(epochs[0]) - 1, len(epochs[0]), len(epochs[0]) + 3):
        first = fetched(1)
        assert drawn(first, done) == everything[:done]
        assert first[0].epoch == (done > len(epochs[0]))
        assert drawn(fetched(1, first[0].state_dict())) == everything[done:]
