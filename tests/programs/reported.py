"""Opens a group in the way that the first argument names, and fails as the second one says.

Operations of the group that fails have 77 elements. Usage: reported.py WAY FAULT.
"""

import os
import signal
import sys
import threading
import time

import numpy as np
from mpi4py import MPI

import mpiring

ELEMENTS = 77
WORLD = MPI.COMM_WORLD


def core(comm):
    return lambda n: comm.allreduce(np.ones(n, np.float32))


def closed_before():
    """Open and close a communicator, whose operations no report may list."""
    with mpiring.Communicator(WORLD) as first:
        first.allreduce(np.ones(3))


def back_end():
    import torch
    import torch.distributed as dist
    import mpiring.torch  # noqa: F401 (registers the back end)
    dist.init_process_group("mpiring", init_method="mpi://")
    return torch, dist


def by_back_end():
    torch, dist = back_end()
    return lambda n: dist.all_reduce(torch.ones(n))


def by_new_group():
    torch, dist = back_end()
    group = dist.new_group(backend="mpiring")
    return lambda n: dist.all_reduce(torch.ones(n), group=group)


def by_horovod():
    import mpiring.horovod as hvd
    hvd.init()
    hvd.allreduce(np.ones(3), name="first")
    hvd.shutdown()
    hvd.init()
    return lambda n: hvd.allreduce(np.ones(n, np.float32), name="second")


def by_process_set():
    import mpiring.horovod as hvd
    closed_before()
    # A set of all ranks is the global one.
    process_set = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[process_set])
    if hvd.rank() == 2:
        hvd.barrier()
    return lambda n: hvd.allreduce(np.ones(n, np.float32), process_set=process_set)


def beside_another():
    closed_before()
    keep.append(mpiring.init())
    keep[0].allreduce(np.ones(3))
    return core(mpiring.Communicator(WORLD.Dup()))


def again():
    closed_before()
    return core(mpiring.init())


def recovered():
    """A rank dies, and the others go on; then one of them fails."""
    from mpiring.elastic import State, run

    def train(state):
        state.comm.allreduce(np.ones(3))
        if state.comm.size == 3:
            if state.comm.rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            state.comm.barrier()
        fail(core(state.comm), state.comm.rank)

    run(train, State(mpiring.init()))


def part():
    keep.append(mpiring.init())
    return core(keep[0].split(0))


WAYS = {
    "init": lambda: core(mpiring.init()), "again": again, "part": part, "back end": by_back_end,
    "new group": by_new_group, "horovod": by_horovod, "process set": by_process_set,
    "beside": beside_another,
}
keep = []


def fail(allreduce, rank):
    """Make three operations, then fail on rank 1; rank 0 makes a fourth one."""
    for _ in range(3):
        allreduce(ELEMENTS)
    if rank == 0:
        print("rank 0 waits", flush=True)
    elif fault == "exception":
        raise ValueError("a bug in the user's code")
    elif fault == "exit":
        sys.exit(1)
    elif fault == "stall":
        time.sleep(60)
    elif fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "terminated":
        os.kill(os.getpid(), signal.SIGTERM)
    elif fault == "thread":
        thread = threading.Thread(target=lambda: allreduce(1 / 0))
        thread.start()
        thread.join()
        return
    else:
        assert fault in ("mismatch", "caught")
    try:
        allreduce(ELEMENTS + rank)
    except Exception:
        if fault == "caught" and rank == 0:
            time.sleep(60)
        raise


way, fault = sys.argv[1:]
if way == "recovered":
    recovered()
else:
    fail(WAYS[way](), WORLD.rank)
