"""Tests collectives on short vectors of a GPU, which run on the host between two copies."""

import functools
import threading
import time
from types import SimpleNamespace

import contract
import counting
import cupy_or_host
import numpy as np
import pytest
import simulated_gpu
from mpi4py import MPI

import mpiring
from mpiring.operations.on_device import TUNING

pytestmark = pytest.mark.mpi

if MPI.COMM_WORLD.size == 1:
    pytest.skip(reason="there is no other rank", allow_module_level=True)

LIMIT = TUNING.host_bytes
# The first call of a Prepared takes the general path, and the later ones are fast.
TWICE = 2


@pytest.fixture(scope="module", params=["simulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu(request):
    """Return one GPU, because a communicator keeps memory for each GPU that it has used.

    It is simulated, or NVIDIA's through CuPy.
    """
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "simulated":
            yield simulated_gpu.installed(patch)
        else:
            yield SimpleNamespace(put=cupy_or_host.installed(patch).asarray)


def skip_unless_simulated(gpu):
    if not hasattr(gpu, "gpu"):
        pytest.skip(reason="only the simulated GPU shows what it does")


@pytest.fixture(scope="module", params=["auto", "mixed"])
def comm(request):
    """Communicators whose ranks run fast calls in one way, or each in its own."""
    how = ("python", "off", "auto")[MPI.COMM_WORLD.rank % 3]
    config = mpiring.Config(rounds=how if request.param == "mixed" else "auto")
    with mpiring.Communicator(MPI.COMM_WORLD, config=config) as comm:
        yield comm


def calls_of(comm, op="sum"):
    root = comm.size - 1
    return {"allreduce": functools.partial(comm.allreduce, op=op),
            "reduce_scatter": functools.partial(comm.reduce_scatter, op=op),
            "allgather": comm.allgather, "broadcast": functools.partial(comm.broadcast, root=root)}


def test_results_have_the_bits_of_the_host(comm, gpu, request):
    """Around the limit, and with all dtypes; written just before the call, and read just after."""
    lengths = ((0, 0), (0, 1), (0, 7), (16 << 10, 1), (LIMIT, -1), (LIMIT, 0), (LIMIT, 1))
    fixtures = ("auto-simulated", "auto-cuda", "mixed-simulated", "mixed-cuda")
    for op, dtype, (nbytes, more), own in contract.cases(lengths, fixtures):
        if own != request.node.callspec.id:
            continue
        # GPUs have no long double.
        dtype = "float64" if dtype == "longdouble" else dtype
        n = nbytes // np.dtype(dtype).itemsize + more
        for kind, call in calls_of(comm, op).items():
            if kind in ("allgather", "broadcast") and op != "sum":
                continue
            x, y = contract.contribution(comm.rank, n, dtype), gpu.put(np.zeros(n, dtype))
            want = x.copy()
            part = call(want)
            for _ in range(TWICE):
                y.set(x)
                got = call(y)
                assert got.shape == part.shape and got.get().tobytes() == part.tobytes()
            assert type(got) is type(y) and (got is y) == (kind != "reduce_scatter")


@pytest.mark.parametrize("n", [0, 5, 20_000])
def test_each_rank_may_start_the_call_or_wait_in_it(comm, gpu, n):
    x, y = (gpu.put(np.zeros(n, np.float32)) for _ in range(2))
    total, chunk = comm.persistent_allreduce(y), comm.persistent_reduce_scatter(y)
    copied = comm.persistent_broadcast(y, root=1)
    own = slice(comm.rank * n // comm.size, (comm.rank + 1) * n // comm.size)
    want = np.arange(n, dtype=np.float32) * comm.size + sum(range(comm.size))
    for turn in range(12):
        mine = np.arange(n, dtype=np.float32) + comm.rank
        x.set(mine)
        if (turn + comm.rank) % 2:
            assert comm.allreduce(x) is x
        else:
            handle = comm.iallreduce(x)
            assert handle.wait() is x
        assert np.array_equal(x.get(), want)
        for operation, result, part in [(total, want, slice(None)), (chunk, want, own),
                                        (copied, np.arange(n) + 1, slice(None))]:
            y.set(mine)
            if (turn + comm.rank) % 2:
                operation.start()
                got = operation.wait()
            else:
                got = operation()
            assert np.array_equal(got.get(), result[part])


def test_many_are_started_among_others(comm, gpu):
    xs = [gpu.put(np.full(100 + i, comm.rank + i, np.int64)) for i in range(6)]
    handles = [comm.iallreduce(x) for x in xs]
    y = gpu.put(np.arange(3.0) + comm.rank)
    comm.allreduce(y, op="max")
    for i in reversed(range(6)):
        assert (handles[i].wait().get() == sum(range(comm.size)) + i * comm.size).all()
    assert (y.get() == np.arange(3.0) + comm.size - 1).all()


def test_memory_of_the_node_makes_no_difference(comm, gpu):
    """Only some ranks pass an array from `comm.empty`, in turn."""
    shared, private = comm.empty(1000, device="cuda"), gpu.put(np.zeros(1000, np.float32))
    for turn in range(4):
        x = shared if (turn + comm.rank) % 2 else private
        x[...] = comm.rank + turn
        comm.allreduce(x, op="max")
        assert (x.get() == comm.size - 1 + turn).all()


def test_orders_are_compared_and_gaps_refused(comm, gpu):
    x = gpu.put(np.arange(12.0).reshape(3, 4))
    for _ in range(TWICE):
        for y in (x, x.T):
            y[...] = 1.0
            part = comm.reduce_scatter(y)
            assert part.ndim == 1 and (part.get() == comm.size).all()
        wide = gpu.put(np.zeros((3, 8)))
        with pytest.raises(mpiring.ConfigError, match="not contiguous"):
            comm.allreduce(wide[:, ::2])


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("wrong", ["host", "length", "order", "op", "kind"])
def test_ranks_that_differ_are_refused(breakable, gpu, wrong, first):
    """At the first call, or after calls that agreed."""
    comm = breakable()
    x = gpu.put(np.ones((4, 5), np.float32))
    for _ in range(first):
        comm.allreduce(x)
    calls = {"host": lambda: comm.allreduce(np.ones((4, 5), np.float32)),
             "length": lambda: comm.allreduce(gpu.put(np.ones((4, 6), np.float32))),
             "order": lambda: comm.allreduce(gpu.put(np.ones((5, 4), np.float32)).T),
             "op": lambda: comm.allreduce(x, op="max"), "kind": lambda: comm.broadcast(x)}
    with pytest.raises(mpiring.BufferMismatchError) as error:
        calls[wrong]() if comm.rank == 0 else comm.allreduce(x)
    assert "rank 0 called" in str(error.value)
    if first or wrong != "host":
        assert "float32 (4, 5) on a GPU" in str(error.value)


def test_an_op_that_the_dtype_lacks_is_refused_before_ranks_wait(comm, gpu):
    for call in (comm.allreduce, comm.reduce_scatter, comm.persistent_allreduce):
        with pytest.raises(mpiring.ConfigError, match="complex"):
            call(gpu.put(np.ones(3, np.complex64)), op="max")
    with pytest.raises(mpiring.ConfigError, match="root"):
        comm.broadcast(gpu.put(np.ones(3)), root=comm.size)
    with pytest.raises(mpiring.ConfigError, match="op="):
        comm.allreduce(gpu.put(np.ones(3)), op=[])


def test_a_late_rank(comm, gpu):
    x = gpu.put(np.ones(50))
    for turn in range(3):
        x[...] = comm.rank
        if comm.rank == turn % comm.size:
            time.sleep(0.2)
        comm.allreduce(x)
        assert (x.get() == sum(range(comm.size))).all()


def test_streams_take_turns(comm, gpu, monkeypatch):
    """A result may still be on its way on one stream when a call on another one begins."""
    skip_unless_simulated(gpu)
    monkeypatch.setattr(gpu.gpu, "current", 0)
    xs = [gpu.put(np.zeros(300)) for _ in gpu.gpu.streams]
    # All were written on the first stream.
    gpu.gpu.user.synchronize()
    for turn in range(60):
        for gpu.gpu.chosen, x in enumerate(xs):
            x[...] = comm.rank + turn
            comm.allreduce(x)
        for gpu.gpu.chosen, x in enumerate(xs):
            assert (x.get() == sum(range(comm.size)) + turn * comm.size).all()


def test_threads_call_at_the_same_time(comm, gpu):
    parts, errors = [comm.split(0) for _ in range(2)], []

    def train(part, base):
        try:
            x = gpu.put(np.zeros(300))
            for turn in range(100):
                x[...] = part.rank + turn + base
                part.allreduce(x)
                assert (x.get() == sum(range(part.size)) + (turn + base) * part.size).all()
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=train, args=(part, 1000 * base))
               for base, part in enumerate(parts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for part in parts:
        part.close()


def test_only_what_is_needed_is_copied(comm, gpu, monkeypatch):
    skip_unless_simulated(gpu)
    copies = []
    for name in ("download", "upload"):
        real = getattr(simulated_gpu.Stream, name)
        monkeypatch.setattr(simulated_gpu.Stream, name, lambda *args, name=name, real=real: (
            copies.append(name), real(*args))[1])
    x = gpu.put(np.ones(10))
    for call, want in [(comm.broadcast, ["upload"] if comm.rank else ["download"]),
                       (comm.allreduce, ["download", "upload"])]:
        for _ in range(3):
            copies.clear()
            call(x)
            assert copies == want


def test_pinned_memory_is_used_again(comm, gpu, monkeypatch):
    skip_unless_simulated(gpu)
    asked, pinned = [], gpu.gpu.pinned
    monkeypatch.setattr(gpu.gpu, "pinned", lambda nbytes: asked.append(nbytes) or pinned(nbytes))
    x = gpu.put(np.ones(100))
    for _ in range(200):
        comm.allreduce(x, op="max")
        x.get()
    assert len(asked) <= 4


class Foreign:
    """An array of a package that is not known here."""

    def __init__(self, x, stream):
        self.shape = x.shape
        self.__cuda_array_interface__ = {
            "shape": x.shape, "typestr": x.dtype.str, "version": 3, "stream": stream,
            "data": (x.data.ptr, False)}


@pytest.fixture
def cupy(monkeypatch):
    """Return CuPy, whose GPU is the host if there is no other."""
    return cupy_or_host.installed(monkeypatch)


@pytest.mark.gpu
def test_each_rank_may_have_arrays_of_another_package(comm, cupy):
    total = sum(range(comm.size))
    for turn in range(6):
        x = cupy.asarray(np.full(10, float(comm.rank)))
        y = [x, Foreign(x, None), Foreign(x, 1)][(turn + comm.rank) % 3]
        assert comm.allreduce(y) is y and (x.get() == total).all()
        part = comm.reduce_scatter(y)
        assert type(part) is cupy.ndarray and (part.get() == comm.size * total).all()


@pytest.mark.gpu
@pytest.mark.skipif(not counting.HAS_CODE, reason="without compiled code, ranks poll in Python")
def test_a_short_call_is_a_few_functions(cupy):
    with mpiring.Communicator(MPI.COMM_WORLD, config=mpiring.Config()) as comm:
        comm.prepare()
        x = cupy.asarray(np.ones(1024, np.float32))
        operation = comm.persistent_allreduce(x)
        for kind, call in {**calls_of(comm), "persistent": lambda x: operation()}.items():
            assert counting.runs_at_most(comm, 90, functools.partial(call, x)), kind
