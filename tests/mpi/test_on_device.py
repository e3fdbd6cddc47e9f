"""Tests the face on vectors in a GPU's memory, across real ranks, on a simulated GPU."""

import contract
import numpy as np
import pytest
import simulated_gpu

from mpiring import ConfigError
from mpiring.memory.device import vector_of

pytestmark = pytest.mark.mpi


@pytest.fixture
def gpu(monkeypatch):
    """Let arrays of a simulated GPU be taken for CuPy's."""
    return simulated_gpu.installed(monkeypatch)


@pytest.mark.parametrize("algorithm", ["auto", "ring", "direct"])
def test_allreduce(comm, gpu, algorithm):
    for op in contract.OPS:
        for n in (0, 1, 1000, 100_003):
            x = gpu.put(contract.contribution(comm.rank, n, "float32" if op in (
                "sum", "mean", "max", "min", "prod") else "int32"))
            assert comm.allreduce(x, op=op, algorithm=algorithm) is x
            contract.check(x.get(), comm.size, op)


def test_many_under_way(comm, gpu):
    xs = [gpu.put(np.full(50_000 + i, comm.rank + i, "float32")) for i in range(6)]
    handles = [comm.iallreduce(x) for x in xs]
    for i in reversed(range(6)):
        assert handles[i].wait() is xs[i]
        total = sum(rank + i for rank in range(comm.size))
        assert (xs[i].get() == total).all()


def test_other_collectives(comm, gpu):
    x = gpu.put(np.arange(101.0) + 1000 * comm.rank)
    assert comm.broadcast(x, root=comm.size - 1) is x
    assert np.array_equal(x.get(), np.arange(101.0) + 1000 * (comm.size - 1))
    y = gpu.put(np.arange(101.0))
    part = comm.reduce_scatter(y)
    bounds = [rank * 101 // comm.size for rank in (comm.rank, comm.rank + 1)]
    assert np.array_equal(part.get(), comm.size * np.arange(*bounds))
    comm.allgather(y)
    assert np.array_equal(y.get(), comm.size * np.arange(101.0))


def test_empty(comm, gpu):
    x = comm.empty((3, 50), "float64", device="cuda")
    assert x.shape == (3, 50) and x.dtype == "float64"
    x[...] = comm.rank
    comm.allreduce(x, op="max")
    assert (x.get() == comm.size - 1).all()
    assert comm.empty((0, 3), device="cuda").shape == (0, 3)


def test_it_begins_when_the_user_is_ready(comm, gpu):
    x = gpu.put(np.zeros(1000))
    # Queued on the user's stream, and not done yet.
    x[...] = comm.rank + 1.0
    comm.allreduce(x)
    assert (x.get() == comm.size * (comm.size + 1) / 2).all()


def test_what_cannot_work_is_told(comm, gpu):
    with pytest.raises(ConfigError, match="expected cpu, cuda, or cuda: and a number"):
        comm.empty(3, device="gpu")
    with pytest.raises(ConfigError, match="not contiguous"):
        comm.allreduce(gpu.put(np.zeros((4, 4)))[:, 1])
    with pytest.raises(ConfigError, match="native"):
        comm.allreduce(gpu.put(np.zeros(4)), algorithm="native")
    assert vector_of(gpu.put(np.zeros((3, 4)))).size == 12
