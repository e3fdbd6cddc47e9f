"""Measures the memory bandwidth that ranks get while all ranks compute."""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ... import Communicator
from ...provisional import Array, collectives, memory

# Total length of a rank's vectors, which exceeds the caches, and number of ranks of a typical node.
_BYTES, _VECTORS = 64 << 20, 8
_ROUNDS = 15
_DTYPE = np.dtype(np.float32)


class Rates(NamedTuple):
    """Bytes per second of the slowest rank.

    Attributes:
        combining: Rate of reading and writing while a rank combines vectors into one of them.
        copying: Rate of copying one vector to several.
    """

    combining: float
    copying: float

    @property
    def options(self) -> str:
        """Options of `python -m mpiring simulate` for these rates."""
        return (f"--reduction-rate {self.combining / 1e9:.2f}GB/s "
                f"--node-bandwidth {self.copying / 1e9:.2f}GB/s")


def measure(comm: Communicator) -> Rates:
    """Combine and copy 64 MiB on each rank, in pieces, as algorithms between nodes do.

    Collective: yes. Blocking: yes, for less than a second.
    """
    n, op = _BYTES // _VECTORS // _DTYPE.itemsize, memory.Reduction("sum", _DTYPE, comm.size)
    vectors = [np.ones(n, _DTYPE) for _ in range(_VECTORS)]
    combining_s = _seconds(comm, vectors, lambda pieces: op.combine(pieces, pieces[0]))
    copying_s = _seconds(comm, vectors, lambda pieces: op.copy(*pieces, past_caches=True))
    # A copy reads and writes each byte.
    rates = np.array([(_VECTORS + 1) / _VECTORS * _BYTES / combining_s, _BYTES / 2 / copying_s])
    comm.allreduce(rates, op="min")
    return Rates(*rates.tolist())


def _seconds(comm: Communicator, vectors: list[Array],
             work: Callable[[list[Array]], None]) -> float:
    """Return the shortest time of `work` on all pieces of vectors."""
    step, seconds = collectives.Tuning.chunk_bytes // _DTYPE.itemsize, []
    for _ in range(_ROUNDS):
        comm.barrier()
        began_s = time.perf_counter()
        for start in range(0, vectors[0].size, step):
            work([x[start:start + step] for x in vectors])
        seconds.append(time.perf_counter() - began_s)
    return min(seconds)
