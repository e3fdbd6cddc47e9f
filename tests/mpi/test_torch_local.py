"""Tests local training of PyTorch's modules on real MPI, against that of NumPy's arrays."""

import tempfile

import pytest
from launching import needed

import mpiring

torch = needed("torch")
from odd_modules import OddWithBuffers, bits, equal_on_all, train  # noqa: E402
from mpiring.torch import Checkpoints, DataParallel, DiLoCo, LocalSGD, Sharded  # noqa: E402
from torch import nn  # noqa: E402

pytestmark = pytest.mark.mpi

STREAMING = {"every": 4, "fragments": 3, "delay": 2}


@pytest.mark.parametrize("sharded", [False, True])
def test_bit_by_bit_from_a_checkpoint(comm, sharded):
    """Amid a delay; and all ranks have the same model in the end, buffers and all."""
    def start():
        model = OddWithBuffers()
        if comm.rank:
            # Rank 0's are to be taken.
            nn.init.zeros_(model.last.weight)
            nn.init.zeros_(model.frozen)
        outer = DiLoCo(model, comm, **STREAMING, sharded=sharded)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01), outer

    with tempfile.TemporaryDirectory() as folder:
        folder = comm.broadcast_object(folder, root=0)
        model, optimizer, outer = start()
        train(model, optimizer, comm, range(6), outer=outer)
        with Checkpoints(folder, comm) as checkpoints:
            checkpoints.save(6, sharded=outer.sharded_state_dict(), own={
                "model": model.state_dict(), "optimizer": optimizer.state_dict()})
            saved = checkpoints.load()
        again, its, resumed = start()
        resumed.load_state_dict(saved.sharded)
        with resumed.global_parameters():
            assert equal_on_all(again.parameters(), comm)
        again.load_state_dict(saved.own["model"])
        its.load_state_dict(saved.own["optimizer"])
        comm.barrier()
    for training in ((model, optimizer, outer), (again, its, resumed)):
        train(*training[:2], comm, range(6, 11), outer=training[2])
    assert bits(model.state_dict().values()) == bits(again.state_dict().values())
    assert equal_on_all(model.parameters(), comm) == (comm.size == 1)
    with outer.join():
        train(model, optimizer, comm, range(11, 15 + comm.rank), outer=outer)
    assert equal_on_all(model.state_dict().values(), comm)
    assert (model.frozen == OddWithBuffers().frozen).all()


def test_inner_steps_that_a_grad_scaler_skips(comm):
    """They are one rank's own, and count; its scale is, too."""
    model = nn.Linear(3, 2)
    outer = DiLoCo(model, comm, every=4, delay=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(6):
        optimizer.zero_grad()
        overflows = step in (1, 3) and comm.rank == comm.size - 1
        loss = model(torch.ones(5, 3)).square().mean() * (torch.inf if overflows else 1)
        before = model.weight.detach().clone()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, model.weight) == overflows
        outer.step()
    assert scaler.get_scale() == (1.0 if comm.rank == comm.size - 1 else 4.0)
    outer.synchronize()
    assert equal_on_all(model.state_dict().values(), comm) and model.weight.isfinite().all()


def test_mistakes_of_local_training_are_named(comm):
    model = OddWithBuffers()
    outer = LocalSGD(model, comm, every=2)
    model.frozen.requires_grad_(True)
    outer.step()
    with pytest.raises(mpiring.ConfigError, match="frozen were frozen, or not there, when this w"):
        outer.step()
    model = OddWithBuffers()
    outer = LocalSGD(model, comm, every=1)
    model.double()
    with pytest.raises(mpiring.ConfigError, match=rf"rank {comm.rank}: .* has scale float64 "
                       r".* in the place of scale float32"):
        outer.step()
    with pytest.raises(mpiring.ConfigError, match="sharded='no': expected True or False"):
        LocalSGD(model, comm, every=2, sharded="no")
    with pytest.raises(mpiring.ConfigError, match="module is a list; pass a torch.nn.Module"):
        LocalSGD([model], comm, every=2)
    with pytest.raises(mpiring.ConfigError, match="no parameter of the model is trained"):
        LocalSGD(model.requires_grad_(False), comm, every=2)
    with comm.split(0) as group:
        model = DataParallel(OddWithBuffers(), group)
        optimizer = Sharded(torch.optim.AdamW, model, weights="node")
        outer = LocalSGD(model, comm, every=2)
        with pytest.raises(mpiring.ConfigError, match="with weights='node' keeps one copy of the"):
            outer.synchronize()
        optimizer.close()


def test_synchronous_in_groups_with_a_sharded_optimizer(comm):
    with comm.split(comm.rank % 2) as group:
        model = DataParallel(OddWithBuffers(), group)
        optimizer = Sharded(torch.optim.AdamW, model, lr=0.01, overlap=True)
        outer = DiLoCo(model, comm, **STREAMING)
        train(model, optimizer, comm, range(11), outer=outer)
        optimizer.synchronize()
        assert equal_on_all(model.state_dict().values(), group)
        outer.synchronize()
        train(model, optimizer, comm, range(1), outer=outer)
        outer.synchronize()
        assert equal_on_all(model.parameters(), comm)
        optimizer.close()
