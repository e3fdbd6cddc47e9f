"""Makes groups, shards and saves models, and starts again over the back end; run by mpirun."""

import logging.handlers
import os
import pickle
import sys
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_state_dict, set_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import mpiring
import mpiring.torch

warnings.simplefilter("ignore")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
FOLDER = sys.argv[1]


def subgroups():
    """Overlapping groups, one after the other and at once; a rank may be in none of them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    members = [list(range(size)), list(range(0, size, 2)), [size - 1], [0, size - 1][:size]]
    # PyTorch numbers groups by how many a rank has joined: all must join as many.
    local = dist.new_group([*range(rank % 2, size, 2)], use_local_synchronization=True)
    dist.barrier(local)
    dist.destroy_process_group(local)
    groups = [dist.new_group(ranks, timeout=timedelta(seconds=30)) for ranks in members]
    for _ in range(3):
        works = []
        for number, (ranks, group) in enumerate(zip(members, groups)):
            if rank in ranks:
                x = torch.tensor([rank, 100 * number])
                works.append((x, ranks, number, dist.all_reduce(x, group=group, async_op=True)))
        # In another order than they were begun.
        for x, ranks, number, work in reversed(works):
            work.wait()
            assert x.tolist() == [sum(ranks), 100 * number * len(ranks)]
    last, _ = dist.new_subgroups(1)
    assert last.size() == 1
    if rank in members[1]:
        x = torch.tensor([rank])
        dist.broadcast(x, members[1][-1], group=groups[1])
        assert x.item() == members[1][-1]
    dist.destroy_process_group(groups[0])


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.ReLU(), nn.Linear(13, 5), nn.ReLU(), nn.Linear(5, 3))


def batch(rank, step):
    return torch.randn(6, 7, generator=torch.Generator().manual_seed(10 * step + rank))


def sharded_training(mesh):
    """fully_shard learns what one process with the whole batch learns; then save and load."""
    rank, size = dist.get_rank(), dist.get_world_size()
    alone, model = net(), net()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sharded_optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    plain_optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01, eps=1e-3)
    for step in range(4):
        model(batch(rank, step)).square().mean().backward()
        torch.cat([alone(batch(r, step)) for r in range(size)]).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        for optimizer in sharded_optimizer, plain_optimizer:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        full = parameter.full_tensor()
        torch.testing.assert_close(full, alone.get_parameter(name).detach(), atol=1e-5, rtol=1e-4)
    own, half = dist.new_group(), dist.new_group([*range(0, size, 2)])
    folder, fresh = os.path.join(FOLDER, "whole"), net()
    save_amid_collectives({"model": model.state_dict()}, checkpoint_id=folder, process_group=own)
    fully_shard(fresh, mesh=mesh)
    state = {"model": fresh.state_dict()}
    checkpoint.load(state, checkpoint_id=folder, process_group=own)
    fresh.load_state_dict(state["model"])
    for a, b in zip(model.parameters(), fresh.parameters()):
        assert torch.equal(a.full_tensor(), b.full_tensor())
    if rank % 2 == 0:
        folder = os.path.join(FOLDER, "half")
        checkpoint.save({"x": torch.ones(3)}, checkpoint_id=folder, process_group=half)
        state = {"x": torch.zeros(3)}
        checkpoint.load(state, checkpoint_id=folder, process_group=half)
        assert state["x"].sum() == 3


def save_amid_collectives(state, **where):
    """In a thread of PyTorch's, which has a group of its own, while training goes on."""
    future = checkpoint.async_save(state, **where)
    saved = torch.zeros(1)
    while not saved:
        saved.fill_(future.done())
        dist.all_reduce(saved, dist.ReduceOp.MIN)
    future.result()


