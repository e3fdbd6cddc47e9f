"""Measures memory: of this process at its peak, and of all processes of a node."""

import ctypes
import gc
import math
from pathlib import Path

from .world import World

_PROC = Path("/proc/self")
_FORGET_PEAK = "5"


class Growth:
    """Growth of this process's memory since this object was created, as Linux counts it.

    Each of the `sharers` counts an equal part of the memory that the ranks of its node share. Linux
    would count all shared pages that the process has touched, also those of other ranks.
    """

    def __init__(self, sharers: int) -> None:
        self._sharers = sharers
        self._before = self._now("VmRSS")

    def forget_peak(self) -> None:
        """Reset the peak to the present memory."""
        _trim_memory()
        if _is_linux():
            (_PROC / "clear_refs").write_text(_FORGET_PEAK)

    def max_bytes(self) -> float:
        """Return the growth at the peak since `forget_peak`; NaN if the system is not Linux."""
        return self._now("VmHWM") - self._before

    def _now(self, key: str) -> float:
        _trim_memory()
        if not _is_linux():
            return math.nan
        lines = (_PROC / "status").read_text().splitlines()
        status = {line.partition(":")[0]: line.split()[1] for line in lines if line.endswith(" kB")}
        private = (int(status[key]) - int(status["RssShmem"])) << 10
        return private + _windows_bytes() / self._sharers


class NodeGrowth:
    """Growth of the memory of a node's ranks since this object was created, as Linux counts it.

    Memory that several ranks share counts once. Code and other files do not count. All ranks create
    and use the object together.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._before = self._now()

    def bytes_now(self) -> float:
        """Return the growth of the node that has grown most; NaN if the system is not Linux."""
        growth_here = self._world.comm.node_rank, self._now() - self._before
        nodes: dict[int, float] = {}
        for node, growth in self._world.raw.allgather(growth_here):
            nodes[node] = nodes.get(node, 0.0) + growth
        return max(nodes.values())

    def _now(self) -> float:
        """Return this process's bytes; shared pages are divided by the number of their users."""
        _trim_memory()
        # No rank may free shared pages while other ranks count them.
        self._world.barrier()
        if not _is_linux():
            return math.nan
        lines = (_PROC / "smaps_rollup").read_text().splitlines()
        kib = sum(int(line.split()[1]) for line in lines
                  if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
        self._world.barrier()
        return kib << 10


def _is_linux() -> bool:
    return (_PROC / "clear_refs").exists()


def _trim_memory() -> None:
    """Return freed memory, which glibc keeps for later allocations, to the system."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _windows_bytes() -> int:
    """Return the size of mpiring's shared memory, which is always allocated in full."""
    ranges = [line.split()[0].split("-") for line in (_PROC / "maps").read_text().splitlines()
              if "memfd:mpiring" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in ranges)
