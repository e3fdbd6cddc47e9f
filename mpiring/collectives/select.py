"""Chooses the algorithm of an allreduce, and builds its schedule."""

import functools
import logging
from dataclasses import dataclass

from ..errors import ConfigError
from ..memory.arrays import Array, chunks_of, dtype_name
from ..memory.reduction import Reduction
from ..memory.scratch import Scratch
from ..transport.base import Channel, Schedule
from . import native, ring

_log = logging.getLogger("mpiring")

# MPI's own call needs fewer messages, the ring fewer bytes and no second copy.
RING_FROM_BYTES = 256 << 10


def choose(x: Array, op: str, wish: str = "auto") -> str:
    """Return "ring" or "native" for an allreduce of `x`, the same on every rank.

    Args:
        x: The flat array; only its size and dtype matter.
        op: sum, mean, max, min or prod.
        wish: "auto", or the algorithm that the user insists on.

    Raises:
        ConfigError: The wish is unknown, or MPI cannot do this op on this dtype.
    """
    if wish == "auto":
        small = x.nbytes < RING_FROM_BYTES
        return "native" if small and native.supports(x.dtype, op) else "ring"
    if wish == "native" and not native.supports(x.dtype, op):
        raise ConfigError(
            f"algorithm='native': MPI's own {op} is wrong or missing for "
            f"{dtype_name(x.dtype)}; use algorithm='auto'")
    if wish not in ("ring", "native"):
        raise ConfigError(f"algorithm={wish!r}: expected 'auto', 'ring' or 'native'")
    return wish


@functools.cache
def _say_fallback(dtype: str, op: str) -> None:
    """Say once that the ring stands in for MPI's own allreduce."""
    _log.warning("algorithm='native' is configured, but MPI's own %s is wrong or missing for %s: "
                 "the ring does it", op, dtype)


@dataclass(frozen=True)
class Collectives:
    """The schedules of one operation, bound to its channel: what Reducers build on.

    Attributes:
        net: The operation's channel.
        scratch: Where receive buffers come from.
        transport: For MPI's own collectives.
        turns: The order of native collectives.
        sequence: The operation's number.
        algorithm: What "auto" means, from the configuration.
    """

    net: Channel
    scratch: Scratch
    transport: native.NativeTransport
    turns: native.Turns
    sequence: int
    algorithm: str = "auto"

    def allreduce(self, x: Array, *, op: str = "sum", algorithm: str = "auto") -> Schedule[None]:
        """Return the schedule that combines the vector `x` over all ranks, in place.

        With algorithm "auto" or "native" this must be called when the operation
        is made, not from inside a running schedule; "ring" can be called anywhere.

        Raises:
            ConfigError: The op or the algorithm does not suit the dtype.
        """
        reduction = Reduction(op, x.dtype, self.net.size)
        if algorithm == "auto":
            algorithm = self._preferred(x, op)
        if self.net.size == 1 or choose(x, op, algorithm) == "ring":
            return self._ring(x, reduction)
        turn = self.turns.join(self.sequence)
        return native.allreduce(self.transport, turn, x, reduction)

    def _preferred(self, x: Array, op: str) -> str:
        """Return the configured algorithm, or "auto" where MPI cannot do what it says."""
        if self.algorithm == "native" and not native.supports(x.dtype, op):
            if self.net.rank == 0:
                _say_fallback(dtype_name(x.dtype), op)
            return "auto"
        return self.algorithm

    def _ring(self, x: Array, reduction: Reduction) -> Schedule[None]:
        with self.scratch.borrow(ring.inbox_size(x.size, self.net.size), x.dtype) as inbox:
            yield from ring.allreduce(self.net, x, inbox, reduction)

    def reduce_scatter(self, x: Array, *, op: str = "sum") -> Schedule[Array]:
        """Return the schedule that leaves this rank's combined chunk of the vector `x`."""
        reduction = Reduction(op, x.dtype, self.net.size)
        with self.scratch.borrow(ring.inbox_size(x.size, self.net.size), x.dtype) as inbox:
            chunks = chunks_of(x, self.net.size)
            return (yield from ring.reduce_scatter(self.net, chunks, inbox, reduction))
