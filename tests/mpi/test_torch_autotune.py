"""Tests that a PyTorch model trains as without tuning, while gradients move between buckets."""

import itertools
import types

import pytest
from launching import needed

from mpiring.training import autotune

torch = needed("torch")
from mpiring.torch import DataParallel  # noqa: E402

pytestmark = pytest.mark.mpi


def layers():
    return torch.nn.Sequential(*(torch.nn.Linear(150, 150) for _ in range(8)))


@pytest.mark.parametrize("defer_wait", [False, True])
def test_training_is_that_of_one_process(breakable, monkeypatch, defer_wait):
    comm = breakable(tuning_folder="")
    # Each step takes longer than the one before: other settings are never faster.
    clock = itertools.accumulate(itertools.count())
    monkeypatch.setattr(autotune, "time", types.SimpleNamespace(perf_counter=clock.__next__))
    torch.manual_seed(0)
    alone, module = layers(), layers()
    module.load_state_dict(alone.state_dict())
    model = DataParallel(module, comm, autotune=True, bucket_bytes=1 << 20, defer_wait=defer_wait)
    x = torch.randn(comm.size, 4, 150, generator=torch.Generator().manual_seed(1))
    trained = [(alone, x.flatten(0, 1)), (model, x[comm.rank])]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each, _ in trained]
    lengths = set()
    for _ in range(16):
        for (each, batch), optimizer in zip(trained, optimizers):
            optimizer.zero_grad()
            each(batch).square().mean().backward()
            optimizer.step()
        lengths.add(len(model._averaging.gradients.buckets))
    assert len(lengths) > 1 or comm.size == 1, "gradients have moved"
    for p, expected in zip(module.parameters(), alone.parameters()):
        torch.testing.assert_close(p, expected, rtol=1e-4, atol=1e-6)
