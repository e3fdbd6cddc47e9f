"""Saves checkpoints while something goes wrong; run by mpirun."""

import os
import signal
import sys
import time

import numpy as np

import mpiring
from mpiring.errors import CheckpointError
from mpiring.numpy import Checkpoints
from mpiring.resilience import Stopping, checkpoint_file

fault, folder = sys.argv[1:]


def state(step, n=1000):
    return {"x": np.full(n, step)}


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


def full(comm, checkpoints):
    """The disk has 4 MB."""
    checkpoints.save(1, replicated=state(1), own=state(comm.rank))
    checkpoints.save(2, replicated=state(2), own=state(comm.rank, n=10**6 * (comm.rank == 1)))
    try:
        checkpoints.wait()
    except CheckpointError as error:
        everybodys = comm.allgather_object(str(error))
        assert everybodys == everybodys[:1] * comm.size
        assert "step 2 was not written: rank 1 on " in str(error), error
        assert "No space left on device" in str(error), error
        if comm.rank == 0:
            print("the disk was full for rank 1", flush=True)
    checkpoints.save(3, replicated=state(3), own=state(comm.rank))
    checkpoints.close()
    left = sorted(os.listdir(folder))
    assert left == ["000001-step-1", "000002-step-3", "latest", "lock"], left


def signaled(comm, checkpoints):
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
