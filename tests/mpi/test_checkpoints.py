"""Tests that what all ranks have saved in slices is loaded by fewer of them, over real MPI."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from launching import needed

from mpiring.numpy import Checkpoints
from mpiring.resilience import Sliced, whole

pytestmark = pytest.mark.mpi

# Written by version 0.1: two ranks, a model of two linear layers, three steps of AdamW.
OLD = Path(__file__).parent.parent / "sharding" / "saved"
X = np.arange(1003, dtype=np.float32).reshape(17, 59)


def test_fewer_ranks_go_on_from_slices(comm, tmp_path):
    folder = comm.broadcast_object(tmp_path / "run", root=0)
    start, stop = (r * X.size // comm.size for r in (comm.rank, comm.rank + 1))
    with Checkpoints(folder, comm) as checkpoints:
        mine = Sliced(X.shape, {(start, stop): X.ravel()[start:stop]})
        checkpoints.save(4, replicated=3, sharded={"m": mine, "step": np.array(7)})
    for size in range(comm.size, 0, -1):
        part = comm.split(0 if comm.rank < size else None)
        if part is not None:
            with part, Checkpoints(folder, part) as checkpoints:
                saved = checkpoints.load()
                found = whole(saved.sharded)
                assert (saved.step, saved.size, found["step"]) == (4, comm.size, 7)
                assert len(saved.sharded["m"].pieces) == comm.size
                assert np.array_equal(found["m"], X)


def test_what_older_versions_have_saved_is_loaded(comm, tmp_path):
    torch = needed("torch")
    import mpiring.torch
    from mpiring.numpy import DataParallel
    from mpiring.optim import AdamW
    folder = comm.broadcast_object(tmp_path / "run", root=0)
    if comm.rank == 0:
        shutil.copytree(OLD, folder)
    comm.barrier()
    with mpiring.torch.Checkpoints(folder, comm) as checkpoints:
        saved = checkpoints.load()
        model = mpiring.torch.DataParallel(torch.nn.Sequential(
            torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)), comm)
        model.load_state_dict(saved.replicated["weights"])
        optimizer = mpiring.torch.Sharded(torch.optim.AdamW, model, lr=0.1)
        optimizer.load_state_dict(saved.sharded["torch"])
        dp = DataParallel({name: x.numpy() for name, x in saved.replicated["weights"].items()},
                          comm)
        adam = AdamW(dp, lr=0.1, sharded=True)
        adam.load_state_dict(saved.sharded["numpy"])
    state = optimizer.state_dict()["state"]
    for number, vectors in saved.replicated["torch"]["state"].items():
        assert all(torch.equal(state[number][name], x) for name, x in vectors.items())
    state = adam.state_dict()["tensors"]
    for name, vectors in saved.replicated["numpy"]["tensors"].items():
        assert all(np.array_equal(state[name][vector], x) for vector, x in vectors.items())
