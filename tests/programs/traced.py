"""Trains for some steps, in which the last rank waits for its data; then ends as it is told."""

import os
import signal
import sys
import threading
import time

import numpy as np

import mpiring
from mpiring.data import prefetch
from mpiring.numpy import DataParallel

end = sys.argv[1]
comm = mpiring.init()
last = comm.rank == comm.size - 1
dp = DataParallel({f"w{i}": np.ones((100, 300), np.float32) for i in range(4)}, comm,
                  bucket_bytes=100_000)
asked = threading.Event()


def loader():
    for step in range(12):
        asked.wait()
        asked.clear()
        # Twice as long as this rank has computed, so that it waits for its data on any machine.
        time.sleep(last * max(0.02, 2 * (time.monotonic() - began_s)))
        yield step


batches = iter(prefetch(loader(), "cpu", depth=1, comm=comm))
for step in range(12):
    began_s = time.monotonic()
    dp.weigh(15 + 5 * last)
    for name in ("w3", "w2", "w1", "w0"):
        time.sleep(0.005)
        dp.grads[name][...] = step
        dp.ready(name)
    asked.set()
    next(batches)
    # The last rank has a second bucket, and the others wait for it.
    comm.allreduce(np.ones(10))
    dp.wait()
if end == "killed" and last:
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
elif end == "raises" and last:
    raise ValueError("a bug in the user's code")
if end != "close":
    comm.barrier()
part = comm.split(comm.rank % 2)
part.close()
comm.close()
