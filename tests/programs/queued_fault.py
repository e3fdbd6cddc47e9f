"""Trains with queued operations until one rank does something else: python queued_fault.py HOW.

After each step, the host waits in CUDA for the means, not in mpiring. Run it by on_simulated_gpu.
"""

import os
import signal
import sys
import time

import numpy as np

import mpiring
from mpiring.gpus import cupy_for
from mpiring.numpy import DataParallel

_, how = sys.argv
comm = mpiring.init()
xp = cupy_for(comm)
dp = DataParallel({name: xp.asarray(np.zeros(3000)) for name in "ab"}, comm, bucket_bytes=20_000)
for number in range(4):
    if number == 2 and comm.rank == comm.size - 1:
        if how == "raises":
            raise ValueError("a wrong value")
        if how == "exits":
            sys.exit()
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how in ("sleeps", "fails", "stalls"):
            time.sleep(3600)
        if how == "differs":
            dp.gradients.label = "step of another program"
    if number == 2 and how == "fails":
        # NCCL of the tests notices that a rank is missing.
        os.environ["FAKE_NCCL_FAILS"] = "1"
    for name in "ba":
        dp.grads[name][...] = number + comm.rank
        dp.ready(name)
    dp.wait()
    if number == 2 and how == "stalls":
        try:
            comm.barrier()
        except mpiring.StallError:
            # NCCL has ended the sum, which is undefined.
            dp.grads["a"].get()
            print("the GPU is free", flush=True)
            raise
    assert (dp.grads["a"].get() == number + (comm.size - 1) / 2).all()
    print("step", number, flush=True)
print("all is well")
