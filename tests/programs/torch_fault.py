"""Breaks a job that uses the back end in the way that the first argument names; run by mpirun."""

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import mpiring.torch  # noqa: F401 (registers the back end)

fault = sys.argv[1]
dist.init_process_group("mpiring", init_method="mpi://", timeout=timedelta(seconds=2))
rank = dist.get_rank()
x = torch.ones(1000)
dist.all_reduce(x)

if fault == "shape":
    dist.all_reduce(x[:999] if rank == 1 else x)
elif fault == "message":
    if rank == 1:
        dist.send(torch.ones(3), 0)
    elif rank == 0:
        dist.recv(torch.ones(4), 1)
    dist.barrier()
elif fault == "missing call":
    if rank != 1:
        try:
            dist.all_reduce(x)
        finally:
            dist.destroy_process_group()
    time.sleep(60)
elif fault == "missing bucket":
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 10))
    loss = model(torch.ones(2, 10)).sum()
    if rank != 1:
        loss.backward()
    time.sleep(60)
elif fault == "missing member":
    if rank != 1:
        dist.new_group(backend="mpiring", timeout=timedelta(seconds=2))
    time.sleep(60)
elif fault == "buffer":
    comm = mpiring.init(config=mpiring.Config(tuning=False, tuning_folder=""))
    model = torch.nn.Linear(3, 1)
    model.register_buffer("cache", torch.ones(3))
    model = mpiring.torch.DataParallel(model, comm)
    model.module.cache = torch.ones(3 + rank)
    model(torch.ones(2, 3)).sum().backward()
elif fault == "exception":
    if rank == 1:
        raise ValueError("a bug in the user's code")
    dist.all_reduce(x)
