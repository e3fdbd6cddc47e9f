"""Trains a transformer on real text with PyTorch, and validates it on other text."""

import gc
import math
import sysconfig
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ...errors import ConfigError
from ...memory.arrays import Array
from ...record.statistics import Statistics
from ...torch import share_cores
from .torch_models import TEXT_LENGTH, Transformer, size_of, width_for
from .torch_ways import Way
from .world import World

_KIND = "transformer"
# The last tenth of the modules is for validation.
_FEWEST_MODULES = 10
_AT_ONCE = 32


@dataclass(frozen=True)
class Task:
    """The model and data of all trainings.

    Attributes:
        width: Of the transformer.
        text: Bytes to train on, shape (n,).
        validation: Windows of other text, shape (m, TEXT_LENGTH + 1).
    """

    width: int
    text: torch.Tensor
    validation: torch.Tensor

    @property
    def parameters(self) -> int:
        """The model's number of parameters."""
        return size_of(_KIND, self.width)


def task(world: World, options: Namespace) -> Task:
    """Choose the model, and read the text: the modules of the standard library that runs this.

    Raises:
        ConfigError: There are no such files.

    Collective: yes. Blocking: yes.
    """
    share_cores(world.comm)
    folder = Path(sysconfig.get_path("stdlib"))
    modules = sorted(folder.glob("*.py"))
    if len(modules) < _FEWEST_MODULES:
        raise ConfigError(f"rank {world.rank}: there is no text to train on: {folder} holds "
                          f"{len(modules)} modules of the standard library")
    last = -len(modules) // 10
    validation = _bytes_of(modules[last:])
    starts = np.linspace(0, len(validation) - TEXT_LENGTH - 1, options.validation_texts, dtype=int)
    return Task(width_for(_KIND, options.parameters), _bytes_of(modules[:last]),
                _windows(validation, starts))


def _bytes_of(modules: list[Path]) -> torch.Tensor:
    text = b"".join(module.read_bytes() for module in modules)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _windows(text: torch.Tensor, starts: Array) -> torch.Tensor:
    """Return texts, each a byte longer than the model reads: the last byte is only predicted."""
    return torch.stack([text[start:start + TEXT_LENGTH + 1] for start in starts.tolist()]).long()


class Training:
    """A model in training; all trainings of a task begin with the same weights.

    Args:
        task: The model and its data.
        world: The ranks, each of which has texts of its own.
        batch: Texts in a step of a rank.
        seed: Of the choice of texts.
        join: Makes a way to train the model on the ranks.
        pause: Called in each step.
    """

    def __init__(self, task: Task, world: World, batch: int, seed: int,
                 join: Callable[[nn.Module], Way], pause: Callable[[], object] = lambda: None,
                 ) -> None:
        self._task, self._batch, self._pause = task, batch, pause
        self._rank, self._size = world.rank, world.size
        self._dice = np.random.default_rng([seed, world.rank])
        torch.manual_seed(0)
        self._bare = Transformer(task.width)
        self._way = join(self._bare)
        self.settings, self.show, self.finish = (
            self._way.settings, self._way.show, self._way.finish)

    def steps(self, count: int) -> None:
        """Take some steps, after which ranks may wait for each other.

        Collective: yes. Blocking: yes.
        """
        for _ in range(count):
            self._pause()
            starts = self._dice.integers(len(self._task.text) - TEXT_LENGTH, size=self._batch)
            self._bare.zero_grad()
            _loss(self._way.model, _windows(self._task.text, starts)).backward()
            self._way.step()
        self._way.meet()

    @property
    def statistics(self) -> Statistics:
        """Statistics of this rank's communication so far."""
        return self._way.statistics

    def validate(self) -> tuple[float, int]:
        """Return the bits and the bytes of this rank's share of the validation texts."""
        share = self._task.validation[self._rank::self._size]
        with torch.no_grad():
            losses = [_loss(self._bare, texts, reduction="sum").item()
                      for texts in share.split(_AT_ONCE) if len(texts)]
        return math.fsum(losses) / math.log(2), len(share) * TEXT_LENGTH

    def parameters(self) -> Mapping[str, Array]:
        """Return the parameters, by name."""
        return {name: p.detach().numpy() for name, p in self._bare.named_parameters()}


def _loss(model: nn.Module, texts: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    logits = model(texts[:, :-1])
    return functional.cross_entropy(
        logits.flatten(0, 1), texts[:, 1:].flatten(), reduction=reduction)


def free() -> None:
    """Free models: modules and their hooks refer to each other."""
    gc.collect()
