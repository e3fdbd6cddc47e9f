"""Creates small PyTorch models, and trains them on several ranks by each method."""

import gc
import itertools
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn import functional

from ...provisional import Array
from ...torch import DataParallel, Sharded, device_for, share_cores
from . import peers, timing
from .contenders import ALONE, OURS, Call, Contender, Shares, horovod
from .world import World

_BYTE_VALUES = 256
TEXT_LENGTH = 64
_LAYERS = 4
_PIXELS, _COLORS, _CLASSES = 32, 3, 10

_LEARNING_RATE = 1e-3
# The gradients of the keys' biases are zero except for rounding errors. With PyTorch's default of
# 1e-8, Adam would amplify these errors, and no two contenders would train identically.
_ADAM_EPS = 1e-3
# Name in torch.distributed of Gloo on a chosen network interface.
_GLOO_BACKEND = "gloo_on_interface"

# Creates an optimizer of parameters; `func` is its class, and `keywords` are its settings.
Recipe = partial[torch.optim.Optimizer]
# The model to call, and the optimizer.
Joined = tuple[nn.Module, Any]
RECIPES: Mapping[str, Recipe] = {
    "sgd": partial(torch.optim.SGD, lr=_LEARNING_RATE),
    "adamw": partial(torch.optim.AdamW, lr=_LEARNING_RATE, eps=_ADAM_EPS, fused=True)}

# Sharded optimizers of mpiring, by name for `--sharded`: name in tables, settings, and shares.
_SLICED: Mapping[str, tuple[str, Mapping[str, Any], Shares]] = {
    "slices": ("mpiring Sharded", {}, Shares(state="job")),
    "overlap": ("mpiring Sharded, overlap", {"overlap": True}, Shares(state="job")),
    "node": ("mpiring Sharded, node", {"weights": "node"}, Shares(weights="node", state="job")),
}
# The model without communication.
NOBODY = Contender(ALONE, join=lambda module, recipe: (module, recipe(module.parameters())))

# Data and targets of a step.
Batch = tuple[torch.Tensor, torch.Tensor]


