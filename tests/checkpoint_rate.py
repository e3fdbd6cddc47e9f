"""Measures, by hand, what a checkpoint of 200 MB costs: mpirun -n 2 python THIS FOLDER [ROUNDS]."""

import os
import statistics
import sys
import time

import numpy as np

import mpiring
from mpiring.numpy import Checkpoints
from mpiring.resilience import Stopping

ARRAYS, NBYTES, PIECE_BYTES, STEP_S = 300, 200_000_000, 8 << 20, 0.055


def timed(name, function):
    """Call a function, and note how long it took, in ms."""
    comm.barrier()
    began = time.perf_counter()
    function()
    times.setdefault(name, []).append(1e3 * (time.perf_counter() - began))


def copy():
    for name, x in state.items():
        copies[name][...] = x


def plain():
    """Write as many bytes as any program would."""
    if comm.rank == 0:
        with open(f"{folder}/plain", "wb", buffering=0) as file:
            data = flat.data
            while data:
                data = data[os.write(file.fileno(), data[:PIECE_BYTES]):]
            os.fsync(file.fileno())
        os.unlink(f"{folder}/plain")


def step(stopping=None):
    """Compute for 55 ms, between two allreduces, as training does."""
    comm.allreduce(short)
    end = time.perf_counter() + STEP_S
    while time.perf_counter() < end:
        matrix @ matrix
    if stopping is not None:
        stopping.now()
    comm.allreduce(short)


comm = mpiring.init()
folder, rounds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 8
state = {f"w{i}": np.full(NBYTES // ARRAYS // 4, i, np.float32) for i in range(ARRAYS)}
copies = {name: np.zeros_like(x) for name, x in state.items()}
flat = np.concatenate(list(state.values())).view(np.uint8)
matrix, short, times = np.ones((360, 360)), comm.empty(1000), {}
short[...] = 0
with Checkpoints(folder, comm, keep=1) as checkpoints:
    for number in range(rounds):
        timed("copy", copy)
        timed("plain write", plain)
        timed("save", lambda: checkpoints.save(number, replicated=state, own={"rank": comm.rank}))
        checkpoints.wait()
        times.setdefault("complete", []).append(1e3 * checkpoints.save_s)
with Stopping(comm) as asked:
    for _ in range(5 * rounds):
        timed("step", step)
        timed("step that asks", lambda: step(asked))
if comm.rank == 0:
    for name, found in times.items():
        print(f"{name:15} first {found[0]:7.1f} ms, then {statistics.median(found[1:]):7.2f} ms")
comm.close()