class Named(nn.Module):
    """A module with names that wrappers have as well, and with parameters at its root."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.module, self.order, self.norm = nn.Linear(7, 4), nn.Linear(4, 3), nn.BatchNorm1d(3)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("temporary", torch.ones(2), persistent=False)

    def forward(self, x):
        return self.norm(self.order(self.module(x))) * self.scale


def states_of_wrappers_have_plain_names():
    """A state of a DataParallel fits a plain model, DDP and FSDP2, and the other way around."""
    comm = mpiring.init()
    kinds = {"plain": lambda model: model, "inner": lambda model: nn.Sequential(
        mpiring.torch.DataParallel(model, comm)), "ddp": nn.parallel.DistributedDataParallel,
        "ours": lambda model: mpiring.torch.DataParallel(model, comm)}

    def trained(kind, steps):
        model = kinds[kind](Named())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(steps):
            model(batch(0, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    def state_of(*two, **options):
        options = StateDictOptions(**options)
        weights, state = get_state_dict(*two, options=options)
        return {"weights": weights, "optimizer": state}, options

    for settings in ({}, {"full_state_dict": True}, {"flatten_optimizer_state_dict": True}):
        for source, target in (("ours", "plain"), ("ours", "ddp"), ("plain", "ours"),
                               ("ddp", "ours"), ("inner", "inner")):
            state, options = state_of(*trained(source, 3), **settings)
            right = pickle.dumps(state)
            other = trained(target, 1)
            set_state_dict(*other, model_state_dict=state["weights"],
                           optim_state_dict=state["optimizer"], options=options)
            again, _ = state_of(*other, **settings)
            same(again, pickle.loads(right))
    folder = os.path.join(FOLDER, "wrapped")
    state, _ = state_of(*trained("ours", 3))
    checkpoint.save(state, checkpoint_id=folder)
    kinds["sharded"] = fully_shard
    for target in ("plain", "sharded", "ours"):
        other = trained(target, 1)
        loaded, options = state_of(*other)
        checkpoint.load(loaded, checkpoint_id=folder)
        set_state_dict(*other, model_state_dict=loaded["weights"],
                       optim_state_dict=loaded["optimizer"], options=options)
        same(state_of(*other, full_state_dict=True)[0], state)
    comm.close()


def same(state, expected):
    """Check that two states have the same keys and elements."""
    if isinstance(expected, dict):
        assert set(state) == set(expected), (state, expected)
        for key in expected:
            same(state[key], expected[key])
    elif isinstance(expected, list | tuple):
        for x, y in zip(state, expected, strict=True):
            same(x, y)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(state, expected)
    else:
        assert state == expected, (state, expected)


def distributed_tensors(mesh):
    size = dist.get_world_size()
    full = torch.arange(4.0 * size * 3).reshape(4 * size, 3)
    rows = distribute_tensor(full, mesh, [Shard(0)])
    assert rows.to_local().shape == (4, 3)
    columns = rows.redistribute(mesh, [Shard(1)])
    assert torch.equal(columns.redistribute(mesh, [Replicate()]).to_local(), full)
    assert torch.equal((rows.T @ rows).full_tensor(), full.T @ full)
    assert torch.equal(rows.sum(0).full_tensor(), full.sum(0))
    layer = nn.Linear(3, 4)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
    told = "parameter weight is a DTensor.*fully_shard"
    with mpiring.init() as comm, pytest.raises(mpiring.ConfigError, match=told):
        mpiring.torch.DataParallel(layer, comm)


def again_by_environment():
    """The whole life again, by another door."""
    with mpiring.init() as comm:
        mpiring.torch.export_environment(comm)
        assert os.environ["WORLD_SIZE"] == str(comm.size)
        assert os.environ["LOCAL_RANK"] == str(comm.local_rank)
        rank = comm.rank
    dist.init_process_group("mpiring")
    assert dist.get_rank() == rank
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x[0] == dist.get_world_size()
    dist.destroy_process_group()


def another_back_end_by_environment():
    """What was meant for mpiring serves any back end, and frameworks take Gloo unasked."""
    said = logging.handlers.BufferingHandler(99)
    logging.getLogger("mpiring").addHandler(said)
    for backend in ("mpiring", None):
        assert not said.buffer
        with mpiring.init() as comm:
            mpiring.torch.export_environment(comm)
        dist.init_process_group(backend)
        rank = dist.get_rank()
        # Gloo fails where a rank leaves while others still connect to it.
        dist.barrier()
        dist.destroy_process_group()
    texts = [record.getMessage() for record in said.buffer]
    assert len(texts) == (1 if rank == 0 else 0), texts
    for text in texts:
        assert "is of cpu:gloo" in text, text
        assert "init_process_group('mpiring', init_method='mpi://')" in text, text
    dist.init_process_group("gloo", f"file://{FOLDER}/store", rank=rank,
                            world_size=int(os.environ["WORLD_SIZE"]))
    dist.barrier()
    dist.destroy_process_group()
    assert len(said.buffer) == len(texts), "what uses none of the variables is nobody's mistake"
    logging.getLogger("mpiring").removeHandler(said)


def refused():
    """A rank that is not MPI's is refused, by both doors; one rank is told how to start more."""
    size = int(os.environ["WORLD_SIZE"])
    for arguments in ({"init_method": "mpi://", "rank": int(os.environ["RANK"]),
                       "world_size": size + 1},
                      {"store": dist.HashStore(), "rank": 0, "world_size": size + 1}):
        with pytest.raises((mpiring.ConfigError, mpiring.LaunchError), match="MPI"):
            dist.init_process_group("mpiring", **arguments)
        assert not dist.is_initialized()


dist.init_process_group("mpiring", init_method="mpi://")
# For frameworks that find this group, and ask the environment how many they are.
assert os.environ["RANK"] == str(dist.get_rank()) and os.environ["ACCELERATE_USE_CPU"] == "true"
assert os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"] == str(dist.get_world_size())
subgroups()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
sharded_training(mesh)
states_of_wrappers_have_plain_names()
distributed_tensors(mesh)
dist.destroy_process_group()
again_by_environment()
another_back_end_by_environment()
refused()
dist.init_process_group("mpiring", init_method="mpi://")
dist.barrier()
print("all is well", flush=True)
# Without destroy_process_group, as many scripts end.
