"""Measures barriers of two ranks' streams, with words in the host's memory and in the GPU's.

    mpiexec -n 2 python tests/gpu/barriers.py --json barriers.json

`host_us` is the time in which a rank queues a barrier, `gpu_us` the time from one barrier to the
next on the GPU, if all are queued: from a rank's write to the end of the other rank's wait.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import threading
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

sys.path[:0] = [str(Path(__file__).parents[1] / "helpers"), str(Path(__file__).parents[2])]

from node_words import pinned_words  # noqa: E402

from mpiring.gpu import cuda  # noqa: E402
from mpiring.gpu.device import Device  # noqa: E402
from mpiring.gpu.interface import Flags, await_event  # noqa: E402

# The GPU begins after the time in which all barriers are queued; all must fit into the stream.
BARRIERS, ROUNDS, QUEUED_S = 100, 7, 0.05
# The stream that opens the gate must not be in the same queue of CUDA as the one that waits.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
comm = MPI.COMM_WORLD


def gpu_words(device):
    """Return a word in the memory of each rank, as both ranks see it."""
    own = device.allocate(4)
    device.clear(own)
    await_event(device.event())
    handles = comm.allgather(device.gpu.export(own))
    words = [own, own]
    words[1 - comm.rank] = device.gpu.open(handles[1 - comm.rank], own.nbytes, device)
    comm.Barrier()
    return [word.view(np.uint32) for word in words]


def timed(device, flags, numbers):
    """Return the time of the host and of the GPU for a barrier."""
    cupy, gate = cuda.cupy(), device.gpu.pinned(8).view(np.uint32)
    began, ended = cupy.cuda.Event(), cupy.cuda.Event()
    stream = device._work.changes()._stream
    gate[:] = 0
    sides = [Flags([gate[:1], gate[1:]], side) for side in range(2)]
    opening = threading.Timer(QUEUED_S, Device(device.gpu).meet, (sides[1], 1))
    comm.Barrier()
    opening.start()
    device.meet(sides[0], 1)
    device.meet(flags, next(numbers))
    began.record(stream)
    start = time.perf_counter()
    for _ in range(BARRIERS):
        device.meet(flags, next(numbers))
    host_s = time.perf_counter() - start
    ended.record(stream)
    await_event(device.event())
    opening.join()
    return host_s / BARRIERS, cupy.cuda.get_elapsed_time(began, ended) / 1e3 / BARRIERS


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    device = cuda.device(0)
    if device.gpu.unqueued:
        sys.exit(f"no barriers: {device.gpu.unqueued}")
    rows = []
    for place, words in {"host": pinned_words(device, comm), "GPU": gpu_words(device)}.items():
        flags, numbers = Flags(words, comm.rank), itertools.count(1)
        times = [timed(device, flags, numbers) for _ in range(ROUNDS)]
        host_us, gpu_us = (1e6 * statistics.median(values) for values in zip(*times))
        rows.append({"words": place, "host_us": host_us, "gpu_us": gpu_us})
    # No rank frees its word before the other rank has closed it.
    device.gpu.close(words[1 - comm.rank])
    comm.Barrier()
    if comm.rank == 0:
        print(*rows, sep="\n")
        if options.json:
            options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
