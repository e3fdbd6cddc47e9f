"""Tests the PyTorch wrapper of the parameter server, and pair averaging of modules, on real MPI."""

import copy
import functools
import pickle

import pytest
from launching import needed

from mpiring import ConfigError, GradientError
from mpiring.asynchronous import PairAveraging
from mpiring.optim import SGD, AdamW

torch = needed("torch")
tmpiring = needed("mpiring.torch")
from odd_modules import equal_on_all  # noqa: E402
pytestmark = pytest.mark.mpi


def module(seed, dtype=torch.float32):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Tanh(),
                               torch.nn.Linear(5, 1, bias=False)).to(dtype)


def batch(rank, step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(16, 6, generator=generator)
    return x.to(dtype), torch.sin(x.sum(1, keepdim=True)).to(dtype)


def loss_of(model, data):
    return torch.nn.functional.mse_loss(model(data[0]), data[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_staleness_it_is_data_parallel(comm, dtype):
    model = tmpiring.AsyncDataParallel(
        module(comm.rank, dtype), comm, optimizer=functools.partial(SGD, lr=0.1, momentum=0.9),
        staleness=0)
    with pytest.raises(GradientError, match="step.. without gradients; call backward"):
        model.step()
    reference = tmpiring.DataParallel(module(comm.rank, dtype), comm, broadcast_buffers=False)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        loss_of(model, batch(comm.rank, step, dtype)).backward()
        assert model.step()
        assert all(p.grad is None for p in model.parameters())
        optimizer.zero_grad()
        loss_of(reference, batch(comm.rank, step, dtype)).backward()
        optimizer.step()
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    for p, q in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
    model.close()
    assert equal_on_all(model.state_dict().values(), comm)


@pytest.mark.parametrize("staleness", [2, None])
def test_training_goes_well_with_stale_gradients(comm, staleness):
    with tmpiring.AsyncDataParallel(module(1), comm, staleness=staleness,
                                    optimizer=functools.partial(AdamW, lr=0.02)) as model:
        first = loss_of(model, batch(9, 999)).item()
        for step in range(40 + 10 * comm.rank):
            loss_of(model, batch(comm.rank, step)).backward()
            model.step()
        with pytest.raises(ConfigError, match="load the module before it is wrapped"):
            model.load_state_dict(model.state_dict())
    assert equal_on_all(model.state_dict().values(), comm)
    assert loss_of(model, batch(9, 999)).item() < 0.8 * first
    assert model.statistics.operations == 2 * (40 + 10 * comm.rank)


def test_frozen_parameters_and_mistakes(comm):
    plain = module(comm.rank)
    plain[0].weight.requires_grad_(False)
    with tmpiring.AsyncDataParallel(plain, comm, optimizer=SGD) as model:
        assert "0.weight" not in model.server.params
        # As the bare module.
        assert model.state_dict().keys() == module(1).state_dict().keys()
        assert model.append == model.module.append
        for copying in (pickle.dumps, copy.deepcopy):
            with pytest.raises(ConfigError, match="AsyncDataParallel cannot be pickled or copied"):
                copying(model)
        for make in (tmpiring.DataParallel, functools.partial(tmpiring.LocalSGD, every=2)):
            with pytest.raises(ConfigError, match="is wrapped already, by AsyncDataParallel; pass"):
                make(model, comm)
        before = plain[0].weight.clone()
        loss_of(model, batch(0, 0)).backward()
        model.step()
        assert torch.equal(plain[0].weight, before)
        loss_of(model, batch(0, 0)).backward()
        plain[3].weight.data = plain[3].weight.data.clone()
        with pytest.raises(ConfigError, match="parameters were moved or replaced"):
            model.step()
    with pytest.raises(ConfigError, match="pass one of mpiring.optim|cannot be made of a model"):
        tmpiring.AsyncDataParallel(module(0), comm, optimizer=torch.optim.SGD)


def test_pairs_of_modules(comm, caplog):
    model = module(comm.rank)
    # A constant, which has no difference to a partner's.
    model.register_buffer("mask", torch.full((2,), -torch.inf), persistent=False)
    with PairAveraging(model, comm, seed=1) as pairs:
        for _ in range(20):
            with torch.no_grad():
                model[0].weight += comm.rank
            pairs.step()
    assert equal_on_all(model.state_dict().values(), comm) and "left out" not in caplog.text
