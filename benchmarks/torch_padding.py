"""Trains a transformer on texts of different lengths, padded to the longest in a rank's batch."""

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from mpiring.tools.bench.torch_training import Batch, Training, Transformer, width_for
from mpiring.tools.bench.world import World
from mpiring.torch import DataParallel

# Target that cross_entropy ignores.
_IGNORED = -100
_RATE, _REHEARSED_STEPS = 3e-4, 2


@dataclass
class Count:
    """Sizes of the batches of a rank.

    Attributes:
        samples, tokens: Numbers that were trained on.
        padded: Number of tokens with padding.
        most: Number of tokens with padding in the largest batch.
    """

    samples: int = 0
    tokens: int = 0
    padded: int = 0
    most: int = 0


class PaddedBatches:
    """Batches of texts, padded to the longest in a batch, for predicting each byte.

    Padding comes after a text, so that a causal model does not see it, and has no weight. The
    gradient of a step is the mean over the real tokens of all ranks.

    Args:
        texts: Texts as vectors of bytes.
        samples: Indices of the texts that this rank trains on, batch by batch.
        weigh: Function that is called with a batch's number of tokens, before its step.
    """

    def __init__(self, texts: list[torch.Tensor], samples: Iterator[list[int]],
                 weigh: Callable[[int], object]) -> None:
        self._texts, self._samples, self._weigh = texts, samples, weigh
        self._count = Count()

    def __iter__(self) -> Iterator[Batch]:
        # The first step rebuilds the buckets, and the second one uses them.
        for _ in range(_REHEARSED_STEPS):
            yield self._padded([self._texts[0][:1]])
        self._count = Count()
        for numbers in self._samples:
            yield self._padded([self._texts[number] for number in numbers])

    def _padded(self, texts: list[torch.Tensor]) -> Batch:
        tokens = sum(map(len, texts))
        # Without texts, the model reads one byte, which has no weight.
        targets = pad_sequence(texts or [torch.tensor([_IGNORED])], batch_first=True,
                               padding_value=_IGNORED)
        self._count.samples += len(texts)
        self._count.tokens += tokens
        self._count.padded += targets.numel()
        self._count.most = max(self._count.most, targets.numel())
        self._weigh(tokens)
        return functional.pad(targets.clamp(min=0), (1, -1)), targets

    def take_count(self) -> Count:
        """Return the sizes of the batches since the last call."""
        count, self._count = self._count, Count()
        return count


def training_on(world: World, options: Namespace, texts: list[torch.Tensor],
                samples: Iterator[list[int]]) -> tuple[Training, PaddedBatches]:
    """Return a rehearsed training, and its batches.

    Args:
        world: The ranks.
        options: Options of the study.
        texts: Texts as vectors of bytes, none longer than `options.longest`.
        samples: Indices of the texts that this rank trains on, batch by batch.

    Collective: yes. Blocking: yes.
    """
    torch.manual_seed(0)
    module = Transformer(width_for("transformer", options.parameters), options.longest)
    model = DataParallel(module, world.comm, broadcast_buffers=False)
    batches = PaddedBatches(texts, samples, model.weigh)
    training = Training(
        "", module, model, torch.optim.AdamW(module.parameters(), lr=_RATE), batches)
    for _ in range(_REHEARSED_STEPS):
        training.step()
    return training, batches


def texts_of(functions: list[bytes], longest: int) -> list[torch.Tensor]:
    """Return functions as vectors of bytes, cut to `longest`."""
    return [torch.frombuffer(bytearray(function[:longest]), dtype=torch.uint8).long()
            for function in functions]


def equal_pieces(texts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the content of texts, cut into pieces of their mean length."""
    text = torch.cat(texts)
    length = round(len(text) / len(texts))
    return list(text[:len(text) // length * length].split(length))
