"""Makes small PyTorch models, and trains them on several ranks."""

import itertools
import math
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from ...communicator import Communicator
from ...errors import ConfigError
from ...gpu import accelerator
from ...memory.arrays import Array
from ...record.statistics import Statistics
from ...reducers import Reducer
from ...torch import DataParallel, Sharded, device_for
from . import timing
from .contenders import Contender
from .world import World

_BYTE_VALUES = 256
TEXT_LENGTH = 64
_LAYERS = 4
_PIXELS, _COLOURS, _CLASSES = 32, 3, 10
# The last tenth of the modules is for validation.
_FEWEST_MODULES = 10
_AT_ONCE = 32
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}

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


class TrainingMethod:
    """A way to train a module on several ranks; as it is, each rank trains for itself.

    Args:
        model: Called for the module's results.
        optimizer: What uses the gradients that backward() has left.

    Attributes:
        settings: Settings of the method, for a reader.
        statistics: Costs of its communication so far, on this rank.
    """

    settings, statistics = "", Statistics()

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer

    def step(self) -> None:
        """Use the gradients that backward() has left."""
        self.optimizer.step()

    def meet(self) -> None:
        """Prepare for ranks that wait for each other; called on all ranks."""

    def show(self) -> AbstractContextManager[Any]:
        """Return a block in which the module has the parameters to be judged.

        Collective: yes. Blocking: yes.
        """
        return nullcontext()

    def finish(self) -> None:
        """End the training: the module has the same parameters on all ranks.

        Collective: yes. Blocking: yes.
        """


class MeanGradients(TrainingMethod):
    """Averages the gradients of each step.

    Args:
        module: Module that is trained.
        comm: Communicator of the ranks.
        optimizer: Optimizer of the module.
        reducer: How gradients become their mean.
    """

    def __init__(self, module: nn.Module, comm: Communicator, optimizer: Any,
                 reducer: Reducer | None = None) -> None:
        # Its only buffer, the mask, is a constant.
        self._parallel = DataParallel(module, comm, reducer=reducer, broadcast_buffers=False)
        super().__init__(self._parallel, optimizer)
        self.settings = "" if reducer is None else repr(reducer)

    def step(self) -> None:
        """Take a step."""
        self.statistics += self._parallel.statistics
        super().step()


class Training:
    """A module, its data, and how it is trained.

    Args:
        name: Name of the method, for tables.
        module: Module that is trained.
        method: How the ranks train the module.
        batches: Data and targets of each step, on the module's device.
    """

    def __init__(self, name: str, module: nn.Module, method: TrainingMethod,
                 batches: Iterable[Batch]) -> None:
        self.name, self.module, self.method = name, module, method
        self._batches = iter(batches)

    def step(self) -> None:
        """Take one step."""
        self.learn(*next(self._batches))

    def learn(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Take one step with other data."""
        self.method.optimizer.zero_grad()
        loss(self.method.model, x, y).backward()
        self.method.step()

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
        if isinstance(self.method.optimizer, Sharded):
            self.method.optimizer.synchronize()
        return {name: _gathered(p.detach()) for name, p in self.module.named_parameters()}


def training_of(contender: Contender, kind: str, width: int, recipe: Any, batch: Batch) -> Training:
    """Return the training of a model with one batch, on the batch's device.

    Args:
        recipe: Makes the optimizer.
    """
    model = model_of(kind, width).to(batch[0].device)
    return Training(contender.name, model, contender.join(model, recipe), itertools.repeat(batch))


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor, reduction: str = "mean",
         ) -> torch.Tensor:
    """Return the cross entropy of a model's predictions; targets of -100 do not count."""
    return functional.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction=reduction)


def _gathered(tensor: torch.Tensor) -> Array:
    """Return a tensor's values, gathered where each rank has a shard."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().numpy()


@dataclass(frozen=True)
class Texts:
    """Text to train a transformer on, and other text.

    Attributes:
        training: Bytes, shape (n,).
        validation: Texts, each a byte longer than the model reads; shape (m, TEXT_LENGTH + 1).
    """

    training: torch.Tensor
    validation: torch.Tensor


def standard_library(world: World, count: int) -> Texts:
    """Return the modules of the standard library that runs this.

    Args:
        count: Number of the texts to validate on.

    Raises:
        ConfigError: There are no such files.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    modules = sorted(folder.glob("*.py"))
    if len(modules) < _FEWEST_MODULES:
        raise ConfigError(f"rank {world.rank}: there is no text to train on: {folder} holds "
                          f"{len(modules)} modules of the standard library")
    last = -len(modules) // 10
    training, validation = (
        torch.frombuffer(bytearray(b"".join(module.read_bytes() for module in part)),
                         dtype=torch.uint8) for part in (modules[:last], modules[last:]))
    starts = np.linspace(0, len(validation) - TEXT_LENGTH - 1, count, dtype=int)
    return Texts(training, _windows(validation, starts))


def _windows(text: torch.Tensor, starts: Array) -> torch.Tensor:
    """Return texts, each a byte longer than the model reads: the last byte is only predicted."""
    return torch.stack([text[start:start + TEXT_LENGTH + 1] for start in starts.tolist()]).long()


def drawn_from(text: torch.Tensor, samples: int, dice: np.random.Generator) -> Iterator[Batch]:
    """Yield batches of random windows of a text, without an end."""
    while True:
        texts = _windows(text, dice.integers(len(text) - TEXT_LENGTH, size=samples))
        yield texts[:, :-1], texts[:, 1:]


def bits_and_bytes(model: nn.Module, texts: torch.Tensor) -> tuple[float, int]:
    """Return the sum of a model's losses on texts, in bits, and the number of bytes predicted."""
    with torch.no_grad():
        losses = [loss(model, part[:, :-1], part[:, 1:], reduction="sum").item()
                  for part in texts.split(_AT_ONCE) if len(part)]
    return math.fsum(losses) / math.log(2), len(texts) * TEXT_LENGTH
