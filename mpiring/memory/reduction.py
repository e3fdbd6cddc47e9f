"""Combines vectors elementwise: sum, mean, max, min, prod and bitwise ops, for every dtype."""

import contextvars
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike

from ..errors import ConfigError
from ..jit import copies, loops, sums
from . import sixteen
from .arrays import COMPLEX, FLOATING, INTEGER, SIXTEEN_BIT, Array, dtype_name
from .scratch import BLOCK_BYTES, thread_scratch

# Compiled code adds vectors if at least this many bytes are read and written, and two vectors only
# if the sum is stored into both. Otherwise NumPy takes no longer. Measured.
_LONG_BYTES = 480 << 10

_UFUNCS: dict[str, Callable[..., Any]] = {
    "sum": np.add, "mean": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum,
    "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}
OPS = tuple(_UFUNCS)
_NUMPY_1 = np.__version__.startswith("1.")
_DTYPES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("sum", "prod"), (*FLOATING, *COMPLEX, *INTEGER)),
    "mean": (*FLOATING, *COMPLEX),
    **dict.fromkeys(("max", "min"), (*FLOATING, *INTEGER, "bool")),
    **dict.fromkeys(("band", "bor", "bxor"), (*INTEGER, "bool")),
}
_REMEDIES = {
    "bool": "view it as numpy.uint8 to count (of a scalar, pass int(x)), or use max (or) and "
            "min (and)",
    "mean": "convert to a floating dtype (of a scalar, pass float(x)), or use sum",
    "complex": "complex numbers have no order; reduce the real and imaginary parts",
    "bits": "view it as integers of its width",
}


class Combine(Protocol):
    """Implementation of an op, which combines the contributions of ranks in a schedule.

    If `adds`, compiled code may add the vectors: they are in host memory, of a dtype of
    `sums.DTYPES`, and `divisor` divides the sum.
    """
    adds: bool
    divisor: float

    def prepare(self, x: Array) -> None:
        """Prepare this rank's contribution, in place, before it is sent."""

    def accumulate(self, out: Array, contribution: Array) -> None:
        """Combine `contribution` into `out`, in place."""

    def finish(self, chunk: Array) -> None:
        """Finish a chunk that contains every rank's contribution, in place."""

    def combine(self, sources: Sequence[Array], *outs: Array) -> None:
        """Combine all unprepared contributions in the given order, finish, and store."""

    def copy(self, x: Array, *outs: Array, past_caches: bool = False) -> None:
        """Copy a vector to any number of others, in one pass.

        `past_caches` is for parts of vectors that do not fit into the caches.
        """


class _QuietContext(threading.local):
    """Context of a thread in which floating-point errors give Inf and NaN without a warning."""

    def __init__(self) -> None:
        self.quiet = contextvars.copy_context()
        if not _NUMPY_1:
            self.quiet.run(np.seterr, all="ignore")


_thread = _QuietContext()


def quietly(function: Callable[..., Any], *args: Any) -> None:
    """Call a function without warnings and errors for overflow and the like.

    A user's numpy.seterr(all="raise") must not stop one rank in the middle of a collective. Since
    NumPy 2 the setting belongs to the context. Running in a context with the setting takes 0.1 µs;
    numpy.errstate takes 1.5 µs.
    """
    if _NUMPY_1:
        with np.errstate(all="ignore"):
            function(*args)
    else:
        # A copy, because a signal handler may interrupt and also combine vectors in the context.
        _thread.quiet.copy().run(function, *args)


