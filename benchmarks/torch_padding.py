"""Trains a transformer on texts of different lengths, padded to the longest of a rank's batch."""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from mpiring.memory.arrays import Array
from mpiring.tools.bench.torch_models import Transformer, width_for
from mpiring.tools.bench.torch_ways import Averaged, Rule
from mpiring.tools.bench.world import World

# What cross_entropy leaves out.
_NOTHING = -100
_RULE = Rule("adamw", 3e-4)


@dataclass
class Count:
    """What the batches of a rank have had.

    Attributes:
        samples, tokens: That were trained on.
        padded: Tokens, with padding.
        most: Tokens with padding of the largest batch.
    """

    samples: int = 0
    tokens: int = 0
    padded: int = 0
    most: int = 0


class Training:
    """A transformer that learns to predict each byte of texts.

    Padding comes after a text, where a causal model does not see it, and does not count: the
    gradient of a step is the mean over the real tokens of all ranks.

    Args:
        world: The ranks.
        options: Of the command.
        texts: As vectors of bytes, none longer than `options.longest`.
        samples: Which texts this rank trains on, batch by batch.
    """

    def __init__(self, world: World, options: Namespace, texts: list[torch.Tensor],
                 samples: Iterator[list[int]]) -> None:
        self._texts, self._samples = texts, samples
        torch.manual_seed(0)
        self._bare = Transformer(width_for("transformer", options.parameters), options.longest)
        self._way = Averaged(self._bare, world.comm, _RULE)
        self._count = Count()

    def step(self) -> None:
        """Take one step.

        Collective: yes. Blocking: yes.
        """
        self._learn([self._texts[number] for number in next(self._samples)])

    def rehearse(self) -> None:
        """Take two small steps: the first one builds the buckets anew, the second is used to it.

        Collective: yes. Blocking: yes.
        """
        for _ in range(2):
            self._learn([self._texts[0][:1]])
        self.taken()

    def _learn(self, texts: list[torch.Tensor]) -> None:
        tokens = sum(map(len, texts))
        # Where there is nothing, the model reads a byte all the same; that does not count.
        targets = pad_sequence(texts or [torch.tensor([_NOTHING])], batch_first=True,
                               padding_value=_NOTHING)
        bytes_before = functional.pad(targets.clamp(min=0), (1, -1))
        self._note(len(texts), tokens, targets.numel())
        self._way.model.weigh(tokens)
        self._bare.zero_grad()
        logits = self._way.model(bytes_before)
        functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=_NOTHING
                                 ).backward()
        self._way.step()

    def _note(self, samples: int, tokens: int, padded: int) -> None:
        self._count.samples += samples
        self._count.tokens += tokens
        self._count.padded += padded
        self._count.most = max(self._count.most, padded)

    def taken(self) -> Count:
        """Return what batches have had since this was called last."""
        count, self._count = self._count, Count()
        return count

    @property
    def parameter_count(self) -> int:
        """The model's number of parameters."""
        return sum(p.numel() for p in self._bare.parameters())

    def parameters(self) -> Mapping[str, Array]:
        """Return the parameters, by name."""
        return {name: p.detach().numpy() for name, p in self._bare.named_parameters()}


def texts_of(functions: list[bytes], longest: int) -> list[torch.Tensor]:
    """Return functions as vectors of bytes, cut to `longest`."""
    return [_vector(function[:longest]) for function in functions]


def equally_long(texts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return all that stands in texts, cut to pieces of their mean length."""
    text = torch.cat(texts)
    length = round(len(text) / len(texts))
    return list(text[:len(text) // length * length].split(length))


def _vector(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
