"""Measures the share of a GPU's link that remains after delays by Python, without a GPU.

The simulated GPU only takes time. Each CUDA call takes the processor CALL_S. A queued copy runs at
the link's rate after its stream and the events for which it waits. The result shows the speed of a
staged allreduce, compared with its copies alone.
"""

import argparse
import statistics
import time

import numpy as np
from mpi4py import MPI

import mpiring
from mpiring.gpu.device import Device
from mpiring.gpu.interface import DeviceVector

# Guesses, not measured on a GPU.
CALL_S = {"copy": 3e-6, "kernel": 6e-6, "record": 2e-6, "wait": 1e-6, "query": 0.7e-6}
KERNEL_S, MEMORY_BYTES_PER_S = 3e-6, 3e12
ROUNDS = 9


def spend(call):
    """Spend the processor time of a call."""
    end = time.perf_counter() + CALL_S[call]
    while time.perf_counter() < end:
        pass


class Event:
    def __init__(self, when):
        self.when, self.done = when, False

    def test(self):
        if not self.done:
            spend("query")
            self.done = time.perf_counter() >= self.when
        return self.done


class Stream:
    """A queue whose end time is known at once, because it only waits for earlier actions.
    """

    def __init__(self, gpu):
        self._gpu, self._end = gpu, 0.0

    def _busy(self, seconds):
        self._end = max(self._end, time.perf_counter()) + seconds

    def download(self, x, out):
        spend("copy")
        self._busy(x.nbytes / self._gpu.rate)
        self._gpu.down_s += x.nbytes / self._gpu.rate

    def upload(self, x, out):
        spend("copy")
        self._busy(x.nbytes / self._gpu.rate)
        self._gpu.up_s += x.nbytes / self._gpu.rate

    def combine(self, op, sources, divisor, outs, nonfinite=None):
        spend("kernel")
        self._busy(KERNEL_S + (len(sources) + len(outs)) * outs[0].nbytes / MEMORY_BYTES_PER_S)

    def record(self):
        spend("record")
        return Event(self._end)

    def wait(self, event):
        spend("wait")
        self._end = max(self._end, event.when)


class Gpu:
    """See gpu.Gpu.

    Attributes:
        rate: Bytes per second of copies in each direction, at the same time.
        down_s, up_s: Total time of copies from and to the GPU.
    """

    index, name, address, programmable = 0, "GPU that only takes time", "", True
    unqueued = "it only takes time"

    def __init__(self, rate):
        self.rate, self.down_s, self.up_s = rate, 0.0, 0.0

    def stream(self):
        return Stream(self)

    def allocate(self, nbytes, device):
        return DeviceVector(device, 1 << 44, nbytes, np.dtype(np.uint8))

    def pinned(self, nbytes):
        return np.empty(nbytes, np.uint8)

    def pin(self, memory):
        pass


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--link", type=float, default=50, help="GB/s per direction, for all ranks")
    options = parser.parse_args()
    with mpiring.Communicator(MPI.COMM_WORLD, config=mpiring.Config(gpu_aware="no")) as comm:
        gpu = Gpu(options.link * 1e9 / comm.size)
        x = Device(gpu).allocate(options.mib << 20).view(np.float32)
        comm.allreduce(x)
        gpu.down_s = gpu.up_s = 0.0
        seconds = []
        for _ in range(ROUNDS):
            comm.barrier()
            began = time.perf_counter()
            comm.allreduce(x)
            seconds.append(time.perf_counter() - began)
        took_s = max(comm.allgather_object(statistics.median(seconds)))
        copies_s = max(gpu.down_s, gpu.up_s) / ROUNDS
        if comm.rank == 0:
            print(f"{options.mib} MiB on {comm.size} ranks: {took_s * 1e3:.2f} ms; copies alone "
                  f"{copies_s * 1e3:.2f} ms, {copies_s / took_s:.2f} of that")


if __name__ == "__main__":
    main()
