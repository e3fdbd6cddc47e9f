"""Makes small PyTorch models, and trains them on several ranks."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from ...gpu import accelerator
from ...memory.arrays import Array
from ...torch import Sharded, device_for
from . import timing
from .contenders import Contender
from .world import World

_BYTE_VALUES = 256
TEXT_LENGTH = 64
_LAYERS = 4
_PIXELS, _COLOURS, _CLASSES = 32, 3, 10

# Data and targets of a step.
Batch = tuple[torch.Tensor, torch.Tensor]


class Transformer(nn.Module):
    """A transformer over bytes that predicts each next one.

    Args:
        width: Of its vectors; a multiple of 64, the width of an attention head.
        longest: It reads at most so many bytes.
    """

    def __init__(self, width: int, longest: int = TEXT_LENGTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_BYTE_VALUES, width)
        self.position = nn.Parameter(torch.zeros(longest, width))
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
    data: Callable[[int, torch.Generator], Batch]


def _texts(batch: int, dice: torch.Generator) -> Batch:
    texts = torch.randint(_BYTE_VALUES, (batch, TEXT_LENGTH + 1), generator=dice)
    return texts[:, :-1], texts[:, 1:]


def _labelled(*shape: int) -> Callable[[int, torch.Generator], Batch]:
    return lambda batch, dice: (torch.randn(batch, *shape, generator=dice),
                                torch.randint(_CLASSES, (batch,), generator=dice))


_KINDS = {
    "mlp": _Kind(perceptron, 16, 256, _labelled(TEXT_LENGTH)),
    "convnet": _Kind(convnet, 8, 4, _labelled(_COLOURS, _PIXELS, _PIXELS)),
    "transformer": _Kind(Transformer, 64, 4, _texts),
}


def model_of(kind: str, width: int) -> nn.Module:
    """Return a model; all of a kind and width begin with the same weights."""
    torch.manual_seed(0)
    return _KINDS[kind].make(width)


def batch_of(kind: str, samples: int | None, seed: int) -> Batch:
    """Return a batch of data for a kind of model, in host memory.

    Args:
        samples: Number of samples; by default, batches of all kinds take about as long.
        seed: Seed of the random data.
    """
    x, y = _KINDS[kind].data(samples or _KINDS[kind].batch, torch.Generator().manual_seed(seed))
    return x.contiguous(), y.contiguous()


def size_of(kind: str, width: int) -> int:
    """Return a model's number of parameters."""
    with torch.device("meta"):
        return sum(p.numel() for p in _KINDS[kind].make(width).parameters())


def width_for(kind: str, parameters: int) -> int:
    """Return the width at which a model's number of parameters is closest to the wanted one."""
    def distance(width: int) -> int:
        return abs(size_of(kind, width) - parameters)

    width = unit = _KINDS[kind].unit
    while distance(width + unit) < distance(width):
        width += unit
    return width


@dataclass(frozen=True)
class ModelDevice:
    """Where models are, and how their steps are timed."""

    torch: torch.device
    stopwatch: timing.Stopwatch


def _by_events(action: Callable[[], object]) -> float:
    """Return the seconds between two events on the current stream, around an action."""
    began, ended = (torch.Event(enable_timing=True) for _ in range(2))
    began.record()
    action()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3


def device_named(world: World, name: str) -> ModelDevice:
    """Return the host, "cpu", or this rank's GPU, "cuda".

    Raises:
        MissingDependencyError: PyTorch finds no GPU.

    Collective: yes. Blocking: yes.
    """
    if name == "cpu":
        return ModelDevice(torch.device("cpu"), timing.by_clock)
    # Ranks that have a GPU would wait for a rank that has none.
    world.everywhere(accelerator.available)
    return ModelDevice(device_for(world.comm), _by_events)


class Training:
    """A module, its data, and how it is trained.

    Args:
        name: Name of the method, for tables.
        module: Module that is trained.
        model: Called for the module's results.
        optimizer: What uses the gradients that backward() has left.
        batches: Data and targets of each step, on the module's device.
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
        """Return those of the last step, by name.

        Collective: with FSDP2. Blocking: with FSDP2.
        """
        return {name: _gathered(p.grad) for name, p in self.module.named_parameters()}

    def parameters(self) -> Mapping[str, Array]:
        """Return the parameters, by name.

        Collective: with FSDP2. Blocking: with FSDP2.
        """
        if isinstance(self.optimizer, Sharded):
            self.optimizer.synchronize()
        return {name: _gathered(p.detach()) for name, p in self.module.named_parameters()}


def training_of(contender: Contender, kind: str, width: int, recipe: Any, batch: Batch) -> Training:
    """Return the training of a model with one batch, on the batch's device.

    Args:
        recipe: Makes the optimizer.
    """
    module = model_of(kind, width).to(batch[0].device)
    model, optimizer = contender.join(module, recipe)
    return Training(contender.name, module, model, optimizer, itertools.repeat(batch))


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor, reduction: str = "mean",
         ) -> torch.Tensor:
    """Return the cross entropy of a model's predictions; targets of -100 do not count."""
    return functional.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction=reduction)


def _gathered(tensor: torch.Tensor) -> Array:
    """Return a tensor's values, gathered where each rank has a shard."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().numpy()
