"""Makes small PyTorch models, and trains them with each contender."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from ...gpu import accelerator
from ...memory.arrays import Array
from ...torch import Sharded, device_for
from . import timing
from .torch_contenders import Contender, Recipe
from .world import World

_BYTE_VALUES = 256
TEXT_LENGTH = 64
_LAYERS = 4
_PIXELS, _COLOURS, _CLASSES = 32, 3, 10


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
class Device:
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


def device_named(world: World, name: str) -> Device:
    """Return the host, "cpu", or this rank's GPU, "cuda".

    Raises:
        MissingDependencyError: PyTorch finds no GPU.

    Collective: yes. Blocking: yes.
    """
    if name == "cpu":
        return Device(torch.device("cpu"), timing.by_clock)
    # Ranks that have a GPU would wait for a rank that has none.
    world.everywhere(accelerator.available)
    return Device(device_for(world.comm), _by_events)


class Training:
    """A model, its data, and how it is trained.

    Every rank has data of its own; all trainings of a kind begin alike.

    Args:
        contender: The way to train.
        kind, width, batch: Of the model; by default a batch that takes about as long as the
            others'.
        rank: Of the data.
        device: Of model and data.
        recipe: The optimizer.

    Attributes:
        name: The contender's.
        batch: Samples per rank and step.
    """

    def __init__(self, contender: Contender, kind: str, width: int, batch: int | None,
                 rank: int, device: Device, recipe: Recipe) -> None:
        self.name = contender.name
        self._kind = _KINDS[kind]
        self.batch = batch or self._kind.batch
        torch.manual_seed(0)
        self._bare = self._kind.make(width).to(device.torch)
        self._x, self._y = (x.to(device.torch) for x in self._kind.data(
            self.batch, torch.Generator().manual_seed(1 + rank)))
        self._model, self._optimizer = contender.join(self._bare, recipe)

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
        """Return those of the last step, by name.

        Collective: with FSDP2. Blocking: with FSDP2.
        """
        return {name: _whole(p.grad) for name, p in self._bare.named_parameters()}

    def parameters(self) -> Mapping[str, Array]:
        """Return the parameters, by name.

        Collective: with FSDP2. Blocking: with FSDP2.
        """
        if isinstance(self._optimizer, Sharded):
            self._optimizer.synchronize()
        return {name: _whole(p.detach()) for name, p in self._bare.named_parameters()}


def _whole(tensor: torch.Tensor) -> Array:
    """Return a tensor's values, gathered where each rank has a shard."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().numpy()
