"""Joins a PyTorch model and its optimizer to each way of training on several ranks."""

import gc
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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
from .contenders import ALONE, GLOO, OURS, horovod
from .world import World

BACK_END = "mpiring + PyTorch's DDP"
HOROVOD = "Horovod"

_LEARNING_RATE = 1e-3
# With PyTorch's default, 1e-8, Adam would make whole steps of the rounding errors in gradients
# that are zero but for these (of the keys' biases), and no two sums would train alike.
_ADAM_EPS = 1e-3
# torch.distributed's name for Gloo on an interface that we have chosen.
_GLOO_HERE = "gloo_here"
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Recipe:
    """An optimizer to be made, of a model that may be wrapped first.

    Attributes:
        kind: Its class.
        settings: Its defaults.
        state_bytes: What it remembers, per parameter.
    """

    kind: type[torch.optim.Optimizer]
    settings: dict[str, Any]
    state_bytes: int

    def of(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of a model's parameters."""
        return self.kind(model.parameters(), **self.settings)


RECIPES = {
    "sgd": Recipe(torch.optim.SGD, {"lr": _LEARNING_RATE}, 0),
    "adamw": Recipe(torch.optim.AdamW, {"lr": _LEARNING_RATE, "eps": _ADAM_EPS, "fused": True},
                    2 * _FLOAT_BYTES)}


@dataclass(frozen=True)
class Shares:
    """Who shares one copy of what training holds: nobody ("rank"), a "node", or the "job".

    Attributes:
        weights, gradients, state: Of the optimizer.
    """

    weights: str = "rank"
    gradients: str = "rank"
    state: str = "rank"

    def bytes_per_parameter(self, recipe: Recipe, node_ranks: int, ranks: int) -> float:
        """Return what all processes of a node hold together, in float32.

        Args:
            node_ranks: Of that node, of all `ranks`.
        """
        copies = {"rank": node_ranks, "node": 1, "job": node_ranks / ranks}
        return (_FLOAT_BYTES * (copies[self.weights] + copies[self.gradients])
                + recipe.state_bytes * copies[self.state])


# mpiring's optimizers of slices: what `--sharded` calls them, their names for tables, settings.
_SLICED: Mapping[str, tuple[str, Mapping[str, Any], Shares]] = {
    "slices": ("mpiring Sharded", {}, Shares(state="job")),
    "overlap": ("mpiring Sharded, overlap", {"overlap": True}, Shares(state="job")),
    "node": ("mpiring Sharded, node", {"weights": "node"}, Shares(weights="node", state="job")),
}


@dataclass(frozen=True)
class Contender:
    """A way to train on several ranks.

    Attributes:
        name: For tables.
        join: Returns what replaces a model, and the optimizer that goes with it.
        blocking: Takes a vector, and returns a function that sums it over the ranks.
        shares: Who shares weights, gradients and state.
        has_means: Whether each rank has all means after a backward pass, to be checked.
    """

    name: str
    join: Callable[[nn.Module, Recipe], tuple[nn.Module, torch.optim.Optimizer]]
    blocking: Callable[[Array], Callable[[], object]] = lambda flat: lambda: None
    shares: Shares = Shares()
    has_means: bool = True


def alone() -> Contender:
    """Return the model without communication."""
    return Contender(ALONE, lambda model, recipe: (model, recipe.of(model)))


def contenders(world: World, options: Namespace, device: torch.device) -> list[Contender]:
    """Connect the ranks by all contenders that a command line asks for, and return them.

    On GPUs, Horovod is left out.

    Raises:
        MissingDependencyError: A peer was asked for that is not installed.

    Collective: yes. Blocking: yes.
    """
    share_cores(world.comm)
    kinds = options.contenders
    found = [alone(), _data_parallel(world, options), *_sliced(world, options)]
    has_back_end = kinds is None or "mpiring" in kinds
    if has_back_end:
        dist.init_process_group("mpiring", init_method="mpi://")
        found += _over(dist.group.WORLD, BACK_END, "mpiring", options)
    if peers.takes_part("gloo", kinds, world):
        group = _gloo(world, options.interface, beside=has_back_end)
        found += _over(group, GLOO, "Gloo", options)
    if device.type == "cpu" and peers.takes_part("horovod", kinds, world):
        found.append(_horovod())
    return found


def _data_parallel(world: World, options: Namespace) -> Contender:
    """Return mpiring's wrapper of models."""
    return Contender(
        OURS, lambda model, recipe: (_wrapped(model, world, options), recipe.of(model)),
        lambda flat: lambda: world.comm.allreduce(flat))


def _sliced(world: World, options: Namespace) -> Iterator[Contender]:
    """Yield mpiring's optimizers of slices."""
    def join(settings: Mapping[str, Any], model: nn.Module, recipe: Recipe,
             ) -> tuple[nn.Module, torch.optim.Optimizer]:
        wrapped = _wrapped(model, world, options)
        return wrapped, Sharded(recipe.kind, wrapped, **recipe.settings, **settings)

    for name, (title, settings, shares) in _SLICED.items():
        if name in options.sharded:
            yield Contender(title, partial(join, settings),
                            lambda flat: lambda: world.comm.allreduce(flat), shares,
                            has_means=False)


def _wrapped(model: nn.Module, world: World, options: Namespace) -> DataParallel:
    bucket: dict[str, Any] = {} if options.bucket is None else {"bucket_bytes": options.bucket}
    return DataParallel(model, world.comm, **bucket)


def _over(group: Any, ddp_name: str, name: str, options: Namespace) -> Iterator[Contender]:
    """Yield PyTorch's own ways to train, over a process group."""
    size = {} if options.bucket is None else {"bucket_cap_mb": options.bucket / 2 ** 20}

    def blocking(flat: Array) -> Callable[[], object]:
        tensor = peers.tensor_of(flat)
        return lambda: dist.all_reduce(tensor, group=group)

    def ddp(model: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(
            model, process_group=group, gradient_as_bucket_view=True, **size)

    def zero(model: nn.Module, recipe: Recipe) -> tuple[nn.Module, torch.optim.Optimizer]:
        return ddp(model), ZeroRedundancyOptimizer(
            model.parameters(), recipe.kind, process_group=group, parameters_as_bucket_view=True,
            **recipe.settings)

    def fsdp(model: nn.Module, recipe: Recipe) -> tuple[nn.Module, torch.optim.Optimizer]:
        _shard(model, group)
        return model, recipe.of(model)

    yield Contender(ddp_name, lambda model, recipe: (ddp(model), recipe.of(model)), blocking)
    if "zero" in options.sharded:
        yield Contender(f"{name} + ZeRO", zero, blocking, Shares(state="job"))
    if "fsdp" in options.sharded:
        yield Contender(f"{name} + FSDP2", fsdp, blocking, Shares("job", "job", "job"))


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


def _gloo(world: World, interface: str | None, *, beside: bool) -> Any:
    """Return Gloo's process group: the default group, or another one beside it."""
    def make(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        return peers.gloo_group(store, rank, size, interface or peers.interface_for(world))

    if not hasattr(dist.Backend, _GLOO_HERE.upper()):
        dist.Backend.register_backend(_GLOO_HERE, make, devices=["cpu", "cuda"])
    if beside:
        return dist.new_group(backend=_GLOO_HERE)
    store = peers.store_of_rank_0(world, interface or peers.interface_for(world))
    dist.init_process_group(_GLOO_HERE, store=store, rank=world.rank, world_size=world.size)
    return dist.group.WORLD


def _horovod() -> Contender:
    """Return Horovod's wrapper of optimizers."""
    call = horovod().blocking
    import horovod.torch as hvd

    def join(model: nn.Module, recipe: Recipe) -> tuple[nn.Module, torch.optim.Optimizer]:
        return model, hvd.DistributedOptimizer(
            recipe.of(model), named_parameters=model.named_parameters())

    return Contender(HOROVOD, join, call)


def close() -> None:
    """Leave torch.distributed, and free models.

    Collective: yes. Blocking: yes.
    """
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
