"""Runs on each rank of a job of `benchmarks.start`: starts MPI, then mpiring, and times both."""

import json
import os
import time
from pathlib import Path
from typing import Any

# Number of short allreduces; the median counts.
_CALLS = 21
# Number of additions, which take about half a second.
_TO_ADD = 50_000_000


def _age_s(world: Any) -> float:
    """Return the age of this process after a barrier, by the kernel's clock; exact to 10 ms."""
    world.Barrier()
    # The 22nd word is the start time; the second word, the name, may contain blanks.
    ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")


def _memory() -> dict[str, float]:
    """Return the resident and the proportional set size of this process, in MiB."""
    words = Path("/proc/self/smaps_rollup").read_text().split()
    return {name: int(words[words.index(f"{name}:") + 1]) / 1024 for name in ("Rss", "Pss")}


def _short_calls(world: Any, allreduce: Any) -> float:
    """Return the median time of an allreduce after a barrier."""
    times_s = []
    for _ in range(_CALLS):
        world.Barrier()
        began_s = time.perf_counter()
        allreduce()
        times_s.append(time.perf_counter() - began_s)
    return sorted(times_s)[_CALLS // 2]


def _computing(world: Any, allreduce: Any) -> tuple[float, float]:
    """Let rank 0 compute while all other ranks wait.

    Returns:
        On rank 0, its elapsed time over its processor time, and the number of cores that the other
        ranks used. On other ranks, zeros.
    """
    world.Barrier()
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    if world.rank == 0:
        sum(iter(range(_TO_ADD)))
    share = (time.perf_counter() - began_s) / (time.process_time() - began_cpu_s)
    allreduce()
    elapsed_s = time.perf_counter() - began_s
    used_s = world.gather(time.process_time() - began_cpu_s)
    return (share, sum(used_s[1:]) / elapsed_s) if world.rank == 0 else (0.0, 0.0)


def main() -> None:
    """Start MPI, then mpiring; print the largest readings of all ranks on rank 0."""
    from mpi4py import MPI
    world = MPI.COMM_WORLD
    mpi_s = _age_s(world)
    # Programs that use MPI from Python import NumPy in any case.
    import numpy as np
    numpy_s = _age_s(world)
    import mpiring
    imported_s, before = _age_s(world), _memory()
    began_s = _age_s(world)
    comm = mpiring.init()
    ready_s = _age_s(world)
    after, x = _memory(), np.ones(16, np.float32)
    world.Barrier()
    by_mpi_s = _short_calls(world, lambda: world.Allreduce(MPI.IN_PLACE, x))
    by_mpiring_s = _short_calls(world, lambda: comm.allreduce(x, op="max"))
    slowness, waiting_cores = _computing(world, lambda: comm.allreduce(x, op="max"))
    readings = {
        "mpi_s": mpi_s, "numpy_s": numpy_s - mpi_s, "import_s": imported_s - numpy_s,
        "init_s": ready_s - began_s, "mpi_allreduce_ms": by_mpi_s * 1e3,
        "allreduce_ms": by_mpiring_s * 1e3, "computing": slowness, "waiting_cores": waiting_cores,
        **{name: len(os.listdir(f"/proc/self/{folder}"))
           for name, folder in (("threads", "task"), ("descriptors", "fd"))},
        **{f"{name.lower()}_{when}_mib": memory[name]
           for name in before for when, memory in (("before", before), ("after", after))},
        **{f"{name.lower()}_mib": after[name] - before[name] for name in before}}
    of_all = world.gather(readings)
    if of_all is not None:
        print(json.dumps({name: max(each[name] for each in of_all) for name in readings}))
    comm.close()


if __name__ == "__main__":
    main()
