"""Sends 8 bits per number between nodes, rounded up or down by chance."""

from ..arguments import whole_number
from ..buckets.state import Wide
from ..gpu.device import Device
from ..transport.base import Schedule
from . import two_phase
from .codecs.blocks import EightBit
from .compressor import Compressor
from .exchange import SliceExchange


class Int8(Compressor):
    """Quantises to 8 bits: a scale for each block, and stochastic rounding.

    A quarter of the bytes, and a little for the scales. The mean is right on average: a number
    between two steps of the scale is rounded to either, the more often the nearer it is. Chance is
    drawn from (seed, step, bucket, rank), so that a run can be repeated. With
    `ErrorFeedback(Int8())` the rounding errors are not lost either.

    Args:
        block: So many numbers share a scale, the largest of them over 127; 1 or more.
        seed: Of the chance.

    Raises:
        ConfigError: The block is too short.

    Source: Alistarh et al., NeurIPS 2017 (QSGD, with the largest number as norm).
    """

    on_gpus = True

    def __init__(self, block: int = 512, *, seed: int = 0) -> None:
        super().__init__()
        self._codec = EightBit(block)
        self.block, self.seed = block, whole_number("seed", seed, 0)

    def __repr__(self) -> str:
        return f"Int8(block={self.block}, seed={self.seed})"

    def prepare(self, device: Device | None) -> None:
        """Compile what encodes, where it is compiled."""
        two_phase.prepare(self._codec, device)

    def between(self, exchange: SliceExchange, x: Wide, lost: Wide | None) -> Schedule[bool]:
        """Return the schedule that replaces a slice by its mean over nodes."""
        return two_phase.average(exchange.seeded(self.seed), self._codec, x, lost)
