"""PowerSGD: sends matrices as products of two thin matrices, from one step of power iteration."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arguments import number, whole_number
from ..sharding.state import SliceState, TensorRange, Wide
from ..errors import ConfigError
from ..gpu.device import Device
from ..memory.arrays import is_finite
from ..memory.reduction import quietly
from ..transport.base import Schedule
from . import two_phase
from .compressor import Compressor, SliceExchange, with_feedback

# Bytes of matrix rows that are decompressed at a time, so that they stay in the cache.
_BLOCK_BYTES = 256 << 10

Doubles = NDArray[np.float64]


class PowerSGD(Compressor):
    """Approximates each n by m gradient matrix M by a product P Qᵀ of rank r, with error feedback.

    Messages have r (n + m) numbers instead of n m. Q starts from the result of the previous step,
    so it converges to the important directions. Tensors with more than two dimensions are matrices
    of shape (first, all others). Vectors, and matrices for which the saving is too small, are sent
    uncompressed.

    One rank of each node compresses a given tensor. All nodes get the same bits if they have the
    same processors and libraries, because each node multiplies P and Q itself.

    Args:
        rank: Rank r of the approximation, at least 1.
        start_step: Number of initial steps, which use plain means.
        min_compression: Smallest ratio of uncompressed to compressed size for which a matrix is
            compressed.
        reducer: Reducer that averages P, Q and the vectors, such as Cast("bfloat16"). By default,
            float32 means.
        seed: Seed of the first Q.

    Raises:
        ConfigError: A number is out of range, or the inner Reducer has state.

    Source: Vogels, Karimireddy and Jaggi, NeurIPS 2019, algorithms 1 and 2.
    """

    feeds_back = whole_tensors = True

    def __init__(self, rank: int = 2, *, start_step: int = 10, min_compression: float = 2.0,
                 reducer: Compressor | None = None, seed: int = 0) -> None:
        super().__init__()
        self.min_compression = number(
            "min_compression", min_compression, lambda x: x > 0, "a factor above 0")
        if reducer is not None and (not isinstance(reducer, Compressor) or reducer.feeds_back):
            raise ConfigError(
                f"PowerSGD(reducer={reducer!r}): expected a Compressor without state, such as "
                f"Cast() or Int8()")
        self.rank, self.seed = whole_number("rank", rank, 1), whole_number("seed", seed, 0)
        self.start_step = whole_number("start_step", start_step, 0)
        self.reducer = reducer

    def __repr__(self) -> str:
        inner = "" if self.reducer is None else f", reducer={self.reducer!r}"
        return (f"PowerSGD(rank={self.rank}, start_step={self.start_step}, "
                f"min_compression={self.min_compression:g}{inner}, seed={self.seed})")

    def compresses(self, nodes: int, step: int) -> bool:
        """Return whether a step is compressed."""
        return nodes > 1 and step >= self.start_step

    def prepare(self, device: Device | None) -> None:
        """Let the inner Reducer compile its code."""
        if self.reducer is not None:
            self.reducer.prepare(device)

    def between(self, exchange: SliceExchange, x: Wide, lost: Wide | None) -> Schedule[bool]:
        """Return the schedule that replaces a slice by its mean over nodes."""
        return with_feedback(exchange, x, lost, self._approximate)

    def _approximate(self, exchange: SliceExchange, x: Wide, lost: Wide | None) -> Schedule[bool]:
        """Average matrices as P Qᵀ, and all other tensors uncompressed."""
        residual = np.empty_like(x) if lost is None else lost
        residual[...] = 0
        with exchange.encoding():
            ranges = exchange.state.ranges
            matrices = [self._matrix(exchange.state, part, x)
                        for part in ranges if self._rank_of(part)]
            others = [part for part in ranges if not self._rank_of(part)]
            # 1. P ← M Q, and its mean.
            first = _pack([*(_product(matrix.q, matrix.m.T) for matrix in matrices),
                           *(x[part.start:part.stop] for part in others)])
        first_lost = yield from self._average(exchange, first)
        with exchange.encoding():
            finite = is_finite(first)
            shapes = [*((len(matrix.q), len(matrix.m)) for matrix in matrices),
                      *((part.size,) for part in others)]
            means, losses = _unpack(first, shapes), _unpack(first_lost, shapes)
            # 2. P ← orthonormal columns.
            ps = [orthogonal(p) for p in means[:len(matrices)]]
            # 3. Q ← Mᵀ P, and its mean.
            second = _pack([_product(p, matrix.m) for p, matrix in zip(ps, matrices)])
        yield from self._average(exchange, second)
        with exchange.decoding():
            # 4. M ← P Qᵀ. The residual is the difference, and the next step starts from Q.
            qs = _unpack(second, [matrix.q.shape for matrix in matrices])
            for matrix, p, q in zip(matrices, ps, qs):
                _replace(matrix, p, q, residual)
                self._start_from(exchange, matrix.part.name, q)
            for part, mean, loss in zip(others, means[len(ps):], losses[len(ps):]):
                x[part.start:part.stop] = mean
                residual[part.start:part.stop] = loss
        return finite

    def _average(self, exchange: SliceExchange, x: Wide) -> Schedule[Wide]:
        """Average a vector; return the part of this rank's contribution that was lost."""
        lost = np.zeros_like(x)
        if self.reducer is None:
            yield from two_phase.average_dense(exchange, x)
        else:
            yield from self.reducer.between(exchange, x, lost)
        return lost

    def _rank_of(self, part: TensorRange) -> int:
        """Return the rank of a tensor's approximation; 0 if the tensor is sent uncompressed."""
        if len(part.shape) < 2:
            return 0
        n, m = part.shape[0], math.prod(part.shape[1:])
        r = min(self.rank, n, m)
        return r if r * (n + m) * self.min_compression <= n * m else 0

    def _matrix(self, state: SliceState, part: TensorRange, x: Wide) -> "_Matrix":
        matrix = x[part.start:part.stop].reshape(part.shape[0], -1)
        return _Matrix(part, matrix, state.array("Q", part.name, lambda: self._random(
            part.name, self._rank_of(part), matrix.shape[1])))

    def _random(self, name: str, r: int, m: int) -> Wide:
        """Return the first Q of a tensor, transposed; the same on all nodes."""
        random = np.random.default_rng([self.seed, *name.encode()])
        return random.standard_normal((r, m), np.float32)

    def _start_from(self, exchange: SliceExchange, tensor: str, q: Wide) -> None:
        """Let the next step start from `q`."""
        start = exchange.state.next("Q", tensor)
        start[...] = q
        empty = ~q.any(axis=1)
        if empty.any():
            # Without a restart, a zero direction would remain zero.
            start[empty] = self._random(f"{tensor} {exchange.step}", *q.shape)[empty]


