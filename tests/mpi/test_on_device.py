"""Tests the communicator on vectors in GPU memory, across real ranks."""

import contract
import numpy as np
import pytest
import simulated_gpu

import mpiring
from mpiring import ConfigError, ReplicaError, reducers
from mpiring.numpy import DataParallel

pytestmark = pytest.mark.mpi


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
    bounds = [rank * 102 // comm.size for rank in (comm.rank, comm.rank + 1)]
    for order in "CF":
        rows = gpu.put(np.arange(102.0).reshape(3, 34))
        y = rows if order == "C" else rows.T
        part = comm.reduce_scatter(y)
        assert type(part) is type(y) and part.shape == (bounds[1] - bounds[0],)
        assert np.array_equal(part.get(), comm.size * np.arange(*bounds))
        comm.allgather(y)
        assert np.array_equal(rows.get().ravel(), comm.size * np.arange(102.0))


def test_persistent_operations(comm, gpu):
    x = gpu.put(np.zeros(1000, np.float32))
    total, chunk = comm.persistent_allreduce(x), comm.persistent_reduce_scatter(x)
    for step in range(3):
        want = comm.size * step + comm.size * (comm.size - 1) // 2
        x[...] = comm.rank + step
        total.start()
        assert total.wait() is x and (x.get() == want).all()
        x[...] = comm.rank + step
        assert (chunk().get() == want).all()


def test_empty(comm, gpu):
    x = comm.empty((3, 50), "float64", device="cuda")
    assert x.shape == (3, 50) and x.dtype == "float64"
    x[...] = comm.rank
    comm.allreduce(x, op="max")
    assert (x.get() == comm.size - 1).all()
    assert comm.empty((0, 3), device="cuda").shape == (0, 3)


def test_what_cannot_work_is_told(comm, gpu):
    with pytest.raises(ConfigError, match="not contiguous"):
        comm.allreduce(gpu.put(np.zeros((4, 4)))[:, 1])
    with pytest.raises(ConfigError, match="native"):
        comm.allreduce(gpu.put(np.zeros(4)), algorithm="native")
    with pytest.raises(ConfigError, match="'b' is on the CPU, but 'a' on .*GPU"):
        DataParallel({"a": gpu.put(np.zeros(3)), "b": np.zeros(3)}, comm)


SHAPES = {"w1": (20, 30), "b1": (30,), "w2": (30, 10), "b2": (10,), "scale": ()}
# tests/reducers tries more of them.
REDUCERS = {"mean": lambda: None, "onebit": lambda: reducers.OneBit(warmup_steps=2),
            "some": lambda: {"w*": reducers.PowerSGD(start_step=1)},
            "adasum": reducers.Adasum}


def trained(comm, put, get, reducer, steps=6):
    """Train something, and return the parameters and the means of all steps."""
    random = np.random.default_rng(1)
    params = {name: put(random.random(shape).astype("float32")) for name, shape in SHAPES.items()}
    dp = DataParallel(params, comm, bucket_bytes=1500, reducer=reducer)
    means = []
    for number in range(steps):
        random = np.random.default_rng([number, comm.rank])
        if number % 2:
            dp.weigh((number + comm.rank) % 3)
        for name, shape in reversed(SHAPES.items()):
            dp.grads[name][...] = put(random.random(shape).astype("float32"))
            dp.ready(name)
        dp.wait()
        assert dp.finite
        for name, x in params.items():
            means.append(get(dp.grads[name]).copy())
            x[...] = put(get(x) - means[-1])
    dp.compare_replicas()
    return [*map(get, params.values()), *means]


@pytest.mark.parametrize(("nodes", "reducer"), [
    # On one node nothing is compressed.
    ("one", "mean"), ("one", "some"), ("one", "adasum"),
    *(("each", reducer) for reducer in REDUCERS)])
def test_training_is_that_on_the_host(comm, apart, gpu, reducer, nodes):
    if nodes == "each":
        if comm.size > 2 and isinstance(gpu, simulated_gpu.SimulatedDevice):
            pytest.skip(reason="takes long; see tests/reducers/test_on_gpus.py")
        comm = apart
    host = trained(comm, lambda x: x, lambda x: x, REDUCERS[reducer]())
    on_gpu = trained(comm, gpu.put, lambda x: x.get(), REDUCERS[reducer]())
    for x, y in zip(host, on_gpu, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)


def test_ranks_with_and_without_cupy_are_refused(comm, breakable, monkeypatch):
    """Their schedules differ; so that a rank names its way with its first operation there."""
    if comm.size == 1:
        pytest.skip(reason="there is no other rank")
    gpu = simulated_gpu.installed(monkeypatch)
    monkeypatch.setattr(gpu.gpu, "programmable", comm.rank > 0)
    with pytest.raises(mpiring.BufferMismatchError) as error:
        breakable().allreduce(gpu.put(np.ones(3)))
    assert "with CuPy" in str(error.value) and "with PyTorch alone" in str(error.value)


def test_a_nan_is_told_of(comm, gpu):
    dp = DataParallel({name: gpu.put(np.zeros(3)) for name in "ab"}, comm)
    for number in range(3):
        for name in "ba":
            dp.grads[name][...] = np.nan if name == "a" and comm.rank == comm.size - 1 else 1.0
            dp.ready(name)
        dp.wait()
        assert not dp.finite
        # From the second step on, all look before gradients leave.
        assert dp.nonfinite == ({comm.size - 1: ["a"]} if number else {})


def test_replicas_that_differ_are_restored(comm, gpu):
    if comm.size < 3:
        return
    x = gpu.put(np.zeros(300))
    dp = DataParallel({"x": x}, comm)
    if comm.rank == 1:
        x[7] = 1.0
    with pytest.raises(ReplicaError, match="rank 1 on .* differs from ranks 0, 2.* in x"):
        dp.compare_replicas()
