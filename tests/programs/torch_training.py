"""Trains with PyTorch's own parallel wrappers over this back end and over Gloo; run by mpirun.

Over Gloo on the CPU, over this one there or on a GPU; see whereabouts.
"""

import contextlib
import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from whereabouts import CUDA, WHERE

import mpiring.torch  # noqa: F401 (registers the back end)

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
warnings.simplefilter("ignore")
dist.init_process_group(
    "mpiring", init_method="mpi://", device_id=WHERE if CUDA else None)
RANK, SIZE = dist.get_rank(), dist.get_world_size()
GLOO = dist.new_group(backend="gloo")
OURS = dist.group.WORLD
# NCCL's groups can; that is asked where a device_id was given.
assert OURS.supports_splitting is False


class Branches(nn.Module):
    """Several small buckets, a buffer, an embedding, and layers that one rank may not use."""

    def __init__(self, sparse=False):
        super().__init__()
        self.embedding = nn.Embedding(50, 16, sparse=sparse)
        self.body = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)), nn.BatchNorm1d(16))
        self.left, self.right = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x, branch=0):
        x = self.body(self.embedding(x))
        return (self.left(x) if branch != 1 else 0) + (self.right(x) if branch != 2 else 0)


def batch(step):
    generator = torch.Generator().manual_seed(100 * step + RANK)
    return torch.randint(50, (8,), generator=generator)


def trained(group, hook=None, branch=0, steps=5, accumulate=False, uneven=False,
            optimizer=torch.optim.SGD, model=Branches, **settings):
    """Return the parameters after some steps; ranks begin with different ones."""
    torch.manual_seed(RANK)
    where = WHERE if group is OURS else torch.device("cpu")
    wrapped = DistributedDataParallel(
        model().to(where), process_group=group, bucket_cap_mb=0.002, **settings)
    if hook is not None:
        wrapped.register_comm_hook(*hook(group))
    optimizer = optimizer(wrapped.parameters(), lr=0.1)
    joined = Join([wrapped]) if uneven else contextlib.nullcontext()
    with joined:
        for step in range(steps + RANK if uneven else steps):
            later = wrapped.no_sync() if accumulate and step % 2 == 0 else contextlib.nullcontext()
            with later:
                loss = wrapped(batch(step).to(where), branch).square().mean()
                loss.backward()
            if not (accumulate and step % 2 == 0):
                optimizer.step()
                optimizer.zero_grad()
    return [p.detach() for p in wrapped.parameters()]


def power_sgd(group):
    state = powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1)
    return state, powerSGD_hook.powerSGD_hook


def zero(parameters, lr):
    return ZeroRedundancyOptimizer(
        parameters, torch.optim.SGD, lr=lr, momentum=0.5, process_group=zero.group)


MODES = {
    "plain": {},
    "buffers per bucket": {"gradient_as_bucket_view": True},
    "unused parameters": {"find_unused_parameters": True, "branch": 1 + RANK % 2},
    "static graph": {"static_graph": True},
    "no_sync": {"accumulate": True},
    "join": {"uneven": True},
    "sparse": {"model": lambda: Branches(sparse=True)},
    "fp16": {"hook": lambda group: (group, default_hooks.fp16_compress_hook)},
    "allreduce hook": {"hook": lambda group: (group, default_hooks.allreduce_hook)},
    "powerSGD": {"hook": power_sgd},
    "zero": {"optimizer": zero},
}

failures = []
for name, settings in MODES.items():
    results = {}
    for group in GLOO, OURS:
        zero.group = group
        # Gloo completes futures out of order: with it, a hook's own collectives may meet others.
        plain = group is GLOO and name == "powerSGD"
        results[group] = trained(group) if plain else trained(group, **settings)
    for ours, theirs in zip(results[OURS], results[GLOO], strict=True):
        loose = name in ("powerSGD", "fp16")
        if not torch.allclose(ours.cpu(), theirs, rtol=1e-2, atol=0.2 if loose else 1e-5):
            failures.append(f"rank {RANK}: {name}: differs from Gloo by "
                            f"{(ours.cpu() - theirs).abs().max()}")
            break
    for ours in results[OURS]:
        copies = [torch.empty_like(ours) for _ in range(SIZE)]
        dist.all_gather(copies, ours)
        if not all(torch.equal(x, ours) for x in copies):
            failures.append(f"rank {RANK}: {name}: ranks differ")
            break

if failures:
    print(*failures, sep="\n", file=sys.stderr, flush=True)
    sys.exit(1)
print(f"all is well: {len(MODES)} ways of training agree with Gloo", flush=True)
dist.destroy_process_group()
