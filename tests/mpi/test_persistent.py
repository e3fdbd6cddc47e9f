"""Tests persistent operations: made once, started again and again."""

import gc
import itertools
import weakref

import contract
import numpy as np
import pytest
from mpi4py import MPI

import mpiring

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module", params=["auto", "mixed", "private"])
def comm(request):
    """Communicators whose ranks run rounds in one way, or each in its own; without shared memory.
    """
    how = ("python", "off", "auto")[MPI.COMM_WORLD.rank % 3]
    config = mpiring.Config(rounds=how if request.param == "mixed" else "auto",
                            shared_memory=request.param != "private")
    with mpiring.Communicator(MPI.COMM_WORLD, config=config) as comm:
        yield comm


def test_allreduce(comm):
    """Of what fits into a slot, and is just too long for it."""
    lengths, cases = ((0, 0), (0, 1), (16 << 10, 0), (16 << 10, 1)), (
        ("sum", "float32"), ("mean", "float16"), ("max", "int16"), ("bxor", "bool"),
        ("sum", "complex128"))
    for turn, ((nbytes, more), (op, dtype)) in enumerate(itertools.product(lengths, cases)):
        n = nbytes // np.dtype(dtype).itemsize + more
        x = comm.empty(n, dtype) if turn % 2 else np.empty(n, dtype)
        operation = comm.persistent_allreduce(x, op=op)
        for begin, end in [(lambda: None, operation)] * 2 + [
                (operation.start, operation.wait)] * 2:
            x[...] = contract.contribution(comm.rank, n, dtype)
            begin()
            assert end() is x
            contract.check(x, comm.size, op)


@pytest.mark.parametrize(("dtype", "n"), [("float32", 100_000), ("float64", 3000), ("bool", 1)])
def test_the_other_collectives(comm, dtype, n):
    p, rank = comm.size, comm.rank
    x, y, z = np.empty(7), np.empty((2, 4), np.int32), np.empty(n, dtype)
    scatter = comm.persistent_reduce_scatter(x, op="max")
    gather, copy = comm.persistent_allgather(y), comm.persistent_broadcast(z, root=p - 1)
    own_slice = slice(rank * 8 // p, (rank + 1) * 8 // p)
    for step in range(5):
        x[:], y[...], z[:] = np.arange(7) + rank + step, -1, rank + step
        y.reshape(-1)[own_slice] = np.arange(8)[own_slice] + step
        if (step + rank) % 2:
            for operation in (scatter, gather, copy):
                operation.start()
            chunk, all_of_it, copied = scatter.wait(), gather.wait(), copy.wait()
        else:
            chunk, all_of_it, copied = scatter(), gather(), copy()
        own = slice(rank * 7 // p, (rank + 1) * 7 // p)
        assert np.array_equal(chunk, (np.arange(7) + p - 1 + step)[own])
        assert chunk.base is x and all_of_it is y and copied is z
        assert np.array_equal(y.reshape(-1), np.arange(8) + step)
        assert (z == np.array(p - 1 + step).astype(dtype)).all()


def test_mistakes(comm):
    x = np.zeros((2, 3))
    operation = comm.persistent_allreduce(x)
    with pytest.raises(mpiring.ConfigError, match=r"persistent operation \d+>: call start\(\)"):
        operation.wait()
    operation.start()
    for again in (operation.start, operation):
        with pytest.raises(mpiring.ConfigError, match=r", started>: call wait\(\) first"):
            again()
    assert operation.wait() is x
    with pytest.raises(mpiring.ConfigError, match="op='median'"):
        comm.persistent_allreduce(x, op="median")
    with pytest.raises(mpiring.ConfigError, match="root"):
        comm.persistent_broadcast(x, root=comm.size)


@pytest.mark.parametrize("n", [6, 60_000])
def test_it_is_of_the_memory_not_of_the_array(comm, n):
    x = np.zeros((2, n // 2), np.float32)
    operation, y = comm.persistent_allreduce(x, op="max"), x.reshape(-1)
    copy = comm.persistent_broadcast(x)
    for change in (lambda: None, lambda: setattr(x, "shape", (n,)), lambda: x.setflags(write=False),
                   lambda: setattr(x, "dtype", "i4")):
        change()
        y[:] = comm.rank
        assert operation() is x and (y == comm.size - 1).all()
        y[:] = comm.rank
        operation.start()
        assert operation.wait() is x and (y == comm.size - 1).all()
        y[:] = comm.rank + 1
        copy()
        assert (y == 1).all()


def test_it_keeps_its_array_and_its_communicator():
    comm = mpiring.Communicator(MPI.COMM_WORLD)
    x = np.ones(4, np.float32)
    alive, operation = weakref.ref(x), comm.persistent_allreduce(x)
    group = comm._group
    del x, comm
    gc.collect()
    assert (operation() == group.size).all() and alive() is not None
    group.close()
    for call in (operation, operation.start):
        with pytest.raises(mpiring.ClosedError):
            call()
    del operation, call
    gc.collect()
    assert alive() is None


def test_they_match_each_other_only(breakable):
    if MPI.COMM_WORLD.size == 1:
        pytest.skip(reason="there is no other rank")
    for wrong in ("other", "ordinary", "making"):
        comm = breakable()
        x, first = np.ones(3), comm.rank == 0
        a, b = comm.persistent_allreduce(x), comm.persistent_allreduce(x)
        a()
        b()
        with pytest.raises(mpiring.BufferMismatchError, match="persistent"):
            if wrong == "making":
                comm.persistent_allreduce(x, op="sum" if first else "max")
            elif wrong == "other":
                a() if first else b()
            else:
                a() if first else comm.allreduce(x)
        assert (x == comm.size ** 2).all()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_vectors_in_windows(comm, dtype):
    """In place, where all ranks have compiled code; the engine's operations mix with rounds."""
    for n in (4 << 10, 32 << 10, 300 << 10):
        n //= np.dtype(dtype).itemsize
        # All ranks' at other offsets.
        memory = comm.empty(2 * n, dtype)
        x, y = memory[comm.rank:comm.rank + n + 3], np.empty(n + 3, dtype)
        op = "mean" if dtype == "float32" else "sum"
        operation, copied = (comm.persistent_allreduce(v, op=op) for v in (x, y))
        for step in range(6):
            for v, run in ((x, operation), (y, copied)):
                v[...] = contract.contribution(comm.rank, n + 3, dtype)
                if (step + comm.rank) % 3:
                    assert run() is v
                else:
                    run.start()
                    assert run.wait() is v
                contract.check(v, comm.size, op)
            sums = comm.allgather_object((x.tobytes(), y.tobytes()))
            assert len(set(sums)) == 1
        on_some = memory[:n] if comm.rank else np.empty(n, dtype)
        mixed = comm.persistent_allreduce(on_some)
        for _ in range(3):
            on_some[...] = comm.rank
            assert (mixed() == comm.size * (comm.size - 1) // 2).all()