class Transformer(nn.Module):
    """A byte-level transformer that predicts each next byte.

    The length of its vectors, `width`, is a multiple of 64, the width of an attention head. Texts
    have at most `longest` bytes.
    """

    def __init__(self, width: int, longest: int = TEXT_LENGTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_BYTE_VALUES, width)
        self.position = nn.Parameter(
            torch.zeros(longest, width, device=self.embedding.weight.device))
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(
            layer, _LAYERS, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, _BYTE_VALUES)
        mask = nn.Transformer.generate_square_subsequent_mask(longest)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits for each byte of each text."""
        length = x.shape[1]
        x = self.embedding(x) + self.position[:length]
        return self.head(self.body(x, mask=self.mask[:length, :length], is_causal=True))


def perceptron(width: int) -> nn.Module:
    """Return a multilayer perceptron over bytes."""
    inner = [layer for _ in range(_LAYERS - 1) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(
        nn.Linear(TEXT_LENGTH, width), nn.ReLU(), *inner, nn.Linear(width, _CLASSES))


def convnet(width: int) -> nn.Module:
    """Return a convolutional network with BatchNorm, whose stages double the channels."""
    layers: list[nn.Module] = []
    channels = _COLORS
    for stage in range(_LAYERS):
        for stride in (1 if stage == 0 else 2, 1):
            layers += [nn.Conv2d(channels, width << stage, 3, stride, padding=1, bias=False),
                       nn.BatchNorm2d(width << stage), nn.ReLU()]
            channels = width << stage
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, _CLASSES))


@dataclass(frozen=True)
class _Kind:
    """A kind of model: constructor, unit of its widths, default batch size, and data of a batch."""

    make: Callable[[int], nn.Module]
    unit: int
    batch: int
    data: Callable[[int, torch.Generator], Batch]


def _texts(batch: int, rng: torch.Generator) -> Batch:
    texts = torch.randint(_BYTE_VALUES, (batch, TEXT_LENGTH + 1), generator=rng, device="cpu")
    return texts[:, :-1], texts[:, 1:]


def _labeled(*shape: int) -> Callable[[int, torch.Generator], Batch]:
    return lambda batch, rng: (torch.randn(batch, *shape, generator=rng, device="cpu"),
                               torch.randint(_CLASSES, (batch,), generator=rng, device="cpu"))


_KINDS = {
    "mlp": _Kind(perceptron, 16, 256, _labeled(TEXT_LENGTH)),
    "convnet": _Kind(convnet, 8, 4, _labeled(_COLORS, _PIXELS, _PIXELS)),
    "transformer": _Kind(Transformer, 64, 4, _texts),
}


def model_of(kind: str, width: int) -> nn.Module:
    """Return a model; models of the same kind and width begin with the same weights."""
    torch.manual_seed(0)
    return _KINDS[kind].make(width)


def batch_of(kind: str, samples: int | None, seed: int) -> Batch:
    """Return a batch of data for a kind of model, in host memory.

    With the default number of samples, batches of all kinds take about the same time.
    """
    x, y = _KINDS[kind].data(samples or _KINDS[kind].batch, torch.Generator().manual_seed(seed))
    return x.contiguous(), y.contiguous()


def width_for(kind: str, parameters: int) -> int:
    """Return the width at which the number of parameters is closest to a given number."""
    def distance(width: int) -> int:
        with torch.device("meta"):
            module = _KINDS[kind].make(width)
        return abs(sum(p.numel() for p in module.parameters()) - parameters)

    width = unit = _KINDS[kind].unit
    while distance(width + unit) < distance(width):
        width += unit
    return width


@dataclass(frozen=True)
class ModelDevice:
    """The device of models, and how their steps are timed."""

    torch: torch.device
    stopwatch: timing.Stopwatch


def _by_events(action: Callable[[], object]) -> float:
    """Return the seconds of an action, between two events on the current stream."""
    began, ended = (torch.Event(enable_timing=True) for _ in range(2))
    began.record()
    action()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3


def device_named(world: World, name: str) -> ModelDevice:
    """Return the host, "cpu", or this rank's GPU, "cuda"; without one, MissingDependencyError."""
    if name == "cpu":
        return ModelDevice(torch.device("cpu"), timing.by_clock)
    return ModelDevice(device_for(world.comm), _by_events)


class Training:
    """A module, its data, and how it is trained.

    The `model` is called for the module's results. The data and targets of each step are on the
    module's device.
    """

    def __init__(self, name: str, module: nn.Module, model: Any, optimizer: Any,
                 batches: Iterable[Batch]) -> None:
        self.name, self.module, self.model, self.optimizer = name, module, model, optimizer
        self._batches = iter(batches)

    def step(self) -> None:
        """Take one step."""
        self.learn(*next(self._batches))

    def learn(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Take one step with other data."""
        self.optimizer.zero_grad()
        loss(self.model, x, y).backward()
        self.optimizer.step()

    @property
    def parameter_count(self) -> int:
        """The model's number of parameters."""
        return sum(p.numel() for p in self.module.parameters())

    def gradients(self) -> Mapping[str, Array]:
        """Return the gradients of the last step, by name; with FSDP2, on all ranks together."""
        return {name: _gathered(p.grad) for name, p in self.module.named_parameters()}

    def parameters(self) -> Mapping[str, Array]:
        """Return the parameters, by name; with FSDP2, on all ranks together."""
        if isinstance(self.optimizer, Sharded):
            self.optimizer.synchronize()
        return {name: _gathered(p.detach()) for name, p in self.module.named_parameters()}


def training_of(contender: Contender, kind: str, width: int, recipe: Any, batch: Batch) -> Training:
    """Return the training of a model with one batch; `recipe` creates the optimizer."""
    module = model_of(kind, width).to(batch[0].device)
    model, optimizer = contender.join(module, recipe)
    return Training(contender.name, module, model, optimizer, itertools.repeat(batch))


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor, reduction: str = "mean",
         ) -> torch.Tensor:
    """Return the cross entropy of a model's predictions; targets of -100 do not count."""
    return functional.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction=reduction)


