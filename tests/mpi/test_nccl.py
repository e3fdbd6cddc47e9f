"""Tests collectives by NCCL across real ranks, with a library of the tests that does the same."""

from dataclasses import replace

import cupy_or_host
import fake_nccl
import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import mpiring
from mpiring.gpu import nccl
from mpiring.gpu.arrays import vector_of
from mpiring.operations import nccl as operations_nccl
from mpiring.operations.agreement import Call
from mpiring.numpy import DataParallel
from mpiring.operations.on_device import TUNING

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(
    cupy_or_host.REAL, reason="the library of the tests works in host memory")]


@pytest.fixture
def library(gpu, monkeypatch):
    return fake_nccl.installed(monkeypatch, getattr(gpu, "gpu", None))


@pytest.fixture(params=["a node", "nodes"])
def comm_by_nccl(request, comm, library, gpu):
    """A communicator that uses NCCL, on a node, or on nodes of one rank."""
    one = request.param == "a node"
    config = mpiring.Config(nccl="yes", shared_memory=one, tuning=False, gpu_aware="no")
    with mpiring.Communicator(MPI.COMM_WORLD, config=config) as communicator:
        yield communicator


def algorithm(comm):
    """Return the algorithm of the last operation."""
    return comm._group.recorder._flights[-1].algorithm


@pytest.mark.parametrize("n", [70_000, 300_001])
def test_allreduce(comm_by_nccl, gpu, n):
    """What NCCL combines, and what ranks combine that get their parts by NCCL."""
    comm, combine = comm_by_nccl, {
        "mean": np.add, "sum": np.add, "max": np.maximum, "prod": np.multiply}
    for name, op in (("float32", "mean"), ("float64", "sum"), ("float16", "mean"),
                     ("bfloat16", "sum"), ("int64", "max"), ("int16", "sum"), ("float32", "max"),
                     ("complex64", "mean"), ("uint8", "prod"), ("bool", "max")):
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        xs = [np.random.default_rng(rank).integers(0, 2 if name == "bool" else 9, n).astype(dtype)
              for rank in range(comm.size)]
        if (name, op) == ("float32", "max"):
            xs[0][5] = np.nan
        x = gpu.put(xs[comm.rank])
        comm.allreduce(x, op=op)
        wide = [x.astype(np.float32) if name.endswith("float16") else x for x in xs]
        want = combine[op].reduce(wide, dtype=wide[0].dtype)
        if op == "mean":
            want = want / want.dtype.type(comm.size)
        assert np.array_equal(
            x.get(), want.astype(dtype), equal_nan=dtype.kind == "f"), (name, op)
        if comm.size > 1 and x.nbytes > TUNING.host_bytes:
            assert algorithm(comm) == "nccl"


