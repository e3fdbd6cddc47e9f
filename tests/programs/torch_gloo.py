"""Trains over Gloo by DDP and FSDP2, and prints a digest of the weights.

Run by mpirun with `mpi://`, or by torchrun with `env://`:

    mpiexec -n 2 python tests/programs/torch_gloo.py mpi://
"""

import gc
import hashlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

METHOD = sys.argv[1]


def trained(wrap):
    """Return the weights after some steps of a wrapped model."""
    torch.manual_seed(dist.get_rank())
    net = wrap(nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 10)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for _ in range(5):
        net(torch.randn(8, 20)).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return [getattr(x, "full_tensor", lambda x=x: x)().detach() for x in net.parameters()]


def everything():
    """Return the results of training and collectives."""
    mesh, group = init_device_mesh("cpu", (dist.get_world_size(),)), dist.new_group([0, 1])
    x = torch.tensor([1.0 + dist.get_rank()])
    if dist.get_rank() < 2:
        dist.all_reduce(x, group=group)
        assert x == 3
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, dist.get_rank())
    assert ranks == [*range(dist.get_world_size())]
    return trained(lambda net: nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.001)) + (
        trained(lambda net: fully_shard(net, mesh=mesh)))


def digest_by(method):
    """Open the default process group, and return a digest of all results."""
    dist.init_process_group("gloo", init_method=method)
    results = everything()
    # A DDP model that is freed after its group may wait for a thread of Gloo that waits for Python.
    gc.collect()
    dist.destroy_process_group()
    return hashlib.sha256(b"".join(x.numpy().tobytes() for x in results)).hexdigest()


if METHOD == "mpi://":
    import mpiring.torch  # noqa: F401
    # Again, and from the variables that `mpi://` has set.
    methods = [METHOD, METHOD, "env://"]
else:
    methods = [METHOD]
print("weights", *{digest_by(method) for method in methods}, flush=True)
