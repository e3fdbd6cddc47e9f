"""Joins a PyTorch model and its optimizer to each way of training on several ranks."""

import gc
import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from ...memory.arrays import Array
from ...torch import DataParallel, Sharded, share_cores
from . import peers
from .contenders import ALONE, GLOO, OURS, Call, Contender, Shares, horovod
from .world import World

BACK_END = "mpiring + PyTorch's DDP"
HOROVOD = "Horovod"

_LEARNING_RATE = 1e-3
# With PyTorch's default, 1e-8, Adam would make whole steps of the rounding errors in gradients
# that are zero but for these (of the keys' biases), and no two sums would train alike.
_ADAM_EPS = 1e-3
# torch.distributed's name for Gloo on an interface that we have chosen.
_GLOO_HERE = "gloo_here"


# Makes an optimizer of parameters; its `func` is the class, its `keywords` are the settings.
Recipe = partial[torch.optim.Optimizer]
# What is called for a module's results, and what uses its gradients.
Joined = tuple[nn.Module, Any]
RECIPES: Mapping[str, Recipe] = {
    "sgd": partial(torch.optim.SGD, lr=_LEARNING_RATE),
    "adamw": partial(torch.optim.AdamW, lr=_LEARNING_RATE, eps=_ADAM_EPS, fused=True)}

# mpiring's optimizers of slices: what `--sharded` calls them, their names for tables, settings.
_SLICED: Mapping[str, tuple[str, Mapping[str, Any], Shares]] = {
    "slices": ("mpiring Sharded", {}, Shares(state="job")),
    "overlap": ("mpiring Sharded, overlap", {"overlap": True}, Shares(state="job")),
    "node": ("mpiring Sharded, node", {"weights": "node"}, Shares(weights="node", state="job")),
}
# The model without communication.
NOBODY = Contender(ALONE, join=lambda module, recipe: (module, recipe(module.parameters())))


def contenders(world: World, options: Namespace, device: torch.device) -> list[Contender]:
    """Connect the ranks by all contenders that a command line asks for, and return them.

    On GPUs, Horovod is left out.

    Raises:
        MissingDependencyError: A peer was asked for that is not installed.

    Collective: yes. Blocking: yes.
    """
    share_cores(world.comm)
    kinds = options.contenders
    contenders = [NOBODY, *_of_mpiring(world, options)]
    has_back_end = kinds is None or "mpiring" in kinds
    if has_back_end:
        dist.init_process_group("mpiring", init_method="mpi://")
        contenders += _over(dist.group.WORLD, BACK_END, "mpiring", options)
    if peers.takes_part("gloo", kinds, world):
        group = _gloo(world, options.interface, is_second=has_back_end)
        contenders += _over(group, GLOO, "Gloo", options)
    if device.type == "cpu" and peers.takes_part("horovod", kinds, world):
        contenders.append(_horovod())
    return contenders


def _of_mpiring(world: World, options: Namespace) -> Iterator[Contender]:
    """Yield mpiring's wrapper of models, alone and with the optimizers of slices."""
    bucket = {} if options.bucket is None else {"bucket_bytes": options.bucket}
    dense = data_parallel(world, OURS, **bucket)

    def sliced(settings: Mapping[str, Any], module: nn.Module, recipe: Recipe) -> Joined:
        model = DataParallel(module, world.comm, **bucket)
        return model, Sharded(recipe.func, model, **recipe.keywords, **settings)

    yield dense
    for name, (title, settings, shares) in _SLICED.items():
        if name in options.sharded:
            yield replace(dense, name=title, join=partial(sliced, settings), shares=shares,
                          has_means=False)


def data_parallel(world: World, name: str, **settings: Any) -> Contender:
    """Return mpiring's wrapper of models.

    Args:
        world: The ranks.
        name: For tables.
        settings: Arguments of DataParallel.
    """
    return Contender(
        name, lambda flat: lambda: world.comm.allreduce(flat),
        join=lambda module, recipe: (DataParallel(module, world.comm, **settings),
                                     recipe(module.parameters())))


def _over(group: Any, ddp_name: str, name: str, options: Namespace) -> Iterator[Contender]:
    """Yield PyTorch's own ways to train, over a process group."""
    size = {} if options.bucket is None else {"bucket_cap_mb": options.bucket / 2 ** 20}

    def blocking(flat: Array) -> Call:
        tensor = peers.tensor_of(flat)
        return lambda: dist.all_reduce(tensor, group=group)

    def ddp(module: nn.Module, recipe: Recipe) -> Joined:
        return nn.parallel.DistributedDataParallel(
            module, process_group=group, gradient_as_bucket_view=True, **size), recipe(
            module.parameters())

    def zero(module: nn.Module, recipe: Recipe) -> Joined:
        return ddp(module, recipe)[0], ZeroRedundancyOptimizer(
            module.parameters(), recipe.func, process_group=group, parameters_as_bucket_view=True,
            **recipe.keywords)

    def fsdp(module: nn.Module, recipe: Recipe) -> Joined:
        _shard(module, group)
        return module, recipe(module.parameters())

    yield Contender(ddp_name, blocking, join=ddp)
    if "zero" in options.sharded:
        yield Contender(f"{name} + ZeRO", blocking, join=zero, shares=Shares(state="job"))
    if "fsdp" in options.sharded:
        yield Contender(f"{name} + FSDP2", blocking, join=fsdp, shares=Shares("job", "job", "job"))


def _shard(model: nn.Module, group: Any) -> None:
    """Shard a model's layers, and what is left of it, by FSDP2."""
    # It warns of operations in place on outputs that are views, of which there are none here.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    layers = [module for module in model.modules()
              if isinstance(module, nn.TransformerEncoderLayer)]
    for module in (*layers, model):
        fully_shard(module, mesh=DeviceMesh.from_group(group, "cpu"))
        # Gloo has no means.
        module.set_force_sum_reduction_for_comms(True)


def _gloo(world: World, interface: str | None, *, is_second: bool) -> Any:
    """Return Gloo's process group: the default group, or another one beside it."""
    def make(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        return peers.gloo_group(store, rank, size, interface or peers.interface_for(world))

    if not hasattr(dist.Backend, _GLOO_HERE.upper()):
        dist.Backend.register_backend(_GLOO_HERE, make, devices=["cpu", "cuda"])
    if is_second:
        return dist.new_group(backend=_GLOO_HERE)
    store = peers.store_of_rank_0(world, interface or peers.interface_for(world))
    dist.init_process_group(_GLOO_HERE, store=store, rank=world.rank, world_size=world.size)
    return dist.group.WORLD


def _horovod() -> Contender:
    """Return Horovod's wrapper of optimizers."""
    call = horovod().blocking
    import horovod.torch as hvd

    def join(module: nn.Module, recipe: Recipe) -> Joined:
        return module, hvd.DistributedOptimizer(
            recipe(module.parameters()), named_parameters=module.named_parameters())

    return Contender(HOROVOD, call, join=join)


def close() -> None:
    """Leave torch.distributed, and free models.

    Collective: yes. Blocking: yes.
    """
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
