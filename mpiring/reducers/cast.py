"""Sends 16 bits per number between nodes, and adds in float32."""

from ..buckets.state import Wide
from ..gpu.device import Device
from ..transport.base import Schedule
from . import two_phase
from .codecs.halves import Halves
from .compressor import Compressor
from .exchange import SliceExchange


class Cast(Compressor):
    """Rounds what is sent to 16 bits; sums are made in float32, and rounded once.

    Half of the bytes. A mean beyond 65504 becomes Inf in float16, as does a contribution: scale
    the loss. bfloat16 has float32's range, and three digits less.

    Args:
        dtype: "float16" or "bfloat16".

    Raises:
        ConfigError: Another dtype.

    Source: Micikevicius et al., ICLR 2018.
    """

    on_gpus = True

    def __init__(self, dtype: str = "bfloat16") -> None:
        super().__init__()
        self._codec = Halves(dtype)
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"Cast({self.dtype!r})"

    def prepare(self, device: Device | None) -> None:
        """Compile what encodes, where it is compiled."""
        two_phase.prepare(self._codec, device)

    def between(self, exchange: SliceExchange, x: Wide, lost: Wide | None) -> Schedule[bool]:
        """Return the schedule that replaces a slice by its mean over nodes."""
        return two_phase.average(exchange, self._codec, x, lost)
