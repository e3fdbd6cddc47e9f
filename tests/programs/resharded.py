"""Saves an optimizer's slices on all ranks, and goes on from them on fewer; run by mpirun -n 3."""

import sys

import torch
from torch import nn

import mpiring
from mpiring.__main__ import main
from mpiring.torch import Checkpoints, DataParallel, Sharded, load_file

# Of a step: 1 to 3 ranks have equal shares of them.
SAMPLES = 12
FOLDER = sys.argv[1]


def made(comm, saved=None, slices=None):
    """Return a module and torch.optim.AdamW: in slices, or as it is, from a whole state."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(7, 13), nn.LayerNorm(13), nn.Linear(13, 3))
    matrices, others = ([p for p in model.parameters() if (p.dim() > 1) is is_matrix]
                        for is_matrix in (True, False))
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    if saved is not None:
        model.load_state_dict(saved["replicated"])
    if saved is not None and slices is None:
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        optimizer.load_state_dict(saved["sharded"])
    else:
        model = DataParallel(model, comm, bucket_bytes=300)
        optimizer = Sharded(torch.optim.AdamW, model, groups, lr=0.01)
    if slices is not None:
        optimizer.load_state_dict(slices)
    return model, optimizer


def train(comm, model, optimizer, steps):
    for number in steps:
        generator = torch.Generator().manual_seed(number)
        x, y = (torch.randn(SAMPLES, n, generator=generator)[comm.rank::comm.size] for n in (7, 3))
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()


with mpiring.init() as comm:
    model, optimizer = made(comm)
    train(comm, model, optimizer, range(3))
    with Checkpoints(FOLDER, comm) as checkpoints:
        checkpoints.save(3, replicated={name: x.clone() for name, x in model.state_dict().items()},
                         sharded=optimizer.sharded_state_dict())
    state = optimizer.state_dict()
    train(comm, model, optimizer, range(3, 6))
    if comm.rank == 0:
        assert main(["checkpoint", "consolidate", FOLDER, f"{FOLDER}/all.safetensors"]) == 0
    comm.barrier()
    whole = load_file(f"{FOLDER}/all.safetensors")
    for size in range(comm.size, -1, -1):
        part = comm.split(0 if comm.rank < max(size, 1) else None)
        if part is None:
            continue
        with part, Checkpoints(FOLDER, part) as checkpoints:
            # The last time, on one rank, without slices.
            other, again = made(part, whole, checkpoints.load().sharded if size else None)
            torch.testing.assert_close(again.state_dict(), state, rtol=0, atol=0)
            train(part, other, again, range(3, 6))
            torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=1e-5, atol=1e-5)
    if comm.rank == 0:
        print("goes on from slices")
