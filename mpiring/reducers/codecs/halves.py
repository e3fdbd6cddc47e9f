"""Encodes float32 as float16 or bfloat16, rounded to nearest."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ...errors import ConfigError
from ...gpu.warps import WarpKernel, narrowing, widening
from ...jit import loops
from ...memory import sixteen
from ...memory.arrays import INFINITY_BITS, SIXTEEN_BIT, Array, peak
from .base import Codec, check_size

# uint16 represents bfloat16, which NumPy does not have.
_DTYPES: dict[str, DTypeLike] = {"float16": np.float16, "bfloat16": np.uint16}
# Number of elements in a block, whose second read is from the level-1 cache.
_BLOCK = 2048

_ENCODE = "float32* uint16* float32* intp bool"
_DECODE = "uint16* float32* intp bool"


@dataclass(frozen=True)
class SixteenBit(Codec):
    """Encodes an element in two bytes; ties round to even, overflow gives Inf, NaN remains NaN.

    Args:
        dtype: Either "float16" (11 significant bits, up to 65504) or "bfloat16" (8 bits, the range
            of float32).
    """

    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in SIXTEEN_BIT:
            raise ConfigError(f"dtype={self.dtype!r}: expected one of {', '.join(SIXTEEN_BIT)}")

    def payload_size(self, n: int) -> int:
        """Return 2 bytes per element."""
        return 2 * n

    def _fields(self, payload: Any, n: int) -> tuple[Any]:
        check_size(payload, n, 2 * n)
        return (payload.view(_DTYPES[self.dtype]),)

    def _are_finite(self, fields: Sequence[Array]) -> bool:
        return fields[0].size == 0 or peak(fields[0]) < INFINITY_BITS[self.dtype]

    def _encode_loop(self) -> Callable[..., None] | None:
        return loops.loop_16(f"{self.dtype} codes", _encode_loop, _ENCODE, self.dtype)

    def _decode_loop(self) -> Callable[..., None] | None:
        return loops.loop_16(f"sums of {self.dtype} codes", _decode_loop, _DECODE, self.dtype)

    def _encode_kernel(self) -> WarpKernel:
        return narrowing(self.dtype)

    def _decode_kernel(self) -> WarpKernel:
        return widening(self.dtype)

    def _write(self, x: Array, fields: Sequence[Array], seed: int) -> None:
        sixteen.narrow(x, fields[0])

    def _read(self, fields: Sequence[Array], out: Array) -> None:
        sixteen.widen(fields[0], out)


def _encode_loop(widen: Any, narrow: Any) -> Callable[..., None]:
    """Return a function for numba that computes the same as `SixteenBit._write`."""
    def encode(x, halves, lost, n, loses):  # type: ignore[no-untyped-def]
        for start in range(0, n, _BLOCK):
            end = min(start + _BLOCK, n)
            for i in range(start, end):
                halves[i] = narrow(x[i])
            if loses:
                # LLVM does not vectorize a loop over two vectors that may overlap.
                for i in range(start, end):
                    lost[i] = x[i]
                for i in range(start, end):
                    lost[i] -= widen(halves[i])

    return encode


def _decode_loop(widen: Any, narrow: Any) -> Callable[..., None]:
    def decode(halves, out, n, adds):  # type: ignore[no-untyped-def]
        for i in range(n):
            decoded = widen(halves[i])
            out[i] = out[i] + decoded if adds else decoded

    return decode
