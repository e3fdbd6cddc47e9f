"""Uses DataParallel in ways that must fail loudly, or leave nothing behind; run by mpirun."""

import gc
import os

import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpiring.torch
from mpiring.reducers import Mean
from mpiring.torch import (DataParallel, DistributedSampler, broadcast_optimizer_state,
                           broadcast_parameters)

# What is imported is no garbage: collections need not look at it.
gc.freeze()
comm = mpiring.init()
X = torch.arange(12.0).reshape(4, 3) / 10 + comm.rank


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def same_on_all(model):
    for p in model.parameters():
        assert len(set(comm.allgather_object(p.detach().numpy().tobytes()))) == 1


def withheld_gradients_cannot_be_changed():
    model = DataParallel(net(), comm, defer_wait=True)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")
    scaler.scale(model(X).square().mean()).backward()
    bias = model.module[2].bias
    for use in (lambda: nn.utils.clip_grad_norm_(model.parameters(), 1),
                lambda: scaler.step(optimizer), lambda: bias.grad.data.mul_(2),
                lambda: bias.grad.numpy(), lambda: bias.grad * 2, lambda: bias.grad.sum(),
                lambda: setattr(bias.grad, "data", torch.ones(2)),
                lambda: torch.utils.dlpack.to_dlpack(bias.grad)):
        with pytest.raises(RuntimeError, match="in flight .defer_wait=True.: call|Cannot access"):
            use()
    scaler = torch.amp.GradScaler("cpu")
    optimizer.zero_grad()
    scaler.scale(model(X).square().mean()).backward()
    model.synchronize()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1)
    scaler.step(optimizer)
    same_on_all(model)


def withheld_gradients_that_are_dropped_do_not_come_back(to_none):
    right, model = DataParallel(net(), comm), DataParallel(net(), comm, defer_wait=True)
    (model(X).square().mean() * torch.nan).backward()
    model.zero_grad(set_to_none=to_none)
    for wrapped in right, model:
        wrapped(X).square().mean().backward()
    model.synchronize()
    for a, b in zip(right.parameters(), model.parameters()):
        assert a.grad.equal(b.grad)


def dropped_models_leave_nothing():
    def files():
        return len(os.listdir("/proc/self/fd"))

    bare = net()
    before = None
    for number in range(12):
        model = DataParallel(bare, comm, defer_wait=number % 2 == 0)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(X).sum().backward()
        optimizer.step()
        model.zero_grad()
        del model, optimizer
        gc.collect()
        before = before or files()
    assert files() <= before + 1
    assert not any(p._post_accumulate_grad_hooks for p in bare.parameters())


def parameters_may_be_replaced():
    model = DataParallel(net(), comm)
    model(X).sum().backward()
    torch.manual_seed(comm.rank)
    model.module[2] = nn.Linear(5, 3)
    model(X).sum().backward()
    same_on_all(model)
    assert len({*comm.allgather_object(model.module[2].weight.grad.numpy().tobytes())}) == 1


def layers_that_come_twice_are_explained():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            x = x.clone().requires_grad_()
            for _ in range(2):
                x = checkpoint(self.layer, x, use_reentrant=True)
            return x

    model = DataParallel(Twice(), comm)
    with pytest.raises(mpiring.GradientError, match="completed twice.*use_reentrant=False"):
        model(X).sum().backward()


def a_model_that_is_gone_averages_nothing_in_silence():
    with pytest.raises(mpiring.GradientError, match="was deleted before the backward pass"):
        DataParallel(net(), comm)(X).sum().backward()


def mistakes_of_all_ranks_are_named():
    sampler = DistributedSampler(range(9), comm)
    state = sampler.state_dict()
    for mistake, told in (
            (lambda: DistributedSampler([1], comm, seed=1 << 33), "seed=8589934592: expected"),
            (lambda: DistributedSampler([1], MPI.COMM_WORLD), "comm is a Intracomm; pass"),
            (lambda: sampler.set_epoch("a"), "epoch='a': expected a whole"),
            (lambda: sampler.set_epoch(-1), "epoch=-1: expected a whole"),
            (lambda: sampler.state_dict(seen=1.5), "seen=1.5: expected a whole"),
            (lambda: sampler.load_state_dict(None), "Sampler is a NoneType: pass"),
            (lambda: sampler.load_state_dict({}), "Sampler lacks epoch, position, seed, length"),
            (lambda: sampler.load_state_dict({**state, "position": "a"}), "position='a'"),
            (lambda: broadcast_parameters(net(), comm), r"got a Linear; .*state_dict\(\).values"),
            (lambda: broadcast_parameters(net().state_dict(), comm), "expected tensors, got a str"),
            (lambda: broadcast_optimizer_state(net(), comm), "optimizer is a Sequential; pass"),
            (lambda: mpiring.torch.export_environment(MPI.COMM_WORLD), "comm is a Intracomm"),
            (lambda: mpiring.torch.share_cores(3), "comm is a int; pass"),
            (lambda: mpiring.torch.set_random_state({}), "lacks python, numpy, torch"),
            (lambda: DataParallel(net(), comm, reducer={1: Mean()}), r"reducer\[1\]: expected"),
            (lambda: comm.empty(3, torch.float32), "a dtype of NumPy's"),
            (lambda: comm.allreduce([torch.ones(3)]), "got builtins.list")):
        with pytest.raises(mpiring.ConfigError, match=told):
            mistake()
    assert comm.empty(3, device=torch.device("cpu")).shape == (3,)
    assert comm.allreduce(torch.ones(3))[0] == comm.size


withheld_gradients_cannot_be_changed()
for how in (True, False):
    withheld_gradients_that_are_dropped_do_not_come_back(how)
dropped_models_leave_nothing()
parameters_may_be_replaced()
mistakes_of_all_ranks_are_named()
a_model_that_is_gone_averages_nothing_in_silence()
layers_that_come_twice_are_explained()
print("all is well", flush=True)
