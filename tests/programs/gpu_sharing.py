"""Has two ranks write into each other's memory on a GPU."""

import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from gpu_memory import GpuMemory, wait  # noqa: E402

from mpiring.gpu import cuda  # noqa: E402

comm = MPI.COMM_WORLD
device = cuda.device(0)
memory = GpuMemory(device)
n = 1 << 20
for attempt in range(3):
    # A small allocation besides: what is opened must be its own, not its neighbor's.
    small, own = device.allocate(100), memory.put(np.full(n, comm.rank + 1.0))
    raw = own.view(np.uint8)
    handles = comm.allgather(device.gpu.export(raw))
    peers = device.gpu.open(handles[1 - comm.rank], raw.nbytes, device).view(np.float64)
    comm.Barrier()
    # Each half is summed by one of them, and stored in both.
    half = slice(n // 2) if comm.rank == 0 else slice(n // 2, n)
    device.combine("sum", [own[half], peers[half]], 1, [own[half], peers[half]])
    wait(device.event())
    comm.Barrier()
    assert (memory.get(own) == 3).all()
    device.gpu.close(peers)
    comm.Barrier()
    del small, own, raw
print("shared", flush=True)
