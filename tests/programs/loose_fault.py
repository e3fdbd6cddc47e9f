"""Breaks the last rank amid training without a common step, and prints what the others say of it.

Usage: loose_fault.py FAULT FOLDER: one of FAULTS, and an empty folder, in which the others wait for
each other. All ways of training are tried at the same time.
"""

import functools
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
server, paired, local = ({"w": np.zeros(300)} for _ in range(3))
dp = AsyncDataParallel(server, comm, optimizer=functools.partial(SGD, lr=0.1),
                       staleness=0 if fault == "stopped" else None)
ways = {"server": lambda: dp.step({"w": server["w"] - comm.rank}),
        "pairs": PairAveraging(paired, comm, seed=1).step,
        # A fragment is sent at step 4, the first without the last rank, and needed at step 7.
        "diloco": DiLoCo(local, comm, every=4, delay=3).step}
for take_step in ways.values():
    for _ in range(3):
        take_step()
comm.barrier()
if comm.rank == comm.size - 1:
    os.kill(os.getpid(), FAULTS[fault])


def train(way):
    """Return after how many seconds training is told that a rank is missing, and how."""
    began_s = time.monotonic()
    try:
        for _ in range(50):
            ways[way]()
    except mpiring.StallError as error:
        return time.monotonic() - began_s, error
    raise AssertionError(f"{way} does without the last rank")


with ThreadPoolExecutor(len(ways)) as threads:
    for way, (took_s, error) in zip(ways, threads.map(train, ways)):
        print(f"{way}, rank {comm.rank}, after {took_s:.1f} s: {str(error)!r}", flush=True)
# The first one that raises ends the job.
folder, until_s = Path(sys.argv[2]), time.monotonic() + 60
(folder / f"{comm.rank}").touch()
while len(os.listdir(folder)) < comm.size - 1 and time.monotonic() < until_s:
    time.sleep(0.05)
raise error
