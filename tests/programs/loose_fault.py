"""Breaks the last rank amid training without a common step, and prints what the others say of it.

Usage: loose_fault.py FAULT: one of FAULTS. All ways of training are tried, one after the other.
"""

import functools
import os
import signal
import sys
import time

import numpy as np

import mpiring
from mpiring.asynchronous import PairAveraging
from mpiring.numpy import AsyncDataParallel, DiLoCo
from mpiring.optim import SGD

FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}

fault = sys.argv[1]
number = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
if fault == "killed" and number == "2" and os.fork():
    # mpiexec ends the job of a process that dies: let it watch this one, whose child is the rank.
    time.sleep(600)
comm = mpiring.init()
# Short: MPICH finds out by itself that it cannot read from a dead rank what is long.
server, mine, local = ({"w": np.zeros(300)} for _ in range(3))
dp = AsyncDataParallel(server, comm, optimizer=functools.partial(SGD, lr=0.1),
                       staleness=0 if fault == "stopped" else None)
ways = {"server": lambda: dp.step({"w": server["w"] - comm.rank}),
        "pairs": PairAveraging(mine, comm, seed=1).step,
        # A fragment is sent at step 4, the first without the last rank, and needed at step 7.
        "diloco": DiLoCo(local, comm, every=4, delay=3).step}
for take_step in ways.values():
    for _ in range(3):
        take_step()
comm.barrier()
if comm.rank == comm.size - 1:
    os.kill(os.getpid(), FAULTS[fault])
for way, take_step in ways.items():
    began_s = time.monotonic()
    try:
        for _ in range(50):
            take_step()
    except mpiring.StallError as error:
        took_s = time.monotonic() - began_s
        print(f"{way}, rank {comm.rank}, after {took_s:.1f} s: {str(error)!r}", flush=True)
        # The last one ends the job.
        if way == "diloco":
            raise