def test_other_collectives(comm_by_nccl, gpu):
    """With slices of equal and other lengths, and of no elements; from each root."""
    comm, p = comm_by_nccl, comm_by_nccl.size
    for n in (p * 30_000, 90_001, p - 1 or 1):
        want = np.arange(n, dtype=np.float64)
        x = gpu.put(want * (comm.rank + 1))
        part = comm.reduce_scatter(x, op="sum")
        bounds = [r * n // p for r in range(p + 1)]
        own = want[bounds[comm.rank]:bounds[comm.rank + 1]]
        assert np.array_equal(part.get(), own * (p * (p + 1) // 2)), n
        comm.allgather(x)
        assert np.array_equal(x.get(), want * (p * (p + 1) // 2)), n
        for root in range(p):
            x = gpu.put(want + comm.rank)
            comm.broadcast(x, root=root)
            assert np.array_equal(x.get(), want + root), n


def test_bytes_between_nodes_are_counted(comm_by_nccl, gpu):
    """As those of MPI's collectives; for 16 bits, those of the messages."""
    comm = comm_by_nccl
    for dtype in (np.float32, np.float16):
        x = gpu.put(np.zeros(comm.size * 40_000, dtype))
        share = x.nbytes * (len(comm.memory_groups) - 1) // comm.size
        for call, sent in ((comm.allreduce, 2 * share), (comm.reduce_scatter, share),
                           (comm.allgather, share), (comm.broadcast, share)):
            before = comm.statistics.bytes_sent
            call(x)
            assert sent <= comm.statistics.bytes_sent - before <= 1.01 * sent, (call, dtype)


def test_what_reducers_and_the_back_end_call(comm_by_nccl, gpu):
    comm, p, r = comm_by_nccl, comm_by_nccl.size, comm_by_nccl.rank

    def run(build, arrays):
        vectors = [vector_of(x) for x in arrays]
        own = comm.own_device(vectors[0].device)
        events = [x.ready for x in vectors]
        vectors = [replace(x, device=own, ready=None) for x in vectors]
        comm.run(Call("a test", build.__name__), lambda collectives: build(collectives, vectors),
                 device=own, ready=events)
        return [x.get() for x in arrays]

    def chunks(scale, n=70_000):
        return [gpu.put(np.full(n + rank, scale * p + rank, np.float16)) for rank in range(p)]

    def all_to_all(collectives, xs):
        return collectives.all_to_all(xs[:p], xs[p:])

    receives = [gpu.put(np.zeros(50_000 + rank + r)) for rank in range(p)]
    got = run(all_to_all, [*(gpu.put(np.full(50_000 + rank + r, 10.0 * r + rank))
                             for rank in range(p)), *receives])[p:]
    assert all((x == 10 * rank + r).all() for rank, x in enumerate(got))

    def reduce_scatter_chunks(collectives, xs):
        return collectives.reduce_scatter_chunks(xs, op="mean")

    got = run(reduce_scatter_chunks, chunks(r))
    assert (got[r] == np.float16(sum(range(p)) + r)).all()

    def allgather_chunks(collectives, xs):
        return collectives.allgather_chunks(xs)

    got = run(allgather_chunks, chunks(r))
    assert all((x == rank * p + rank).all() for rank, x in enumerate(got))

    def reduce(collectives, xs):
        return collectives.reduce(xs[0], p - 1, op="max")

    (got,) = run(reduce, [gpu.put(np.full(400_000, r))])
    assert (got == (p - 1 if r == p - 1 else r)).all()

    def gather(collectives, xs):
        return collectives.gather(xs[0], xs[1:], 0)

    got = run(gather, [gpu.put(np.full(60_000, r)), *(gpu.put(np.zeros(60_000, int))
                                                      for _ in range(p))])
    assert r or all((x == rank).all() for rank, x in enumerate(got[1:]))

    def scatter(collectives, xs):
        return collectives.scatter(xs[1:], xs[0], p - 1)

    got = run(scatter, [gpu.put(np.zeros(60_000, int)), *(gpu.put(np.full(60_000, 7 * rank))
                                                          for rank in range(p))])
    assert (got[0] == 7 * r).all()


@pytest.mark.parametrize("variable, value, text", [
    ("FAKE_NCCL_VERSION", "22703", "has NCCL 2.28.9|has 2.27.3"),
    ("FAKE_NCCL_NO_ID", "", "rank 0: ncclGetUniqueId: a fault: in a test"),
    ("FAKE_NCCL_NO_INIT", "", "rank {}: ncclCommInitRank: a fault: in a test"),
    ("FAKE_NCCL_HANGS", "", "rank {}: ncclCommInitRank has not returned in 1 s"),
    ("", "", "rank {} cannot use NCCL: no NCCL: .*pip install nvidia-nccl")])
def test_one_rank_cannot(comm, gpu, library, monkeypatch, variable, value, text):
    """All ranks raise an error that names it, or go on without NCCL."""
    if comm.size == 1:
        pytest.skip(reason="one rank uses no NCCL")
    bad = 0 if variable == "FAKE_NCCL_NO_ID" else comm.size - 1
    if variable == "FAKE_NCCL_HANGS":
        monkeypatch.setattr(operations_nccl, "_CREATION_S", 1.0)
    if comm.rank == bad and variable:
        monkeypatch.setenv(variable, value)
    elif comm.rank == bad:
        monkeypatch.setattr(nccl, "_candidates", lambda: ["/nowhere/libnccl.so.2"])
    for setting in ("yes", "auto"):
        config = mpiring.Config(nccl=setting, shared_memory=False, tuning=False, gpu_aware="no")
        with mpiring.Communicator(MPI.COMM_WORLD, config=config) as communicator:
            x = gpu.put(np.full(100_000, comm.rank, np.float32))
            if setting == "yes":
                with pytest.raises(mpiring.ConfigError, match=text.replace("{}", str(bad))):
                    communicator.allreduce(x)
            else:
                communicator.allreduce(x)
                assert (x.get() == sum(range(comm.size))).all()
                assert algorithm(communicator) != "nccl"


def test_steps_wait_for_no_gpu(comm_by_nccl, gpu, monkeypatch):
    """Between nodes, too, where a rank learns from its own GPU whether all means are finite."""
    if comm_by_nccl.size == 1:
        pytest.skip(reason="there is no other rank")
    comm, xp = comm_by_nccl, gpu
    for dtype in (np.float32, np.float16):
        dp = DataParallel({name: xp.put(np.zeros(400, dtype)) for name in "abc"}, comm,
                          bucket_bytes=900)
        checks = []
        monkeypatch.setattr(dp.gradients, "_checked_means", checks.append)
        for number in range(8):
            for name in "cba":
                dp.grads[name][...] = xp.put(np.full(400, number + comm.rank, dtype))
                if number == 5 and name == "b" and comm.rank == 0:
                    dp.grads[name][7] = np.inf
                dp.ready(name)
            dp.wait()
            if number == 5:
                assert not dp.finite and not np.isfinite(dp.grads["b"].get()[7])
                break
            if number % 2:
                assert dp.finite
        mean = dtype(number + (comm.size - 1) / 2)
        assert not checks and (dp.grads["c"].get() == mean).all()
