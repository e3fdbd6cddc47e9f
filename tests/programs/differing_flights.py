"""Makes calls in which rank 1 differs, and dumps the flight record of each: folder."""

import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

import mpiring
import mpiring.torch

FOLDER = Path(sys.argv[1])
odd = MPI.COMM_WORLD.rank == 1
x = np.ones(4)


def other_call(comm):
    return comm.broadcast(x) if odd else comm.allreduce(x)


CASES = {
    "shape": lambda comm: comm.allreduce(np.ones(5) if odd else x),
    "op": lambda comm: comm.allreduce(x, op="max" if odd else "sum"),
    "call": other_call,
    "group": lambda comm: comm.split(0).allreduce(np.ones((2, 3)) if odd else np.ones((3, 2)))}
for name, call in CASES.items():
    comm = mpiring.Communicator(MPI.COMM_WORLD)
    # More than the record holds, and not all of them in one buffer.
    for _ in range(1100):
        comm.allreduce(x)
    comm.messages().isend(x, (comm.rank + 1) % comm.size)
    comm.messages().irecv(np.empty(4), (comm.rank - 1) % comm.size).wait()
    comm.allgather(np.ones(6))
    try:
        call(comm)
    except mpiring.BufferMismatchError:
        comm.dump_flight(last=1, folder=str(FOLDER / name))
dist.init_process_group("mpiring", init_method="mpi://")
pair = dist.new_group([0, 1])
outputs = [torch.ones(2) for _ in range(3)]
dist.all_gather(outputs, torch.ones(2))
if not odd:
    dist.all_reduce(torch.ones(2, 3), async_op=True)
dist.group.WORLD.dump_flight(last=1, folder=FOLDER / "torch")
MPI.COMM_WORLD.Barrier()
# No rank can close a communicator that has failed.
os._exit(0)
