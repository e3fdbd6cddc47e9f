"""Encodes float32 as float16 or bfloat16, rounded to nearest."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ...errors import ConfigError
from ...memory import compiled, sixteen
from ...memory.arrays import SIXTEEN_BIT, Array, peak
from ...memory.reduction import quietly
from .base import check_size

# uint16 stands for bfloat16: NumPy has none, and the package that has it is optional.
_DTYPES: dict[str, DTypeLike] = {"float16": np.float16, "bfloat16": np.uint16}
_INFINITY = {"float16": 0x7c00, "bfloat16": 0x7f80}

# Elements at a time: what is read twice stays in the level-1 cache.
_BLOCK = 2048

_ENCODE = "float32* uint16* float32* intp bool"
_DECODE = "uint16* float32* intp bool"


@dataclass(frozen=True)
class Halves:
    """Two bytes per element; ties go to even, what is too large becomes Inf, NaN stays NaN.

    Args:
        dtype: "float16" (11 significant bits, up to 65504) or "bfloat16" (8, float32's range).
    """

    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in SIXTEEN_BIT:
            raise ConfigError(f"dtype={self.dtype!r}: expected one of {', '.join(SIXTEEN_BIT)}")

    @property
    def alignment(self) -> int:
        """1: vectors may be cut anywhere."""
        return 1

    def payload_size(self, n: int) -> int:
        """Return 2 bytes for each of `n` elements."""
        return 2 * n

    def encode(self, x: Array, payload: Array, lost: Array | None, key: int) -> None:
        """See `Codec.encode`; nothing is random."""
        halves = self._halves(payload, x.size)
        loop = compiled.loop_16(f"{self.dtype} codes", _encode_loop, _ENCODE, self.dtype)
        if loop is None:
            quietly(_encode, x, halves, lost)
        else:
            loop(x, halves, lost, x.size, lost is not None)

    def is_finite(self, payload: Array, n: int) -> bool:
        """See `Codec.is_finite`; reads the whole payload."""
        return n == 0 or peak(self._halves(payload, n)) < _INFINITY[self.dtype]

    def decode(self, payload: Array, out: Array, *, adds: bool = False) -> None:
        """See `Codec.decode`."""
        halves = self._halves(payload, out.size)
        loop = compiled.loop_16(f"sums of {self.dtype} codes", _decode_loop, _DECODE, self.dtype)
        if loop is None:
            quietly(_decode, halves, out, adds)
        else:
            loop(halves, out, out.size, adds)

    def _halves(self, payload: Array, n: int) -> Array:
        check_size(payload, n, self.payload_size(n))
        return payload.view(_DTYPES[self.dtype])


def _encode(x: Array, halves: Array, lost: Array | None) -> None:
    sixteen.narrow(x, halves)
    if lost is not None:
        decoded = np.empty_like(x)
        sixteen.widen(halves, decoded)
        np.subtract(x, decoded, out=lost)


def _decode(halves: Array, out: Array, adds: bool) -> None:
    decoded = np.empty_like(out) if adds else out
    sixteen.widen(halves, decoded)
    if adds:
        np.add(out, decoded, out=out)


def _encode_loop(widen: Any, narrow: Any) -> Callable[..., None]:
    """Return what numba compiles in place of `_encode`."""
    def encode(x, halves, lost, n, loses):  # type: ignore[no-untyped-def]
        for start in range(0, n, _BLOCK):
            end = min(start + _BLOCK, n)
            for i in range(start, end):
                halves[i] = narrow(x[i])
            if loses:
                # LLVM does not vectorise a loop over two vectors that may overlap.
                for i in range(start, end):
                    lost[i] = x[i]
                for i in range(start, end):
                    lost[i] -= widen(halves[i])

    return encode


def _decode_loop(widen: Any, narrow: Any) -> Callable[..., None]:
    def decode(halves, out, n, adds):  # type: ignore[no-untyped-def]
        if adds:
            for i in range(n):
                out[i] += widen(halves[i])
        else:
            for i in range(n):
                out[i] = widen(halves[i])

    return decode
