"""Takes 1,000 training steps on a GPU, and fails if its memory, or the host's, grows meanwhile."""

import resource
import sys

import numpy as np

import mpiring
from mpiring.data import prefetch
from mpiring.gpus import cupy_for
from mpiring.numpy import DataParallel

STEPS, SETTLED = 1000, 100
# One of CUDA's blocks; and pages that Python and malloc keep.
DEVICE_BYTES, HOST_BYTES = 2 << 20, 32 << 20


def main():
    comm = mpiring.init()
    xp = cupy_for(comm)
    shapes = {"w1": (300, 1000), "b1": (1000,), "w2": (1000, 300), "scale": ()}
    params = {name: xp.asarray(np.ones(shape, np.float32)) for name, shape in shapes.items()}
    dp = DataParallel(params, comm, bucket_bytes=1 << 20)
    batches = [np.full((64, 300), number, np.float32) for number in range(STEPS)]
    for number, batch in enumerate(prefetch(batches, "cuda")):
        for name in reversed(shapes):
            dp.grads[name][...] = batch[0, 0] + comm.rank
            dp.ready(name)
        dp.wait()
        comm.allreduce(batch, op="max")
        if number == SETTLED:
            before = used(comm, xp)
    after = used(comm, xp)
    assert float(dp.grads["scale"]) == STEPS - 1 + (comm.size - 1) / 2
    grown = [late - early for early, late in zip(before, after)]
    if comm.rank == 0:
        print(f"after {SETTLED} to {STEPS} steps the GPU's memory grew by {grown[0]} bytes, "
              f"the host's by {grown[1]}")
    comm.close()
    sys.exit(grown[0] > DEVICE_BYTES or grown[1] > HOST_BYTES)


def used(comm, xp):
    """Return the bytes in use on the GPU, and at most by this process on the host."""
    comm.barrier()
    free, total = xp.cuda.runtime.memGetInfo()
    comm.barrier()
    return total - free, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


main()
