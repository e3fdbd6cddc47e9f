"""Makes small PyTorch models, and trains them with each contender's averages."""

import gc
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from ...gpu.carriers import torch_cuda
from ...memory.arrays import Array
from ...torch import DataParallel, device_for, share_cores
from . import peers, timing
from .contenders import ALONE, GLOO, OURS, horovod
from .world import World

BACK_END = "mpiring + PyTorch's DDP"
HOROVOD = "Horovod"

_LEARNING_RATE = 1e-3
_BYTE_VALUES = 256
TEXT_LENGTH = 64
_LAYERS = 4
_PIXELS, _COLOURS, _CLASSES = 32, 3, 10
# torch.distributed's name for Gloo on an interface that we have chosen.
_GLOO_HERE = "gloo_here"


class Transformer(nn.Module):
    """A transformer over bytes that predicts each next one.

    Args:
        width: Of its vectors; a multiple of 64, the width of an attention head.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_BYTE_VALUES, width)
        self.position = nn.Parameter(torch.zeros(TEXT_LENGTH, width))
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(
            layer, _LAYERS, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, _BYTE_VALUES)
        mask = nn.Transformer.generate_square_subsequent_mask(TEXT_LENGTH)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits for each byte of each text."""
        x = self.embedding(x) + self.position
        return self.head(self.body(x, mask=self.mask, is_causal=True))


def perceptron(width: int) -> nn.Module:
    """Return a multilayer perceptron over bytes."""
    inner = [layer for _ in range(_LAYERS - 1) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(
        nn.Linear(TEXT_LENGTH, width), nn.ReLU(), *inner, nn.Linear(width, _CLASSES))


def convnet(width: int) -> nn.Module:
    """Return a convolutional network with BatchNorm, whose stages double the channels."""
    layers: list[nn.Module] = []
    channels = _COLOURS
    for stage in range(_LAYERS):
        for stride in (1 if stage == 0 else 2, 1):
            layers += [nn.Conv2d(channels, width << stage, 3, stride, padding=1, bias=False),
                       nn.BatchNorm2d(width << stage), nn.ReLU()]
            channels = width << stage
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, _CLASSES))


@dataclass(frozen=True)
class _Kind:
    """A kind of model: made from a width, a multiple of `unit`, and its data for a batch."""

    make: Callable[[int], nn.Module]
    unit: int
    batch: int
    data: Callable[[int, torch.Generator], tuple[torch.Tensor, torch.Tensor]]


