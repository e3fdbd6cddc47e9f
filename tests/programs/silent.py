"""Ends after the ranks have communicated in one way, or in none; run by mpirun.

    mpiexec -n 3 python tests/programs/silent.py WAY
"""

import sys

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn

import mpiring
import mpiring.horovod as hvd
import mpiring.numpy as of_arrays
import mpiring.torch as of_tensors


def separate_models(comm):
    """Train as a program does whose `DataParallel` is PyTorch's."""
    sampler = of_tensors.DistributedSampler(range(8), comm)
    model = nn.DataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters())
    for epoch in range(3):
        sampler.set_epoch(epoch)
        of_tensors.DistributedSampler(range(8), comm)
        for x in sampler:
            model(torch.full((1, 1), float(x))).sum().backward()
            optimizer.step()


def some_ranks(comm):
    part = comm.split(0 if comm.rank else None)
    if part is not None:
        part.barrier()


def message(comm):
    messages, x = comm.messages(), np.ones(1)
    if comm.rank == 1:
        messages.isend(x, 2).wait()
    elif comm.rank == 2:
        messages.irecv(x, 1).wait()


def back_end(comm):
    dist.init_process_group("mpiring", init_method="mpi://")
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def gloo(comm):
    """Communicate by another library, to which mpiring has given the address."""
    dist.init_process_group("gloo", init_method="mpi://")
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def horovod(comm):
    hvd.init()
    hvd.allreduce(np.ones(1))
    hvd.shutdown()


def other_communicator(comm):
    comm.close()
    with mpiring.Communicator(MPI.COMM_WORLD) as other:
        other.barrier()


SILENT = {
    "nothing": lambda comm: None,
    "separate models": separate_models,
    "close": lambda comm: comm.close(),
    "split": lambda comm: comm.split(0),
    "empty": lambda comm: comm.empty(3),
    "prepare": lambda comm: comm.prepare(),
    "persistent": lambda comm: comm.persistent_allreduce(np.ones(3)),
    "no message": lambda comm: comm.messages(),
    "trace": lambda comm: (comm.start_trace("traces"), comm.stop_trace()),
    "mpi4py": lambda comm: MPI.COMM_WORLD.allreduce(1),
}
COMMUNICATING = {
    "barrier": lambda comm: comm.barrier(),
    "allreduce": lambda comm: comm.allreduce(np.ones(3)),
    "background": lambda comm: comm.iallreduce(np.ones(3)).wait(),
    "persistent call": lambda comm: comm.persistent_allreduce(np.ones(3))(),
    "object": lambda comm: comm.allgather_object(comm.rank),
    "some ranks": some_ranks,
    "message": message,
    "other communicator": other_communicator,
    "NumPy": lambda comm: of_arrays.DataParallel({"w": np.ones(3)}, comm),
    "PyTorch": lambda comm: of_tensors.DataParallel(nn.Linear(1, 1), comm),
    "back end": back_end,
    "Gloo": gloo,
    "Horovod": horovod,
}

if __name__ == "__main__":
    {**SILENT, **COMMUNICATING}[sys.argv[1]](mpiring.init())
