"""Tests that what all ranks have saved in slices is loaded by fewer of them, over real MPI."""

import numpy as np
import pytest

from mpiring.numpy import Checkpoints
from mpiring.resilience import Sliced, whole

pytestmark = pytest.mark.mpi

X = np.arange(1003, dtype=np.float32).reshape(17, 59)


def test_fewer_ranks_go_on_from_slices(comm, tmp_path):
    folder = comm.broadcast_object(tmp_path / "run", root=0)
    start, stop = (r * X.size // comm.size for r in (comm.rank, comm.rank + 1))
    with Checkpoints(folder, comm) as checkpoints:
        own_slice = Sliced(X.shape, {(start, stop): X.ravel()[start:stop]})
        checkpoints.save(4, replicated=3, sharded={"m": own_slice, "step": np.array(7)})
    for size in range(comm.size, 0, -1):
        part = comm.split(0 if comm.rank < size else None)
        if part is not None:
            with part, Checkpoints(folder, part) as checkpoints:
                saved = checkpoints.load()
                joined = whole(saved.sharded)
                assert (saved.step, saved.size, joined["step"]) == (4, comm.size, 7)
                assert len(saved.sharded["m"].pieces) == comm.size
                assert np.array_equal(joined["m"], X)