def _texts(batch: int, dice: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    texts = torch.randint(_BYTE_VALUES, (batch, TEXT_LENGTH + 1), generator=dice)
    return texts[:, :-1], texts[:, 1:]


def _labelled(*shape: int) -> Callable[[int, torch.Generator], tuple[torch.Tensor, torch.Tensor]]:
    return lambda batch, dice: (torch.randn(batch, *shape, generator=dice),
                                torch.randint(_CLASSES, (batch,), generator=dice))


_KINDS = {
    "mlp": _Kind(perceptron, 16, 256, _labelled(TEXT_LENGTH)),
    "convnet": _Kind(convnet, 8, 4, _labelled(_COLOURS, _PIXELS, _PIXELS)),
    "transformer": _Kind(Transformer, 64, 4, _texts),
}


def size_of(kind: str, width: int) -> int:
    """Return a model's number of parameters."""
    with torch.device("meta"):
        return _count(_KINDS[kind].make(width))


def width_for(kind: str, parameters: int) -> int:
    """Return the width at which a model's number of parameters is closest to the wanted one."""
    def distance(width: int) -> int:
        return abs(size_of(kind, width) - parameters)

    width = unit = _KINDS[kind].unit
    while distance(width + unit) < distance(width):
        width += unit
    return width


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@dataclass(frozen=True)
class Contender:
    """A way to average gradients.

    Attributes:
        name: For tables.
        wrap: Returns what replaces a model and its optimizer.
        blocking: Takes a vector, and returns a function that sums it over the ranks.
    """

    name: str
    wrap: Callable[[nn.Module, Any], tuple[nn.Module, Any]]
    blocking: Callable[[Array], Callable[[], object]] = lambda flat: lambda: None


@dataclass(frozen=True)
class Device:
    """Where models are, and how their steps are timed."""

    torch: torch.device
    stopwatch: timing.Stopwatch


def _by_events(action: Callable[[], object]) -> float:
    """Return the seconds between two events on the current stream, around an action."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    action()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3


def device_named(world: World, name: str) -> Device:
    """Return the host, "cpu", or this rank's GPU, "cuda".

    Raises:
        MissingDependencyError: PyTorch finds no GPU.

    Collective: yes. Blocking: yes.
    """
    if name == "cpu":
        return Device(torch.device("cpu"), timing.by_clock)
    # Ranks that have a GPU would wait for a rank that has none.
    world.everywhere(torch_cuda)
    return Device(device_for(world.comm), _by_events)


class Training:
    """A model, its data, and how its gradients are averaged.

    Every rank has data of its own; all trainings of a kind begin alike.

    Args:
        contender: Averages the gradients.
        kind, width, batch: Of the model; by default a batch that takes about as long as the
            others'.
        rank: Of the data.
        device: Of model and data.

    Attributes:
        name: The contender's.
        batch: Samples per rank and step.
    """

    def __init__(self, contender: Contender, kind: str, width: int, batch: int | None,
                 rank: int, device: Device) -> None:
        self.name = contender.name
        self._kind = _KINDS[kind]
        self.batch = batch or self._kind.batch
        torch.manual_seed(0)
        self._bare = self._kind.make(width).to(device.torch)
        self._x, self._y = (x.to(device.torch) for x in self._kind.data(
            self.batch, torch.Generator().manual_seed(1 + rank)))
        self._model, self._optimizer = contender.wrap(
            self._bare, torch.optim.SGD(self._bare.parameters(), lr=_LEARNING_RATE))

    def step(self) -> None:
        """Take one step."""
        self.learn(self._x, self._y)

    def learn(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Take one step with other data on the model's device."""
        self._optimizer.zero_grad()
        logits = self._model(x)
        functional.cross_entropy(logits.flatten(0, -2), y.flatten()).backward()
        self._optimizer.step()

    def host_batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return another batch in host memory, by its number."""
        x, y = self._kind.data(self.batch, torch.Generator().manual_seed(1 << 20 | number))
        return x.contiguous(), y.contiguous()

    @property
    def parameter_count(self) -> int:
        """The model's number of parameters."""
        return _count(self._bare)

    def gradients(self) -> Mapping[str, Array]:
        """Return those of the last step, by name."""
        return {name: p.grad.cpu().numpy() for name, p in self._bare.named_parameters()}

    def parameters(self) -> Mapping[str, Array]:
        """Return the parameters, by name."""
        return {name: p.detach().cpu().numpy() for name, p in self._bare.named_parameters()}


def contenders(world: World, options: Namespace, device: Device) -> list[Contender]:
    """Connect the ranks by all contenders that a command line asks for, and return them.

    On GPUs, Horovod is left out.

    Raises:
        MissingDependencyError: A peer was asked for that is not installed.

    Collective: yes. Blocking: yes.
    """
    share_cores(world.comm)
    kinds = options.contenders
    bucket: dict[str, Any] = {} if options.bucket is None else {"bucket_bytes": options.bucket}
    found = [
        Contender(ALONE, lambda model, optimizer: (model, optimizer)),
        Contender(
            OURS, lambda model, optimizer: (
                DataParallel(model, world.comm, **bucket), optimizer),
            lambda flat: lambda: world.comm.allreduce(flat))]
    has_back_end = kinds is None or "mpiring" in kinds
    if has_back_end:
        dist.init_process_group("mpiring", init_method="mpi://")
        found.append(_with_ddp(BACK_END, dist.group.WORLD, options.bucket))
    if peers.takes_part("gloo", kinds, world):
        group = _gloo(world, options.interface, beside=has_back_end)
        found.append(_with_ddp(GLOO, group, options.bucket))
    if device.torch.type == "cpu" and peers.takes_part("horovod", kinds, world):
        found.append(_horovod(world, options))
    return found


def _with_ddp(name: str, group: Any, bucket_bytes: int | None) -> Contender:
    """Return PyTorch's DistributedDataParallel over a process group."""
    size = {} if bucket_bytes is None else {"bucket_cap_mb": bucket_bytes / 2 ** 20}

    def wrap(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        return nn.parallel.DistributedDataParallel(
            model, process_group=group, gradient_as_bucket_view=True, **size), optimizer

    def blocking(flat: Array) -> Callable[[], object]:
        tensor = peers.tensor_of(flat)
        return lambda: dist.all_reduce(tensor, group=group)

    return Contender(name, wrap, blocking)


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


def _horovod(world: World, options: Namespace) -> Contender:
    """Return Horovod's wrapper of optimizers."""
    call = horovod().blocking
    import horovod.torch as hvd

    def wrap(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        return model, hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters())

    return Contender(HOROVOD, wrap, call)


def close() -> None:
    """Leave torch.distributed, and free models.

    Collective: yes. Blocking: yes.
    """
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