class Reduction:
    """An op on a dtype. A mean divides by `size`: the number of ranks, or a factor of it.

    NaN propagates through max and min. Overflow becomes Inf (floating) or wraps (integers) without
    a warning, as in MPI. For a mean, each rank divides its own chunk once, at the end.

    In 16 bits, `combine` adds or multiplies in float32, and rounds once, at the end. The other
    methods round whenever they store. For them, a mean divides first, because the sum may overflow
    even if the mean does not (60000 + 60000 is Inf in float16).

    Any number of threads may use one Reduction.

    A mean over a size of 1 combines nothing.
    If `compiled`, code by numba, if available, copies long vectors, and adds long vectors of more
    than 16 bits. Loading the code takes 50 MiB.

    Raises:
        ConfigError: The op is unknown, or undefined for the dtype.
    """

    def __init__(self, op: str, dtype: DTypeLike, size: float, *, compiled: bool = True) -> None:
        name = dtype_name(dtype)
        if op not in _UFUNCS:
            raise ConfigError(f"op={op!r}: expected one of {', '.join(OPS)}")
        if name not in _DTYPES[op]:
            remedy = _REMEDIES["bool" if name == "bool" else "mean" if op == "mean" else
                               "bits" if op[0] == "b" else "complex"]
            raise ConfigError(f"op={op!r} is not defined for {name}; {remedy}")
        self.op = op
        self.size = size
        self.widens = widens(dtype, op)
        self.divides_first = op == "mean" and self.widens
        self._combine = _UFUNCS[op]
        # A single rank combines nothing, and has no reason to load numba.
        self._combine_16 = None if not self.widens else (
            size > 1 and loops.combiner(name) or sixteen.combine)
        self._compiled = compiled
        self.adds = compiled and op in ("sum", "mean") and name in sums.DTYPES
        # Three or more vectors, and results that are stored several times, are processed in blocks,
        # so that a scratch block and the blocks of two ranks stay in the cache. Measured.
        self._block = BLOCK_BYTES // np.dtype(dtype).itemsize
        self.divisor = size if op == "mean" else 1

    def prepare(self, x: Array) -> None:
        """Divide `x` by `size` if the mean must divide first."""
        if self.divides_first:
            self._divide(x)

    def accumulate(self, out: Array, contribution: Array) -> None:
        """Combine `contribution` into `out`, in place."""
        self._apply((out, contribution), 1, (out,))

    def finish(self, chunk: Array) -> None:
        """Divide a chunk of sums by `size` if the op is a mean that divides last."""
        if self.op == "mean" and not self.divides_first:
            self._divide(chunk)

    def combine(self, sources: Sequence[Array], *outs: Array) -> None:
        """Combine contributions elementwise, in the given order, and divide if it is a mean.

        Outs may be among the sources, but must not overlap them otherwise, nor each other. All
        vectors are contiguous; sources are not prepared.
        """
        divisor, out = self.divisor, outs[0]
        if divisor == 1 and len(sources) == 1 == len(outs) and sources[0] is out:
            return
        if (self.adds and (len(sources) > 2 or len(sources) == len(outs) == 2)
                and (len(sources) + len(outs)) * out.nbytes >= _LONG_BYTES
                and sums.add(sources, divisor, outs)):
            return
        self._apply(sources, divisor, outs)

    def of(self, sources: Sequence[Array]) -> Callable[[Array], None]:
        """Return a function of `out` equal to `combine`, but faster for short vectors."""
        if len(sources) != 2 or self.widens or _NUMPY_1 or sources[0].size > self._block:
            return functools.partial(self.combine, sources)
        (a, b), function, divides = sources, self._combine, self.divisor != 1
        divisor = a.dtype.type(self.divisor)

        def combine(out: Array) -> None:
            run = _thread.quiet.copy().run
            run(function, a, b, out=out)
            if divides:
                run(np.divide, out, divisor, out=out)

        return combine

    def copy(self, x: Array, *outs: Array, past_caches: bool = False) -> None:
        """Copy a vector to others that do not overlap; each block is read once.

        If `past_caches`, compiled code, if available, stores around the caches.
        """
        if past_caches and self._compiled and outs and copies.stream(x, outs):
            return
        for start in range(0, x.size if outs else 0, self._block):
            block = x[start:start + self._block]
            for out in outs:
                np.copyto(out[start:start + self._block], block)

    def _apply(self, sources: Sequence[Array], divisor: float, outs: Sequence[Array]) -> None:
        n, step = outs[0].size, self._block
        if n <= step or self._combine_16 is not None and len(outs) == 1:
            quietly(self._store, sources, divisor, outs)
            return
        for start in range(0, n, step):
            block = slice(start, start + step)
            quietly(self._store, [x[block] for x in sources], divisor, [x[block] for x in outs])

    def _store(self, sources: Sequence[Array], divisor: float, outs: Sequence[Array]) -> None:
        done = outs[0]
        if self._combine_16 is not None:
            self._combine_16(self._combine, sources, divisor, done)
        else:
            self._combine_unwidened(sources, divisor, done)
        for out in outs[1:]:
            np.copyto(out, done)

    def _combine_unwidened(self, sources: Sequence[Array], divisor: float, out: Array) -> None:
        if len(sources) == 2:
            self._combine(sources[0], sources[1], out=out)
        elif len(sources) == 1:
            np.copyto(out, sources[0])
        else:
            # Accumulate in scratch memory, because `out` may be a source that is not read yet.
            block, total = thread_scratch.acquire(), sources[0]
            scratch = block.memory[:out.nbytes].view(out.dtype)
            for x in sources[1:-1]:
                total = self._combine(total, x, out=scratch)
            self._combine(total, sources[-1], out=out)
            thread_scratch.release(block)
        if divisor != 1:
            np.divide(out, out.dtype.type(divisor), out=out)

    def _divide(self, x: Array) -> None:
        if self.size > 1:
            quietly(np.divide, x, x.dtype.type(self.size), x)


@functools.lru_cache(maxsize=1024)
def reduction(op: str, dtype: np.dtype[Any], size: float, *, compiled: bool = True) -> Reduction:
    """Return `Reduction(op, dtype, size, compiled=compiled)`, from a cache."""
    return Reduction(op, dtype, size, compiled=compiled)


def widens(dtype: DTypeLike, op: str) -> bool:
    """Return whether `Reduction.combine` works in float32, and rounds once to this dtype."""
    return op in ("sum", "mean", "prod") and dtype_name(dtype) in SIXTEEN_BIT
