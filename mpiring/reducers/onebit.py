"""Sends one bit per number between nodes: its sign."""

from ..arguments import whole_number
from ..sharding.state import Wide
from ..transport.base import Schedule
from .codecs.signs import Sign
from .exchange import SliceExchange
from .feedback import with_feedback
from .two_phase import Encoding


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