@dataclass(frozen=True)
class _Matrix:
    """A gradient as a matrix, and the transposed Q from which its iteration starts."""

    part: TensorRange
    m: Wide
    q: Wide


def _product(a: Wide, b: Wide) -> Wide:
    """Return a matrix product; floating-point errors raise neither warnings nor exceptions."""
    out = np.empty((a.shape[0], b.shape[1]), np.float32)
    quietly(np.matmul, a, b, out)
    return out


def _replace(matrix: _Matrix, p: Wide, q: Wide, residual: Wide) -> None:
    """Replace a matrix by P Qᵀ, and write the difference to the residual."""
    n, m = matrix.m.shape
    loss = residual[matrix.part.start:matrix.part.stop].reshape(n, m)
    rows = max(1, _BLOCK_BYTES // (4 * m))
    for start in range(0, n, rows):
        block = matrix.m[start:start + rows]
        product = _product(p[:, start:start + rows].T, q)
        quietly(np.subtract, block, product, loss[start:start + rows])
        block[...] = product


def orthogonal(p: Wide) -> Wide:
    """Orthonormalize the rows of `p`, shape (r, n), by Gram-Schmidt in float64; return a copy.

    A row that depends linearly on earlier rows becomes zeros.
    """
    rows: Doubles = p.astype(np.float64)
    with np.errstate(all="ignore"):
        for i, row in enumerate(rows):
            before = float(np.sqrt((row * row).sum()))
            for other in rows[:i]:
                row -= (row * other).sum() * other
            norm = float(np.sqrt((row * row).sum()))
            # A shorter row is only a rounding error, the same on all nodes.
            row[...] = row / norm if not norm <= 1e-6 * before else 0
    return rows.astype(np.float32)


def _pack(arrays: Sequence[NDArray[Any]]) -> Wide:
    return np.concatenate([np.empty(0, np.float32), *(x.reshape(-1) for x in arrays)])


def _unpack(x: Wide, shapes: Sequence[tuple[int, ...]]) -> list[Wide]:
    """Return consecutive parts of `x` as views of these shapes."""
    ends = list(itertools.accumulate(map(math.prod, shapes)))
    return [x[start:end].reshape(shape) for start, end, shape in zip([0, *ends], ends, shapes)]
