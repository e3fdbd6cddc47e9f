"""Has two ranks write into each other's memory on a GPU, with barriers of hosts and of streams."""

import itertools
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from gpu_memory import GpuMemory, wait  # noqa: E402
from node_words import pinned_words  # noqa: E402

from mpiring.gpu import cuda  # noqa: E402
from mpiring.gpu.interface import Flags  # noqa: E402

comm = MPI.COMM_WORLD
device = cuda.device(0)
memory = GpuMemory(device)
assert not device.gpu.unqueued, device.gpu.unqueued
n = 1 << 20

# The third barrier is number 0 of 32 bits.
flags = Flags(pinned_words(device, comm, (1 << 32) - 3), comm.rank)
numbers = itertools.count((1 << 32) - 2)


def host_barrier():
    wait(device.event())
    comm.Barrier()


def queued_barrier():
    if comm.rank:
        time.sleep(0.01)
    device.meet(flags, next(numbers))


for barrier in (host_barrier, queued_barrier) * 3:
    # A small allocation besides: what is opened must be its own, not its neighbor's.
    small, own = device.allocate(100), memory.put(np.full(n, comm.rank + 1.0))
    raw = own.view(np.uint8)
    handles = comm.allgather(device.gpu.export(raw))
    peers = device.gpu.open(handles[1 - comm.rank], raw.nbytes, device).view(np.float64)
    # Each half is summed by one of them, in turn, and stored in both.
    for turn in range(5):
        half = slice(n // 2) if (comm.rank + turn) % 2 == 0 else slice(n // 2, n)
        barrier()
        device.combine("sum", [own[half], peers[half]], 1, [own[half], peers[half]])
    barrier()
    assert (memory.get(own) == 3 * 2 ** 4).all()
    device.gpu.close(peers)
    comm.Barrier()
    del small, own, raw
print("shared", flush=True)
