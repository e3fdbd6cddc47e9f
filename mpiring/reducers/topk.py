"""Sends the largest thousandth of the gradients between nodes: Deep Gradient Compression."""

import math

import numpy as np

from ..arguments import number, whole_number
from ..sharding.state import Wide
from ..collectives import ring
from ..memory.arrays import Array, is_finite
from ..memory.reduction import quietly
from ..transport.base import Schedule
from . import two_phase
from .codecs import largest
from .compressor import Compressor, SliceExchange

# Densities of the paper's warm-up, one epoch each: 1 minus 75, 93.75, 98.4375, 99.6 %.
WARMUP_DENSITIES = (0.25, 0.0625, 0.015625, 0.004)


class TopK(Compressor):
    """Sends the largest elements of each tensor, and accumulates the others until they are large.

    With `momentum`, elements accumulate momentum while they wait, as if they had been sent. The
    result is then the update of momentum SGD, so the optimizer must be SGD without momentum.
    Elements that are sent lose their momentum. Without `momentum`, plain gradients are accumulated,
    for any optimizer.

    The state takes twice the memory of this rank's slices of the gradients (float32); with
    `momentum`, four times. One rank of each node compresses a given tensor.

    Args:
        density: Share of each tensor that is sent, above 0 and up to 1. At least one element of
            each tensor is sent.
        momentum: Momentum factor, from 0 to below 1.
        clip_norm: Largest norm of each tensor's gradient, times the square root of the number of
            nodes. Larger gradients are scaled down before they are accumulated. None for no limit.
        warmup_steps: Number of steps of the warm-up. Its five equal stages send 25, 6.25, 1.56 and
            0.4 %, then `density`. The paper's warm-up takes five epochs.

    Raises:
        ConfigError: A number is out of range.

    Source: Lin, Han et al., ICLR 2018, algorithms 1 and 4, and section 3.
    """

    feeds_back = whole_tensors = True

    def __init__(self, density: float = 0.001, *, momentum: float = 0.0,
                 clip_norm: float | None = None, warmup_steps: int = 0) -> None:
        super().__init__()
        self.density = number(
            "density", density, lambda x: 0 < x <= 1, "a number above 0 and up to 1")
        self.momentum = number(
            "momentum", momentum, lambda x: 0 <= x < 1, "a number from 0 to below 1")
        self.clip_norm = None if clip_norm is None else number(
            "clip_norm", clip_norm, lambda x: x > 0, "a number above 0, or None")
        self.warmup_steps = whole_number("warmup_steps", warmup_steps, 0)

    def __repr__(self) -> str:
        return (f"TopK(density={self.density:g}, momentum={self.momentum:g}, "
                f"clip_norm={self.clip_norm}, warmup_steps={self.warmup_steps})")

    @property
    def vector_names(self) -> tuple[str, ...]:
        """Names of the vectors in its state, the same on all ranks."""
        return ("residual", "momentum") if self.momentum else ("residual",)

    def compresses(self, nodes: int, step: int) -> bool:
        """Return whether a step is compressed; also true on one node with momentum or clipping."""
        return nodes > 1 or self.momentum > 0 or self.clip_norm is not None

    def density_at(self, step: int) -> float:
        """Return the share of elements that is sent after this number of applied steps."""
        stage = len(WARMUP_DENSITIES) + 1
        if self.warmup_steps:
            stage = min(step * stage // self.warmup_steps, stage)
        return max((*WARMUP_DENSITIES, 0.0, 0.0)[stage], self.density)

    def between(self, exchange: SliceExchange, x: Wide, lost: Wide | None) -> Schedule[bool]:
        """Return the schedule that replaces a slice by its mean over nodes."""
        if lost is not None:
            lost[...] = 0
        with exchange.encoding():
            # 1. Clip. Then u ← m u + gradient, v ← v + u.
            gathered = self._gather(exchange, x)
        if exchange.net.size == 1:
            # On one node, nothing is sent, and the momentum remains.
            x[...] = gathered
            gathered[...] = 0
            return is_finite(x)
        with exchange.encoding():
            # 2. Select the largest of v.
            indices, finite = self._select(exchange, gathered)
            values = gathered[indices]
            if not finite:
                # The other nodes detect this NaN.
                values[:1] = np.nan
            # 3. v, u ← 0 for the elements that are sent (momentum factor masking).
            gathered[indices] = 0
            if self.momentum:
                exchange.state.next("momentum")[indices] = 0
        # 4. Exchange the selected elements.
        p, k, n = exchange.net.size, indices.size, x.size
        if p * largest.packed_size(k, n) >= 2 * x.nbytes:
            # A dense mean around a ring takes no more bytes.
            x[...] = 0
            x[indices] = values
            yield from two_phase.average_dense(exchange, x)
            return is_finite(x)
        return (yield from _average_sparse(exchange, x, values, indices))

    def _gather(self, exchange: SliceExchange, x: Wide) -> Wide:
        """Return a gradient added to the earlier ones, with clipping and momentum correction."""
        state = exchange.state
        if self.clip_norm is not None:
            limit = self.clip_norm / math.sqrt(exchange.net.size)
            for part in state.ranges:
                quietly(_clip, x[part.start:part.stop], limit)
        addend = x
        if self.momentum:
            momentum, addend = state.vector("momentum"), state.next("momentum")
            quietly(np.multiply, momentum, np.float32(self.momentum), addend)
            quietly(np.add, addend, x, addend)
        residual = state.vector("residual")
        gathered: Wide = state.next("residual")
        quietly(np.add, residual, addend, gathered)
        return gathered

    def _select(self, exchange: SliceExchange, gathered: Wide) -> tuple[Array, bool]:
        """Return the indices of the elements to send, ascending, and whether all are finite."""
        density = self.density_at(exchange.step)
        parts, finite = [np.empty(0, np.int64)], True
        for i, part in enumerate(exchange.state.ranges):
            # At least one number, at most all.
            k = min(part.size, max(1, math.ceil(part.size * density)))
            indices, part_finite = largest.select_largest(
                gathered[part.start:part.stop], k, exchange.key(i))
            parts.append(indices + part.start)
            finite &= part_finite
        return np.concatenate(parts), finite


def _average_sparse(
    exchange: SliceExchange, x: Wide, values: Wide, indices: Array,
) -> Schedule[bool]:
    """Replace `x` by the mean over nodes, zero where no node sends; return whether it is finite."""
    p, r, k, n = exchange.net.size, exchange.net.rank, indices.size, x.size
    with exchange.borrow_bytes([largest.packed_size(k, n)] * p) as payloads:
        with exchange.encoding():
            largest.pack(values, indices, n, payloads[r])
        yield from ring.allgather(exchange.net, payloads)
        with exchange.decoding():
            x[...] = 0
            finite = True
            for payload in payloads:
                received, positions = largest.unpack(payload, k, n)
                finite &= is_finite(received)
                # Indices from one node are unique, so that `+=` adds each of them.
                quietly(_add_at, x, positions, received, np.float32(p))
    return finite


def _add_at(x: Wide, indices: Array, values: Wide, divisor: np.float32) -> None:
    x[indices] += values / divisor


def _clip(x: Wide, limit: float) -> None:
    norm = float(np.sqrt(np.dot(x, x)))
    if norm > limit:
        np.multiply(x, np.float32(limit / norm), out=x)
