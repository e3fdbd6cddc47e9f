"""Trains two PyTorch models, of whose ranks two die, and checks them against one process.

With the argument "grow", new ranks replace the dead ones.

One has a Sharded optimizer, which is made anew after a death; so is DiLoCo, of a third one.
"""

import os
import signal
import sys

import torch
from mpi4py import MPI
from torch import nn

import mpiring
from mpiring import elastic
from mpiring.data import TokenBatches
from mpiring.torch import DataParallel, DiLoCo, DistributedSampler, Sharded

STEPS, SAMPLES = 24, 2
IS_NEW = MPI.Comm.Get_parent() != MPI.COMM_NULL
DEATHS = {3: 7, 0: 15} if len(sys.argv) > 1 and not IS_NEW else {}    # of ranks, at steps
DATA = torch.arange(240 * 5, dtype=torch.float64).reshape(240, 5).sin()
MINE = 0


def build():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def loss_of(model, indices):
    batch = DATA[indices]
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()


def union(comm, share):
    """Return the samples of all ranks."""
    return sorted(index for each in comm.allgather_object(share) for index in each)


def train(state):
    comm = state.comm
    model = DataParallel(state.model, comm, bucket_bytes=256)
    other = DataParallel(state.other, comm, bucket_bytes=256)
    sharded = Sharded(torch.optim.AdamW, other, lr=0.05, weights="node", overlap=True)
    if state.slices:
        sharded.load_state_dict(state.slices)
    # A fragment is under way at every death.
    outer = DiLoCo(state.local, comm, every=2, fragments=2, delay=1)
    if state.outer:
        outer.load_state_dict(state.outer)
        for name, p in state.local.named_parameters():
            assert (p.detach().numpy() == state.outer["parameters"][name]).all()
    sampler = DistributedSampler(DATA, comm, seed=1)
    sampler.load_state_dict(state.sampler or sampler.state_dict())
    indices = iter(sampler)
    batches = TokenBatches([3] * len(DATA), comm, tokens=24, seed=1)
    batches.load_state_dict(state.batches or batches.state_dict())
    shares = iter(batches)
    while state.step < STEPS:
        samples = [next(indices) for _ in range(SAMPLES)]
        loss = loss_of(model, samples)
        state.optimizer.zero_grad()
        if DEATHS.get(MINE) == state.step:
            # Amid backward, with gradients under way.
            model.module[0].bias.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        loss.backward()
        state.optimizer.step()
        loss_of(other, samples).backward()
        sharded.step()
        for p in state.local.parameters():
            p.data.lerp_(torch.full_like(p, 1.0 + MINE), 0.1)
        outer.step()
        state.drawn = [*state.drawn, comm.allgather_object(samples)]
        state.batched = [*state.batched, union(comm, next(shares))]
        state.step += 1
        state.sampler, state.batches = sampler.state_dict(), batches.state_dict()
        if state.step % 2 == 0:
            state.slices, state.outer = sharded.state_dict(), outer.state_dict()
            state.commit()
    assert outer.steps == STEPS
    outer.synchronize()
    assert len({p.sum().item() for model in comm.allgather_object(state.local)
                for p in [*model.parameters()][:1]}) == 1


def reference(drawn):
    """Train in this process on what all ranks have drawn, step by step."""
    model, optimizer = build()
    for shares in drawn:
        optimizer.zero_grad()
        for share in shares:
            (loss_of(model, share) / len(shares)).backward()
        optimizer.step()
    return model


comm = mpiring.init()
MINE = comm.rank
torch.manual_seed(MINE)
model, optimizer = build()
state = elastic.State(comm, model=model, optimizer=optimizer, other=build()[0], slices={},
                      local=build()[0], outer={}, sampler={}, drawn=[], batches={}, batched=[])
elastic.run(train, state, max_ranks=4 if "grow" in sys.argv else None)
seen = [index for shares in state.drawn for share in shares for index in share]
assert len(state.drawn) == STEPS and len(set(seen)) == len(seen), seen
plan = iter(TokenBatches([3] * len(DATA), state.comm, tokens=24, seed=1))
assert state.batched == [union(state.comm, next(plan)) for _ in range(STEPS)], state.batched
right = [*reference(state.drawn).parameters()]
for p, right in zip([*model.parameters(), *state.other.parameters()], 2 * right, strict=True):
    torch.testing.assert_close(p.detach(), right.detach(), rtol=1e-9, atol=1e-12)
sizes = [len(shares) for shares in state.drawn]
print(f"right {MINE}: {sizes[0]} ranks at first, {sizes[-1]} at last", flush=True)
