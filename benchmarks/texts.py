"""Provides text for training a transformer, and computes the loss on other text."""

import math
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from mpiring import ConfigError
from mpiring.provisional import Array
from mpiring.tools.bench.torch_training import TEXT_LENGTH, Batch, loss
from mpiring.tools.bench.world import World

# The last tenth of the modules is for validation, so this many give at least one.
_FEWEST_MODULES = 10
_AT_ONCE = 32
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


@dataclass(frozen=True)
class Texts:
    """Text for training a transformer, and text for validation.

    Attributes:
        training: Bytes, with shape (n,).
        validation: Texts, one byte longer than the model's input, with shape (m, TEXT_LENGTH + 1).
    """

    training: torch.Tensor
    validation: torch.Tensor


def standard_library(world: World, count: int) -> Texts:
    """Return the source text of this interpreter's standard library.

    Args:
        world: The ranks.
        count: Number of validation texts.

    Raises:
        ConfigError: There are too few modules.
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
    """Return texts one byte longer than the model's input; the last byte is only predicted."""
    return torch.stack([text[start:start + TEXT_LENGTH + 1] for start in starts.tolist()]).long()


def random_batches(text: torch.Tensor, samples: int, rng: np.random.Generator) -> Iterator[Batch]:
    """Yield batches of random windows of a text, endlessly."""
    while True:
        texts = _windows(text, rng.integers(len(text) - TEXT_LENGTH, size=samples))
        yield texts[:, :-1], texts[:, 1:]


def bits_and_bytes(model: nn.Module, texts: torch.Tensor) -> tuple[float, int]:
    """Return the sum of a model's losses on texts, in bits, and the number of predicted bytes."""
    with torch.no_grad():
        losses = [loss(model, part[:, :-1], part[:, 1:], reduction="sum").item()
                  for part in texts.split(_AT_ONCE) if len(part)]
    return math.fsum(losses) / math.log(2), len(texts) * TEXT_LENGTH
