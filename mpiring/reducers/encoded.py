"""Reducers that encode messages in 16 bits, in 8 bits, or as signs."""

import numpy as np

from ..arguments import whole_number
from ..sharding.state import Wide
from ..gpu import vectors
from ..gpu.device import Device
from ..transport.base import Schedule
from . import two_phase
from .codecs.base import Codec
from .codecs.blocks import EightBit
from .codecs.halves import SixteenBit
from .codecs.signs import Sign
from .compressor import Compressor, SliceExchange, with_feedback


class Encoding(Compressor):
    """A Compressor that encodes its messages by a codec."""

    on_gpus = True

    def __init__(self, codec: Codec) -> None:
        super().__init__()
        self._codec = codec

    def prepare(self, device: Device | None) -> None:
        """Encode and decode one number, so that the code is compiled now."""
        x = vectors.zeros(1, np.float32, device)
        codec = self._codec
        payload = vectors.zeros(codec.payload_size(1), np.uint8, device)
        for lost in (None, x):
            codec.encode(x, payload, lost, 0)
        for adds in (False, True):
            codec.decode(payload, x, adds=adds)

    def between(self, exchange: SliceExchange, x: Wide, lost: Wide | None) -> Schedule[bool]:
        """Return the schedule that replaces a slice by its mean over nodes."""
        return two_phase.average(exchange, self._codec, x, lost)


class Cast(Encoding):
    """Rounds messages to 16 bits; sums are computed in float32 and rounded once.

    This halves the bytes. With float16, a contribution or mean beyond 65504 becomes Inf, so scale
    the loss. bfloat16 has the range of float32, but only 8 significant bits.

    Args:
        dtype: Either "float16" or "bfloat16".

    Raises:
        ConfigError: The dtype is not supported.

    Source: Micikevicius et al., ICLR 2018.
    """

    def __init__(self, dtype: str = "bfloat16") -> None:
        super().__init__(SixteenBit(dtype))
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"Cast({self.dtype!r})"


class Int8(Encoding):
    """Quantizes messages to 8 bits, with a scale for each block and stochastic rounding.

    Messages have a quarter of the bytes, plus the scales. The mean is unbiased: a number between
    two codes is rounded to the nearer one with higher probability. Random numbers depend on seed,
    step, bucket and rank, so runs are reproducible. `ErrorFeedback(Int8())` also compensates for
    rounding errors.

    Args:
        block: Number of elements that share a scale, 1 or more. The scale is the largest magnitude
            divided by 127.
        seed: Seed of the random numbers.

    Raises:
        ConfigError: The block is too short.

    Source: Alistarh et al., NeurIPS 2017 (QSGD, with the largest number as norm).
    """

    def __init__(self, block: int = 512, *, seed: int = 0) -> None:
        super().__init__(EightBit(block))
        self.block, self.seed = block, whole_number("seed", seed, 0)

    def __repr__(self) -> str:
        return f"Int8(block={self.block}, seed={self.seed})"

    def between(self, exchange: SliceExchange, x: Wide, lost: Wide | None) -> Schedule[bool]:
        """Return the schedule that replaces a slice by its mean over nodes."""
        return super().between(exchange.seeded(self.seed), x, lost)


class OneBit(Encoding):
    """Sends the sign of each element and the mean magnitude of each block, with error feedback.

    Signs take 1/32 of the bytes of the gradients; with the default block, magnitudes add an eighth
    to that. The first steps are not compressed, because gradients are then large and change
    direction.

    Args:
        block: Number of elements that share a magnitude; a multiple of 32.
        warmup_steps: Number of initial steps, which use plain means.

    Raises:
        ConfigError: A number is out of range.

    Sources: Seide et al., Interspeech 2014. Tang et al., ICML 2021 (1-bit Adam), for the two phases
    and the warm-up. 1-bit Adam sends the momentum; OneBit sends gradients, for any optimizer.
    """

    feeds_back = True

    def __init__(self, block: int = 256, *, warmup_steps: int = 100) -> None:
        super().__init__(Sign(block))
        self.block, self.warmup_steps = block, whole_number("warmup_steps", warmup_steps, 0)

    def __repr__(self) -> str:
        return f"OneBit(block={self.block}, warmup_steps={self.warmup_steps})"

    def compresses(self, nodes: int, step: int) -> bool:
        """Return whether a step is compressed."""
        return nodes > 1 and step >= self.warmup_steps

    def between(self, exchange: SliceExchange, x: Wide, lost: Wide | None) -> Schedule[bool]:
        """Return the schedule that replaces a slice by its mean over nodes."""
        return with_feedback(exchange, x, lost, super().between)
