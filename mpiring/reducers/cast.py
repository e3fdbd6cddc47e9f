"""Sends 16 bits per number between nodes, and adds in float32."""

from .codecs.halves import SixteenBit
from .two_phase import Encoding


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
