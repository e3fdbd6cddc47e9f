"""Sends 8 bits per number between nodes, rounded up or down at random."""

from ..arguments import whole_number
from ..sharding.state import Wide
from ..transport.base import Schedule
from .codecs.blocks import EightBit
from .exchange import SliceExchange
from .two_phase import Encoding


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
