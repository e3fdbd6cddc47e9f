"""Reducers whose messages are encoded: in 16 bits, in 8, or as signs."""

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
    """A Compressor whose messages are encoded.

    Args:
        codec: Encodes them.
    """

    on_gpus = True

    def __init__(self, codec: Codec) -> None:
        super().__init__()
        self._codec = codec

    def prepare(self, device: Device | None) -> None:
        """Encode and decode one number, so that what is compiled is compiled now."""
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
    """Rounds what is sent to 16 bits; sums are made in float32, and rounded once.

    Half of the bytes. A mean beyond 65504 becomes Inf in float16, as does a contribution: scale
    the loss. bfloat16 has float32's range, and three digits less.

    Args:
        dtype: "float16" or "bfloat16".

    Raises:
        ConfigError: Another dtype.

    Source: Micikevicius et al., ICLR 2018.
    """

    def __init__(self, dtype: str = "bfloat16") -> None:
        super().__init__(SixteenBit(dtype))
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"Cast({self.dtype!r})"


class Int8(Encoding):
    """Quantises to 8 bits: a scale for each block, and stochastic rounding.

    A quarter of the bytes, and a little for the scales. The mean is right on average: a number
    between two steps of the scale is rounded to either, the more often the nearer it is. Random
    numbers depend on seed, step, bucket and rank, so that a run can be repeated. With
    `ErrorFeedback(Int8())` the rounding errors are not lost either.

    Args:
        block: Numbers that share a scale, the largest of them over 127; 1 or more.
        seed: Of the random numbers.

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
    """Sends signs, and for each block the mean magnitude; errors are fed back.

    A thirty-second of the bytes, and an eighth of that for the magnitudes. The first steps are not
    compressed: gradients are large and change direction then.

    Args:
        block: Numbers that share a magnitude; a multiple of 32.
        warmup_steps: First steps, which are plain means.

    Raises:
        ConfigError: A number is out of range.

    Source: Seide et al., Interspeech 2014; the two phases and the warm-up are those of
    1-bit Adam, Tang et al., ICML 2021. (There the momentum is sent: here gradients are, and any
    optimizer takes them.)
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