def _gathered(tensor: torch.Tensor) -> Array:
    """Return a tensor's values, gathered if each rank has a shard."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().numpy()


def contenders(world: World, options: Namespace, device: torch.device) -> list[Contender]:
    """Connect the ranks through all requested contenders, and return the contenders.

    On GPUs, Horovod is left out. It raises MissingDependencyError if a requested peer is not
    installed.
    """
    share_cores(world.comm)
    kinds = options.contenders
    contenders = [NOBODY, *_mpiring_contenders(world, options)]
    if kinds is None or "mpiring" in kinds:
        dist.init_process_group("mpiring", init_method="mpi://")
        contenders += _torch_contenders(dist.group.WORLD, "mpiring", options)
    if peers.takes_part("gloo", kinds, world):
        contenders += _torch_contenders(_gloo(world, options.interface), "Gloo", options)
    by_horovod = device.type == "cpu" and peers.takes_part("horovod", kinds, world)
    if by_horovod:
        call = horovod().blocking
        import horovod.torch as hvd
        contenders.append(_by_optimizer("Horovod", call, hvd.DistributedOptimizer))
    if "hvd" in (kinds or ()) or by_horovod and kinds is None:
        from ...horovod.torch import DistributedOptimizer, init
        init()
        contenders.append(_by_optimizer(
            "mpiring.horovod", contenders[1].blocking, DistributedOptimizer))
    return contenders


def _mpiring_contenders(world: World, options: Namespace) -> Iterator[Contender]:
    """Yield DataParallel of mpiring, alone and with the requested sharded optimizers."""
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
    """Return DataParallel of mpiring with these settings."""
    return Contender(
        name, lambda flat: lambda: world.comm.allreduce(flat),
        join=lambda module, recipe: (DataParallel(module, world.comm, **settings),
                                     recipe(module.parameters())))


def _torch_contenders(group: Any, name: str, options: Namespace) -> Iterator[Contender]:
    """Yield PyTorch's own methods of training, on a process group."""
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
        _shard_layers(module, group)
        return module, recipe(module.parameters())

    yield Contender(f"{name} + PyTorch's DDP", blocking, join=ddp)
    if "zero" in options.sharded:
        yield Contender(f"{name} + ZeRO", blocking, join=zero, shares=Shares(state="job"))
    if "fsdp" in options.sharded:
        yield Contender(f"{name} + FSDP2", blocking, join=fsdp, shares=Shares("job", "job", "job"))


def _shard_layers(model: nn.Module, group: Any) -> None:
    """Shard a model with FSDP2: each layer, then the remaining parameters."""
    # FSDP2 warns of in-place operations on outputs that are views; there are none here.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    layers = [module for module in model.modules()
              if isinstance(module, nn.TransformerEncoderLayer)]
    for module in (*layers, model):
        fully_shard(module, mesh=DeviceMesh.from_group(group, "cpu"))
        # Gloo cannot average.
        module.set_force_sum_reduction_for_comms(True)


def _gloo(world: World, interface: str | None) -> Any:
    """Return Gloo's process group: the default group, or another one."""
    interface = interface or peers.interface_for(world)

    def make(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        return peers.gloo_group(store, rank, size, interface)

    if not hasattr(dist.Backend, _GLOO_BACKEND.upper()):
        dist.Backend.register_backend(_GLOO_BACKEND, make, devices=["cpu", "cuda"])
    if dist.is_initialized():
        return dist.new_group(backend=_GLOO_BACKEND)
    store = peers.store_of_rank_0(world, interface)
    dist.init_process_group(_GLOO_BACKEND, store=store, rank=world.rank, world_size=world.size)
    return dist.group.WORLD


def _by_optimizer(name: str, call: Callable[[Array], Call], wrapper: Any) -> Contender:
    """Return a method of training that wraps the optimizer, as Horovod does."""
    def join(module: nn.Module, recipe: Recipe) -> Joined:
        return module, wrapper(
            recipe(module.parameters()), named_parameters=module.named_parameters())

    return Contender(name, call, join=join)


def close() -> None:
    """Leave torch.distributed on all ranks, and free models."""
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
