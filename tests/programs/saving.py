"""Saves checkpoints while something goes wrong; run by mpirun."""

import os
import signal
import sys
import time

import numpy as np

import mpiring
from mpiring.numpy import Checkpoints
from mpiring.resilience import Stopping, checkpoint_file

fault, folder = sys.argv[1:]


def state(step):
    return {"x": np.full(1000, step)}


def killed(comm, checkpoints):
    """Rank 1 is killed when half of its second file is written."""
    checkpoints.save(1, replicated=state(1), own=state(comm.rank))
    checkpoints.wait()
    if comm.rank == 1:
        def write_half(descriptor, data):
            os.write(descriptor, data[:len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        checkpoint_file._write_all = write_half
    checkpoints.save(2, replicated=state(2), own=state(comm.rank))
    time.sleep(60)


def signalled(comm, checkpoints):
    """The last rank gets a signal, in the midst of computing; all stop at the same step."""
    with Stopping(comm) as stopping:
        for step in range(1000):
            if stopping.now():
                break
            if step == 3 and comm.rank == comm.size - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            np.linalg.norm(np.ones((100, 100)))
    assert set(comm.allgather_object((step, stopping.reason))) == {
        (5, f"SIGTERM on rank {comm.size - 1}")}
    # Nobody is lost in the last answer.
    with Stopping(comm) as stopping:
        for _ in range(10):
            assert not stopping.now()
    print(f"stopped at step {step}", flush=True)


def check(comm, checkpoints):
    """Look at what is left."""
    saved = checkpoints.load()
    assert np.array_equal(saved.replicated["x"], state(saved.step)["x"])
    assert np.array_equal(saved.own["x"], state(comm.rank)["x"])
    if comm.rank == 0:
        print("left is step", saved.step, sorted(os.listdir(folder)), flush=True)


with mpiring.init() as comm, Checkpoints(folder, comm) as checkpoints:
    for name in fault.split(","):
        globals()[name](comm, checkpoints)
