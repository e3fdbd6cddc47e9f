"""Prices of a simulated cluster: messages on links, and computing."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ..provisional import Array


@dataclass(frozen=True)
class Link:
    """A link between two ranks.

    Attributes:
        latency_s: Seconds before the first byte arrives.
        bandwidth: Bytes per second afterwards.
        burst_bytes: Number of bytes that pass without waiting after a pause. Links in clouds, and
            links with Linux's `tc tbf`, are limited only on average, by a token bucket.
    """

    latency_s: float = 0.0
    bandwidth: float = math.inf
    burst_bytes: float = 0.0


@dataclass(frozen=True)
class Computing:
    """Costs of computing.

    Attributes:
        overhead_s: Seconds that each message costs its sender, and also its receiver.
        copy_rate: Bytes per second at which the sender and the receiver copy messages between
            nodes, as the system does for TCP.
        cores: Number of cores on which all ranks compute, as in a lab; 0 for one core per rank.
    """

    overhead_s: float = 0.0
    copy_rate: float = math.inf
    cores: int = 0


class Cores:
    """The cores of a machine, which accept work in the order of its arrival."""

    def __init__(self, count: int) -> None:
        self._free_s = [-math.inf] * count

    def take(self, now_s: float, seconds: float, number: int | None = None) -> float:
        """Return the time at which work that can begin at `now_s` is done.

        The work needs the core `number`, modulo the number of cores; None for the first idle one.
        """
        if number is None:
            # The core that became idle last is most often the one that this rank has used.
            idle = [free_s for free_s in self._free_s if free_s <= now_s]
            number = self._free_s.index(max(idle) if idle else min(self._free_s))
        number %= len(self._free_s)
        self._free_s[number] = done_s = max(now_s, self._free_s[number]) + seconds
        return done_s


class _Ghost(np.ndarray[Any, np.dtype[Any]]):
    """A vector without memory: its elements are all the same one, which is never written."""

    copied: Callable[[int], None] | None = None

    def __array_finalize__(self, parent: Any) -> None:
        self.copied = getattr(parent, "copied", None)

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.copied:
            self.copied(self[key].nbytes)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function is not np.copyto:
            return super().__array_function__(function, types, args, kwargs)
        args[0][...] = args[1]


def ghost(n: int, dtype: DTypeLike, copied: Callable[[int], None] | None = None) -> Array:
    """Return a vector of `n` elements without memory, for a network without payload.

    The function `copied` gets the number of bytes of each copy into it, or into a part of it.
    """
    x = np.broadcast_to(np.empty((), dtype), (n,)).view(_Ghost)
    x.copied = copied
    return x


class NoCombine:
    """A `Combine` that does nothing, for a network without payload."""

    adds, divisor = False, 1.0

    def prepare(self, x: Array) -> None:
        """Do nothing."""

    def accumulate(self, out: Array, contribution: Array) -> None:
        """Do nothing."""

    def finish(self, chunk: Array) -> None:
        """Do nothing."""

    def combine(self, sources: Sequence[Array], *outs: Array) -> None:
        """Do nothing."""

    def copy(self, x: Array, *outs: Array, past_caches: bool = False) -> None:
        """Do nothing."""


class PricedCombine(NoCombine):
    """A `Combine` that only takes time, for a network without payload.

    Args:
        work: Function that keeps the rank busy for a number of seconds.
        rate: Bytes per second that it reads and writes.
        copied: Bytes per second of a copy to one vector, which reads and writes each byte.
    """

    def __init__(self, work: Callable[[float], None], rate: float,
                 copied: float = math.inf) -> None:
        self._work, self._rate, self._copied = work, rate, copied

    def accumulate(self, out: Array, contribution: Array) -> None:
        """Take the time of reading two vectors, and writing one."""
        self.combine((out, contribution), out)

    def combine(self, sources: Sequence[Array], *outs: Array) -> None:
        """Take the time of reading and writing each vector once."""
        self._work((len(sources) + len(outs)) * outs[0].nbytes / self._rate)

    def copy(self, x: Array, *outs: Array, past_caches: bool = False) -> None:
        """Take the time of reading one vector, and writing each of the others."""
        if outs:
            self._work((1 + len(outs)) * x.nbytes / (2 * self._copied))
