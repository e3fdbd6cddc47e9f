"""Trains with data loaders whose workers are forks of the ranks; run by mpirun."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import mpiring
import mpiring.torch
from mpiring.torch import DataParallel


class Samples(Dataset):
    def __init__(self, communicates=False):
        self.communicates = communicates

    def __len__(self):
        return 16

    def __getitem__(self, number):
        if self.communicates:
            dist.all_reduce(torch.ones(1))
        return torch.full((4,), float(number + comm.rank))


def trained(workers):
    """Return the parameters after an epoch."""
    torch.manual_seed(0)
    model = DataParallel(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)), comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for batch in DataLoader(Samples(), batch_size=4, num_workers=workers,
                            multiprocessing_context="fork" if workers else None):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        total = torch.ones(3)
        dist.all_reduce(total)
        assert (total == comm.size).all()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


dist.init_process_group("mpiring", init_method="mpi://")
comm = mpiring.init()
alone, with_workers = trained(0), trained(2)
assert torch.equal(alone, with_workers)
with pytest.raises(mpiring.ClosedError, match=rf"is a fork of rank {comm.rank} \("):
    next(iter(DataLoader(Samples(communicates=True), num_workers=1,
                         multiprocessing_context="fork")))
assert torch.equal(trained(1), alone)
everybody = comm.allgather_object(alone)
assert all(torch.equal(theirs, alone) for theirs in everybody)
print("all is well", flush=True)
dist.destroy_process_group()
