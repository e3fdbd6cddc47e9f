"""Converts float32 vectors to short payloads and back, without communication."""

from .blocks import EightBit
from .halves import SixteenBit
from .largest import select_largest
from .signs import Sign
