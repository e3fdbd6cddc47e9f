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
    found = [kind(range(SAMPLES), batch_sampler=one, collate_fn=as_it_is, **dict(workers))
             for one in ranks]
    for loader in found if state is not None else ():
        loader.load_state_dict(state)
    return found, ranks


def stateful():
    """Return torchdata's loader."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return needed("torchdata.stateful_dataloader").StatefulDataLoader


@pytest.fixture(scope="module")
def whole():
    """Return two epochs."""
    ranks = on_ranks(1, LENGTHS[:SAMPLES])
    return [drawn(ranks), drawn(ranks)]


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_pytorchs_loader_with_batches_in_flight(workers, whole):
    kind = needed("torch.utils.data").DataLoader
    for done in (1, 9, len(whole[0])):
        first, ranks = loaders(kind, 2, workers=workers)
        assert len(first[0]) == len(whole[0])
        assert drawn(first, done) == whole[0][:done]
        state = ranks[0].state_dict(seen=done)
        second, ranks = loaders(kind, 3)
        for one in ranks:
            one.load_state_dict(state)
        assert drawn(second) == whole[0][done:]
        assert drawn(second) == whole[1]


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_torchdatas_loader_with_batches_in_flight(workers, whole):
    for done in (1, 9, len(whole[0])):
        first, _ = loaders(stateful(), 2, workers=workers)
        assert drawn(first, done) == whole[0][:done]
        states = [loader.state_dict() for loader in first]
        # Any rank's state is good for any other.
        second, ranks = loaders(stateful(), 3, states[1], workers)
        assert drawn(second) == whole[0][done:]
        assert drawn(second) == whole[1]
        assert ranks[0].epoch == 2


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_torchdatas_loader_between_epochs_and_with_another_budget(workers, whole):
    first, _ = loaders(stateful(), 1, workers=workers)
    assert drawn(first) == whole[0]
    second, _ = loaders(stateful(), 2, first[0].state_dict(), workers)
    assert drawn(second, 5) == whole[1][:5]
    third, _ = loaders(stateful(), 3, second[0].state_dict(), workers, tokens=2500)
    rest = drawn(third)
    assert np.all(counts([*whole[1][:5], *rest], SAMPLES) == 1) and len(rest) > len(whole[1])


@pytest.mark.parametrize("workers", WORKERS[:2], ids=str)
def test_prefetch_ahead_of_torchdatas_loader(workers, whole):
    first, _ = loaders(stateful(), 2, workers=workers)
    fetched = [prefetch(loader, "cpu") for loader in first]
    assert drawn(fetched, 7) == whole[0][:7]
    second, _ = loaders(stateful(), 3, fetched[0].state_dict(), workers)
    assert drawn(second) == whole[0][7:]
