"""Combines two vectors elementwise: sum, mean, max, min, prod, for every dtype."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike

from ..errors import ConfigError
from .arrays import COMPLEX, FLOATING, INTEGER, SIXTEEN_BIT, Array, dtype_name

_UFUNCS: dict[str, Callable[..., Any]] = {
    "sum": np.add, "mean": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
_DTYPES = {
    "sum": (*FLOATING, *COMPLEX, *INTEGER),
    "mean": (*FLOATING, *COMPLEX),
    "prod": (*FLOATING, *COMPLEX, *INTEGER),
    "max": (*FLOATING, *INTEGER, "bool"),
    "min": (*FLOATING, *INTEGER, "bool"),
}
_REMEDIES = {
    "bool": "view it as numpy.uint8 to count, or use max (or) and min (and)",
    "mean": "convert to a floating dtype, or use sum",
    "complex": "complex numbers have no order; reduce the real and imaginary parts",
}


class Combine(Protocol):
    """What a schedule calls to combine what it received with what it has."""

    def prepare(self, x: Array) -> None:
        """Change this rank's own contribution, in place, before anything is sent."""

    def accumulate(self, out: Array, contribution: Array) -> None:
        """Combine `contribution` into `out`, in place."""

    def finish(self, chunk: Array) -> None:
        """Change a chunk that holds every rank's contribution, in place."""


class Reduction:
    """An op on a dtype among `size` ranks.

    NaN propagates through max and min. Overflow becomes Inf (floating) or wraps
    (integers) without a warning, as in MPI. A mean divides once, at the end, the
    chunk that a rank owns; in 16 bits it divides first, because the sum may
    overflow where the mean does not (60000 + 60000 is Inf in float16).

    Raises:
        ConfigError: The op is unknown, or undefined for the dtype.
    """

    def __init__(self, op: str, dtype: DTypeLike, size: int) -> None:
        name = dtype_name(dtype)
        if op not in _UFUNCS:
            raise ConfigError(f"op={op!r}: expected one of {', '.join(_UFUNCS)}")
        if name not in _DTYPES[op]:
            remedy = _REMEDIES["bool" if name == "bool" else "mean" if op == "mean" else "complex"]
            raise ConfigError(f"op={op!r} is not defined for {name}; {remedy}")
        self.op = op
        self.size = size
        self.divides_first = op == "mean" and name in SIXTEEN_BIT
        self._combine = _UFUNCS[op]

    def prepare(self, x: Array) -> None:
        """Divide `x` by the number of ranks where the mean needs it first."""
        if self.divides_first:
            self._divide(x)

    def accumulate(self, out: Array, contribution: Array) -> None:
        """Combine `contribution` into `out`, in place."""
        # A user's numpy.seterr(all="raise") must not tear one rank out of a collective.
        with np.errstate(all="ignore"):
            self._combine(out, contribution, out=out)

    def finish(self, chunk: Array) -> None:
        """Divide a chunk of sums by the number of ranks if a mean is asked for."""
        if self.op == "mean" and not self.divides_first:
            self._divide(chunk)

    def _divide(self, x: Array) -> None:
        if self.size == 1:
            return
        with np.errstate(all="ignore"):
            np.divide(x, x.dtype.type(self.size), out=x)
