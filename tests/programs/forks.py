"""Forks its ranks in every way, and sees that MPI is left alone in the children; run by mpirun."""

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback

import numpy as np
from mpi4py import MPI

import mpiring
from mpiring import ClosedError, LaunchError
from mpiring.resilience import Stopping

# The machine may be busy; what hangs is noticed long after.
PATIENCE_S = 60

comm = mpiring.init(config=mpiring.Config(progress=("thread", "inline")[MPI.COMM_WORLD.rank]))
shared = comm.empty(5000)
left = comm.empty(5000)


def forked(child):
    """Run `child` in a fork, and return how it ended, as os.waitpid says."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        child()
        # Leaves as any program does that comes to its end: not by os._exit.
        raise SystemExit
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        ended_pid, status = os.waitpid(pid, os.WNOHANG)
        if ended_pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    raise TimeoutError(f"rank {comm.rank}: a fork hangs")


def train(steps=20):
    """See that the parent's own results are right."""
    for step in range(steps):
        x = np.full(1 + 100 * step, comm.rank + step, np.float64)
        handle = comm.iallreduce(x)
        shared[...] = step
        comm.allreduce(shared)
        handle.wait()
        assert (x == 1 + 2 * step).all() and (shared == 2 * step).all(), (step, x[0], shared[0])


def refused(expected, *calls):
    """End this fork with status 1 unless each of these calls raises the error."""
    for number, call in enumerate(calls):
        try:
            call()
        except expected as error:
            assert "is a fork of" in str(error) and "in the main process" in str(error), error
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        else:
            print(f"rank {comm.rank}: call {number} is not refused", flush=True)
            os._exit(1)


def communicate():
    """Try all doors to MPI."""
    global left
    refused(ClosedError, lambda: comm.allreduce(np.ones(1)), lambda: comm.allreduce(shared),
            lambda: comm.iallreduce(np.ones(1)), lambda: comm.broadcast_object(1), comm.barrier,
            comm.poke, lambda: comm.split(0), lambda: comm.empty(5), handle.wait, handle.test,
            lambda: handle.when_done(print), lambda: messages.isend(np.ones(1), 0),
            lambda: messages.irecv(np.ones(1), 0))
    refused(LaunchError, mpiring.init, lambda: mpiring.Communicator(COMM_WORLD))
    del left
    gc.collect()
    with comm:
        pass
    comm.close()


def holding_locks():
    """Fork while another thread, which the child has not, holds the locks of the engine."""
    engine = comm._group.engine
    taken, done = threading.Event(), threading.Event()

    def hold():
        with engine.lock, engine._waiting_lock:
            taken.set()
            done.wait(PATIENCE_S)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait(PATIENCE_S)
    status = forked(communicate)
    done.set()
    thread.join()
    return status


def raising():
    raise ValueError("a bug in a fork")


from mpi4py.MPI import COMM_WORLD  # noqa: E402 (mpiring has started it)

messages = comm.messages()
# Complete when the other rank sends, which is not before the forks have ended.
handle = messages.irecv(np.empty(1), 1 - comm.rank)
large = comm.iallreduce(np.ones(1 << 20))
for _ in range(3):
    # From now on such a call is a round.
    comm.allreduce(np.ones(1))
assert forked(communicate) == 0
large.wait()
train()
assert holding_locks() == 0
train()
assert forked(lambda: sys.exit(0)) == 0 and forked(lambda: sys.exit(3)) == 3
assert forked(lambda: sys.exit("what it says")) == 1
assert forked(lambda: forked(sys.exit)) == 0
train()
assert forked(raising) == 1
train()
with Stopping(comm) as stopping:
    assert forked(lambda: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(PATIENCE_S))) == -15
    assert not stopping.now() and not stopping.now()
workers = multiprocessing.get_context("fork")
process = workers.Process(target=communicate)
process.start()
with workers.Pool(2) as pool:
    assert pool.map(abs, range(-5, 0), 1) == [5, 4, 3, 2, 1]
train()
process.join(PATIENCE_S)
assert process.exitcode == 0
comm.barrier()
messages.isend(np.ones(1), 1 - comm.rank)
handle.wait()
train()
print(f"rank {comm.rank}: all is well", flush=True)
# Nobody waits for it, or closes.
comm.iallreduce(np.ones(1000))
