"""Tests that ranks which take different steps of a PyTorch model are told so, on real MPI."""

import pytest
from launching import needed
from mpi4py import MPI

import mpiring

torch = needed("torch")
from mpiring.torch import DataParallel  # noqa: E402
from torch import nn  # noqa: E402

pytestmark = pytest.mark.mpi


def model_and_optimizers(comm, count=1, **settings):
    model = DataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), comm, **settings)
    return model, [torch.optim.SGD(layer.parameters(), lr=0.1)
                   for layer in (model.module if count == 2 else [model.module])]


def step(model, optimizers, *, backward=True):
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).sum()
    if backward:
        loss.backward()
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.parametrize("bad_step", [0, 3])
@pytest.mark.parametrize("deferred", [False, True])
def test_a_backward_pass_that_one_rank_skips_is_noticed_in_the_next_one(bad_step, deferred):
    comm = mpiring.Communicator(MPI.COMM_WORLD)
    model, optimizers = model_and_optimizers(comm, defer_wait=deferred)
    for _ in range(bad_step):
        step(model, optimizers)
    if comm.size > 1:
        with pytest.raises(mpiring.BufferMismatchError) as error:
            step(model, optimizers, backward=comm.rank > 0)
            step(model, optimizers)
        count = 1 + (bad_step > 0)
        assert (f"in step {bad_step} ({count} optimizer steps since its last averaged backward "
                f"pass) bucket 0") in str(error.value)
        MPI.COMM_WORLD.Barrier()
        comm._group.closed = True
        comm._group._forget()


def test_ranks_may_take_steps_without_the_others_where_nothing_is_averaged(comm):
    model, optimizers = model_and_optimizers(comm, count=2)
    for number in range(3):
        step(model, optimizers)
        if number == 1:
            with model.no_sync():
                for _ in range(comm.rank):
                    step(model, optimizers)
        if number == 2:
            with model.no_sync():
                for _ in range(comm.rank):
                    model(torch.ones(2, 4)).sum().backward()
            for _ in range(comm.rank):
                optimizers[0].step()
    with model.join():
        for _ in range(1 + comm.rank):
            step(model, optimizers)
    step(model, optimizers)
