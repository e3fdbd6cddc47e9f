"""Measures, by hand, what a checkpoint of 200 MB costs: mpirun -n 2 python THIS FOLDER [ROUNDS].

Two methods, in turn: rank 0 writes everything, or each rank writes its slice.
"""

import json
import os
import statistics
import sys
import time

import numpy as np

import mpiring
from mpiring.numpy import Checkpoints
from mpiring.resilience import Sliced, Stopping

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
    """Write the same number of bytes without mpiring."""
    if comm.rank == 0:
        with open(f"{folder}/plain", "wb", buffering=0) as file:
            data = flat.data
            while data:
                data = data[os.write(file.fileno(), data[:PIECE_BYTES]):]
            os.fsync(file.fileno())
        os.unlink(f"{folder}/plain")


def saved_and_complete(name, checkpoints, number, **parts):
    """Save, and note the time until the call returned and until the checkpoint was complete."""
    timed(f"save {name}", lambda: checkpoints.save(number, **parts))
    checkpoints.wait()
    times.setdefault(f"complete {name}", []).append(1e3 * checkpoints.save_s)


def loaded(checkpoints):
    """Load, and read the part that this rank needs."""
    saved = checkpoints.load()
    for name, tensor in (saved.sharded or {}).items():
        for start, stop in own_slices[name].pieces:
            tensor.read(start, stop)


def slice_of(name, x):
    """Return this rank's piece of a tensor; the concatenated tensors are divided evenly."""
    start, n = x.size * int(name[1:]), x.size * ARRAYS
    first, last = (min(max(0, r * n // comm.size - start), x.size)
                   for r in (comm.rank, comm.rank + 1))
    return Sliced(x.shape, {(first, last): x[first:last]}, x.dtype)


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
own_slices = {name: slice_of(name, x) for name, x in state.items()}
with Checkpoints(f"{folder}/whole", comm, keep=1) as in_full, \
        Checkpoints(f"{folder}/slices", comm, keep=1) as slices:
    for number in range(rounds):
        timed("copy", copy)
        timed("plain write", plain)
        saved_and_complete("whole", in_full, number, replicated=state, own={"rank": comm.rank})
        saved_and_complete("slices", slices, number, sharded=own_slices, own={"rank": comm.rank})
    for _ in range(2):
        timed("load whole", lambda: loaded(in_full))
        timed("load slices", lambda: loaded(slices))
    if comm.rank == 0:
        for kind in ("whole", "slices"):
            with open(f"{folder}/{kind}/{open(f'{folder}/{kind}/latest').read().strip()}"
                      f"/manifest.json") as manifest:
                for name, nbytes in json.load(manifest)["files"].items():
                    print(f"{kind:7} {name.split('.')[0]:14} {nbytes / 1e6:8.3f} MB")
with Stopping(comm) as asked:
    for _ in range(5 * rounds):
        timed("step", step)
        timed("step that asks", lambda: step(asked))
if comm.rank == 0:
    for name, ms in times.items():
        print(f"{name:16} first {ms[0]:7.1f} ms, then {statistics.median(ms[1:]):7.2f} ms")
comm.close()
