"""Tests the communicator's face on real MPI, at any number of ranks."""

import dataclasses
import gc
import glob
import mmap
import os
import resource
import sys
import time
import zlib
from functools import partial
from pathlib import Path

import contract
import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import mpiring
from mpiring import world
from mpiring.collectives import native
from mpiring.collectives.operation import Tuning
from mpiring.data import TokenBatches
from mpiring.numpy import DataParallel
from mpiring.operations.agreement import Call
from mpiring.memory.arrays import bounds_of
from mpiring.transport import waiting
from mpiring.transport.base import LANES
from mpiring.transport.mpi import MpiTransport

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("algorithm", ["auto", "native", "ring", "direct", "shared"])
def test_contract(comm, algorithm):
    sums = []
    for op, dtype, n in contract.cases((0, 1, comm.size - 1, comm.size + 1, 70_001)):
        x = contract.contribution(comm.rank, n, dtype)
        if algorithm == "native" and not native.supports(dtype, op):
            with pytest.raises(mpiring.ConfigError, match="algorithm='native'"):
                comm.allreduce(x, op=op, algorithm=algorithm)
        else:
            assert comm.allreduce(x, op=op, algorithm=algorithm) is x
            contract.check(x, comm.size, op)
            sums.append(zlib.crc32(x.tobytes()))
    assert comm.allgather_object(sums) == [sums] * comm.size, "bits differ"


@pytest.mark.parametrize(("op", "dtype"), [
    ("sum", "float32"), ("mean", ml_dtypes.bfloat16), ("prod", "complex64"), ("min", "int64"),
    ("bxor", "bool")],
    ids=lambda case: case if case in contract.OPS else np.dtype(case).name)
def test_contract_in_node_shared_memory(comm, dtype, op):
    shared, sums = comm.empty(400_000, dtype), []
    for n in (1, comm.size, 5000, 70_001, 400_000):
        for offset in (0, (400_000 - n) // (2 + comm.rank)):
            # All in one window, at equal and at different places; then one rank outside.
            for everybody in (True, False):
                x = shared[offset:offset + n]
                if comm.rank == 0 and not everybody:
                    x = np.empty(n, dtype)
                for _ in range(2):
                    x[...] = contract.contribution(comm.rank, n, dtype)
                    assert comm.allreduce(x, op=op) is x
                    contract.check(x, comm.size, op)
                    sums.append(zlib.crc32(x.tobytes()))
    assert comm.allgather_object(sums) == [sums] * comm.size, "bits differ"


def test_arrays_of_different_windows_shapes_and_orders(comm):
    a, b = comm.empty((30, 1000)), comm.empty((30, 1000))
    x = a if comm.rank % 2 else b
    x[...] = comm.rank
    assert (comm.allreduce(x) == comm.size * (comm.size - 1) / 2).all()
    matrix = comm.empty((300, 100), np.float64).T
    matrix[...] = 1
    assert (comm.allreduce(matrix) == comm.size).all()
    assert comm.empty(0).size == 0 and comm.empty(()).shape == ()
    for x in (np.ones((3, 4, 5), np.float32), np.asfortranarray(np.ones((3, 4))),
              np.array(1.0), np.ones((0, 3)), np.ones(7)[2:5]):
        assert (comm.allreduce(x) == comm.size).all()


def test_windows_are_freed(comm):
    def descriptors():
        # Not those of a process that compiles in the background.
        return sum(os.path.realpath(file).startswith("/memfd:mpiring")
                   for file in glob.glob("/proc/self/fd/*"))

    def mapped_bytes():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * mmap.PAGESIZE

    x = comm.empty(1 << 18)
    del x
    files, before = descriptors(), mapped_bytes()
    for _ in range(400):
        x = comm.empty(1 << 18)
        x[...] = 1
        part = x[1000:]
        del x
        comm.allreduce(part)
        assert (part == comm.size).all(), "a view keeps the window alive"
        del part
    assert descriptors() <= files + 2
    # Machine code may be loaded meanwhile, which maps 160 MiB.
    assert mapped_bytes() < before + 300 * comm.size * (1 << 20)


def test_without_shared_memory(caplog):
    config = mpiring.Config(shared_memory=False)
    with mpiring.init(config=config) as comm:
        x = comm.empty(100_000)
        x[...] = comm.rank
        assert (comm.allreduce(x) == comm.size * (comm.size - 1) / 2).all()
        if comm.size > 1:
            with pytest.raises(mpiring.ConfigError, match="not all ranks share"):
                comm.allreduce(x, algorithm="shared")
        assert comm.allgather_object(comm.rank) == list(range(comm.size))


@pytest.mark.parametrize("shared_memory", [True, False])
def test_ranks_may_wait_at_once_or_later(shared_memory):
    """Between nodes, the first allreduces may tune, which takes all ranks."""
    config = mpiring.Config(shared_memory=shared_memory, tuning=True, tuning_folder="")
    with mpiring.Communicator(MPI.COMM_WORLD, config=config) as comm:
        in_flight, persistent = [], comm.persistent_reduce_scatter(np.ones(comm.size))
        for step in range(comm.size + 3):
            x = np.full(2 + step, comm.rank + 1.0)
            if step % (comm.size + 1) == comm.rank:
                in_flight.append((comm.iallreduce(x), x))
                persistent()
            else:
                in_flight.append((None, comm.allreduce(x)))
                persistent.start()
                persistent.wait()
        for handle, x in in_flight:
            if handle is not None:
                handle.wait()
            assert (x == comm.size * (comm.size + 1) / 2).all()


def test_memory_that_cannot_be_had_becomes_private(comm, caplog):
    """One rank may not open any more files: all of the node take private memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if comm.rank == comm.size - 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    x = comm.empty(1 << 20)
    y = comm.empty(1 << 19)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    x[...] = y[...] = 1
    assert (comm.allreduce(x) == comm.size).all() and (comm.allreduce(y) == comm.size).all()
    said = [record.getMessage() for record in caplog.records if "share" in record.getMessage()]
    if comm.size > 1 and comm.rank == comm.size - 1:
        assert len(said) == 1 and "private memory" in said[0], said
    else:
        assert not said
    # The next one that fits is shared again, under the same number on all ranks.
    z = comm.empty(1000)
    z[...] = comm.rank
    assert (comm.allreduce(z) == comm.size * (comm.size - 1) / 2).all()


@pytest.mark.parametrize(("op", "dtype"), [
    ("sum", "float16"), ("mean", ml_dtypes.bfloat16), ("prod", "float16")])
def test_16_bits_are_rounded_once(comm, dtype, op):
    for n in (1, 1000, 300_001):
        rows = [np.random.default_rng(rank).standard_normal(n).astype(dtype)
                for rank in range(comm.size)]
        want = contract.rounded_once(rows, op)
        assert contract.same_bits(comm.allreduce(rows[comm.rank].copy(), op=op), want)
        start, stop = (r * n // comm.size for r in (comm.rank, comm.rank + 1))
        chunk = comm.reduce_scatter(rows[comm.rank].copy(), op=op)
        assert contract.same_bits(chunk, want[start:stop])


def test_an_operation_that_is_refused_half_made_leaves_no_turn_behind():
    def build(collectives):
        collectives.allreduce(np.ones(3), algorithm="native")
        return collectives.allreduce(np.ones(3), op="avg")

    with mpiring.init(config=mpiring.Config(stall_timeout_s=5)) as comm:
        with pytest.raises(mpiring.ConfigError, match="op='avg'"):
            comm.submit(Call("own"), build)
        for _ in range(3):
            assert (comm.allreduce(np.ones(3), algorithm="native") == comm.size).all()


@pytest.mark.parametrize("algorithm", ["auto", "ring", "direct", "shared", "native"])
def test_elements_at_odd_addresses(comm, algorithm):
    """On the last rank only: the others do not know."""
    for dtype, n in (("float64", 1000), ("float32", 50_000), ("complex64", 1000)):
        packed = np.empty(1 + n * np.dtype(dtype).itemsize, np.uint8)
        x = np.frombuffer(packed.data, dtype, n, offset=comm.rank == comm.size - 1)
        assert x.flags.aligned == (comm.rank < comm.size - 1)
        x[...] = contract.contribution(comm.rank, n, dtype)
        comm.allreduce(x, algorithm=algorithm)
        contract.check(x, comm.size, "sum")


@pytest.mark.parametrize(("x", "remedy"), [
    (np.ones((4, 4))[:, 1], "ascontiguousarray"),
    (np.ones(8)[::-1], "ascontiguousarray"),
    ([1.0, 2.0], "numpy.asarray"),
    (np.array(["text"]), "broadcast_object"),
    (np.array([None]), "broadcast_object"),
    (np.ones(3, ">f4" if np.dtype("<f4").isnative else "<f4"), "astype"),
    (np.ma.masked_array([1.0, 2.0], [True, False]), "filled"),
    (np.broadcast_to(np.ones(1), 1), "copy"),
])
def test_unusable_arrays_are_refused_with_the_remedy(comm, x, remedy):
    with pytest.raises(mpiring.ConfigError, match=remedy):
        comm.allreduce(x)


def test_nan_and_infinity_reach_every_rank(comm):
    for op in ("sum", "mean", "max", "min", "prod"):
        x = np.ones(5, np.float32)
        if comm.rank == comm.size - 1:
            x[2] = np.nan
        comm.allreduce(x, op=op)
        assert np.isnan(x).tolist() == [False, False, True, False, False]
    large = np.array([60000], np.float16)
    assert comm.allreduce(large, op="mean")[0] == pytest.approx(60000, rel=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_slices_of_any_bounds(comm, dtype):
    for n in (1, 1001, 300_000):
        for bounds in (bounds_of(n, comm.size, 16),
                       [0] * comm.size + [n]):
            for x in (np.empty(n, dtype), comm.empty(n, dtype)):
                x[...] = contract.contribution(comm.rank, n, dtype)
                own_slice = comm.run(Call("reduce_scatter", "of slices"), lambda collectives: (
                    collectives.reduce_scatter(x, bounds=bounds)))
                want = contract.expected(comm.size, n, dtype, "sum")
                assert np.array_equal(own_slice, want[bounds[comm.rank]:bounds[comm.rank + 1]])
                comm.run(Call("allgather", "of slices"), lambda collectives: (
                    collectives.allgather(x, bounds=bounds)))
                assert np.array_equal(x, want)


def test_broadcast(comm):
    for root in range(comm.size):
        for n in (0, 1, 1000, 400_000):
            x = np.arange(n, dtype=np.float64) + comm.rank
            assert comm.broadcast(x, root=root) is x
            assert np.array_equal(x, np.arange(n) + root)
    frozen = np.full(3, comm.rank, ml_dtypes.bfloat16)
    frozen.flags.writeable = comm.rank != 0
    assert (comm.broadcast(frozen, root=0) == 0).all()


def test_many_handles_in_any_order(comm):
    arrays = [np.full(n, comm.rank, np.float32) for n in (0, 1, 10, 300_000, 7, 100_000) * 3]
    handles = [comm.iallreduce(x, op="sum" if i % 2 else "max") for i, x in enumerate(arrays)]
    order = np.random.default_rng(comm.rank).permutation(len(handles))
    for i in order:
        assert handles[i].wait() is arrays[i]
        assert handles[i].test()
        total = comm.size * (comm.size - 1) // 2 if i % 2 else comm.size - 1
        assert (arrays[i] == total).all()


def test_blocking_calls_overtake_handles(comm):
    waiting = [comm.iallreduce(np.ones(200_000, np.float32)) for _ in range(5)]
    native = [comm.iallreduce(np.ones(10, np.float32), algorithm="native") for _ in range(5)]
    assert comm.allreduce(np.ones(3))[0] == comm.size
    assert comm.allreduce(np.ones(3), algorithm="native")[0] == comm.size
    comm.barrier()
    assert all((handle.wait() == comm.size).all() for handle in native + waiting)


def test_a_handle_advances_without_waiting(comm):
    handle = comm.iallreduce(np.ones(500_000, np.float32))
    threaded = MPI.Query_thread() == MPI.THREAD_MULTIPLE
    deadline = time.monotonic() + 60
    # With a thread, no call of mpiring's is needed at all.
    while not (handle.complete if threaded else handle.test()):
        np.sort(np.arange(1000.0))
        assert time.monotonic() < deadline
    comm.barrier()


def test_split(comm):
    part = comm.split(comm.rank % 2, key=-comm.rank)
    assert part.size == len(range(comm.rank % 2, comm.size, 2))
    assert part.allgather_object(comm.rank) == sorted(
        range(comm.rank % 2, comm.size, 2), reverse=True)
    # They may be used in different orders.
    first = comm.rank // 2 % 2
    groups = (part, comm)[::1 - 2 * first]
    handles = [group.iallreduce(np.ones(10)) for group in groups for _ in range(5)]
    for handle, group in [*zip(handles, [group for group in groups for _ in range(5)])][::-1]:
        assert (handle.wait() == group.size).all()
    part.close()
    with pytest.raises(mpiring.ConfigError, match="color=-1"):
        comm.split(-1)
    # Colors may be comparisons.
    for color in (comm.rank < 1, np.bool_(comm.rank < 1)):
        part = comm.split(color)
        assert part.size == (1 if comm.rank < 1 else comm.size - 1)
        part.close()
    alone = comm.split(0 if comm.rank == 0 else None)
    assert (alone is None) == (comm.rank != 0)
    if alone is not None:
        assert alone.size == 1
        alone.close()


def test_a_split_keeps_the_order_of_native_collectives(monkeypatch):
    """MPI matches the collectives of a communicator by their order, the same on all ranks."""
    log = []
    # Without a thread, little of what is in the background is done before the split.
    with mpiring.init(config=mpiring.Config(progress="inline")) as comm:
        transport = comm._group._transport
        monkeypatch.setattr(transport, "comm", Logging(transport.comm, log))
        handles = [comm.iallreduce(np.ones(1_000_000, np.float32), algorithm="native")
                   for _ in range(6)]
        comm.split(0).close()
        for handle in handles:
            handle.wait()
        assert log == ["Iallreduce"] * 6 * (comm.size > 1) + ["Split"]


class Logging:
    """An MPI communicator that notes the collectives that it is asked for."""

    def __init__(self, comm, log):
        self._comm, self._log = comm, log

    def __getattr__(self, name):
        if name in ("Iallreduce", "Split"):
            self._log.append(name)
        return getattr(self._comm, name)


class Interrupt(BaseException):
    """Raised as by a signal's handler."""


def interrupted(call, entries):
    """Make a call, but raise on entry of a function of mpiring's: there, signals are noticed.

    Python ignores what a finalizer raises, so none may run inside the call.
    """
    def trace(frame, event, argument):
        nonlocal entries
        if Path(mpiring.__file__).parent in Path(frame.f_code.co_filename).parents:
            entries -= 1
            if entries < 0:
                raise Interrupt

    gc.disable()
    sys.settrace(trace)
    try:
        call()
    except Interrupt:
        return True
    finally:
        sys.settrace(None)
        gc.enable()
    return False


@pytest.mark.parametrize("call", ["allreduce", "iallreduce", "fast", "started fast"])
def test_no_interrupt_takes_an_operation_from_one_rank_unnoticed(comm, monkeypatch, call):
    """Else this rank's next call would meet what is the last call of the others, and hang."""
    monkeypatch.setattr(waiting, "SPINS", 1)
    monkeypatch.setattr(waiting, "YIELDS", 0)
    if comm.size == 1:
        pytest.skip(reason="there is no other rank")
    for entries in range({"iallreduce": 23, "started fast": 8}.get(call, 30)):
        other = mpiring.init(config=mpiring.Config(progress="inline"))
        group, x, before = other._group, np.ones(3), 0
        if "fast" in call:
            for before in (1, 2):
                other.allreduce(x)
        if comm.rank == 0:
            begun = interrupted(lambda: (
                other.iallreduce if call in ("iallreduce", "started fast")
                else other.allreduce)(x), entries)
            # What was started is not waited for.
            most = {"iallreduce": 20, "started fast": 5}.get(call, entries)
            assert begun or entries > most
            if begun and group._counter.sequence > before:
                with pytest.raises(mpiring.TransportError, match="Interrupt"):
                    group.engine.raise_failure()
        # Not close(): that waits for what was begun.
        group.closed = True
        group._unregister()
        group._transport.free()
    comm.barrier()


def test_use_after_close():
    comm, x = mpiring.init(), np.ones(3)
    assert (comm.node_rank, comm.num_nodes) == (0, 1)
    assert (comm.local_rank, comm.local_size) == (comm.rank, comm.size)
    for _ in range(3):
        comm.allreduce(x)
    comm.close()
    comm.close()
    with pytest.raises(mpiring.ClosedError, match="is closed"):
        comm.allreduce(x)
    assert "closed" in repr(comm)


def test_the_default_is_what_init_returned_first_until_that_is_closed(monkeypatch):
    monkeypatch.setattr(world, "_world", None)
    params = {"w": np.full(3, float(MPI.COMM_WORLD.rank))}
    with DataParallel(params).comm as first, mpiring.init() as second:
        assert TokenBatches([1, 2], tokens=4)._comm is first is not second
        assert first.size == MPI.COMM_WORLD.size and (params["w"] == 0).all()
    with mpiring.init() as third:
        assert DataParallel(params).comm is third
    with DataParallel(params).comm as fourth, fourth.split(0) as part:
        world.make_default(part)
        assert DataParallel(params).comm is part


def test_only_intracommunicators():
    for make in (mpiring.init, partial(mpiring.Communicator, MPI.COMM_WORLD)):
        with pytest.raises(mpiring.ConfigError, match=r"pass mpiring.Config\(...\)"):
            make(config={})
    for comm in ("world", MPI.COMM_NULL):
        with pytest.raises(mpiring.ConfigError, match="intracommunicator"):
            mpiring.Communicator(comm)


@pytest.mark.parametrize(("dtype", "algorithm"), [
    ("float32", "ring"), ("float16", "direct"), (ml_dtypes.bfloat16, "ring")])
def test_statistics_count_bytes_and_seconds(comm, dtype, algorithm):
    """Of chunks of several pieces, so that several messages are under way each way."""
    n = comm.size * 3 * Tuning.ring_bytes // 4 + 5
    comm.barrier()
    x, before = contract.contribution(comm.rank, n, dtype), comm.statistics
    comm.allreduce(x, algorithm=algorithm)
    contract.check(x, comm.size, "sum")
    cost = comm.statistics - before
    if comm.size == 1:
        assert cost == mpiring.Statistics()
        return
    payload = 2 * (comm.size - 1) / comm.size * x.nbytes
    assert cost.operations == 1 and cost.bytes_sent == pytest.approx(payload, abs=200)
    assert 0 < cost.communication_s and 0 < cost.exposed_s
    assert 0 <= cost.hidden_share <= 1


def test_long_messages_are_sent_in_pieces():
    """The path of messages over 1 GiB, with a smaller limit."""
    transport = MpiTransport(MPI.COMM_WORLD, piece_bytes=1000)
    net = transport.channel(0)
    x, y = np.arange(2501, dtype=np.float32) + net.rank, np.empty(2501, np.float32)
    requests = [net.irecv(y, (net.rank - 1) % net.size), net.isend(x, (net.rank + 1) % net.size)]
    while not all([request.test() for request in requests]):
        pass
    assert np.array_equal(y, np.arange(2501) + (net.rank - 1) % net.size)
    transport.free()


def test_every_collective_works_in_any_node_order(comm):
    """As if ranks had been dealt out to nodes in turn, which no launcher does on one machine."""
    with comm.split(0) as part:
        group = part._group
        group._resources = dataclasses.replace(
            group._resources, order=tuple(reversed(range(comm.size))))
        n = 10 * comm.size + 3
        x = contract.contribution(comm.rank, n, "float64")
        chunk = part.reduce_scatter(x)
        assert np.shares_memory(chunk, x[comm.rank * n // comm.size:])
        contract.check(part.allgather(x), comm.size, "sum")
        assert part.broadcast(np.full(3, comm.rank), root=comm.size - 1)[0] == comm.size - 1
        assert part.broadcast_object(comm.rank, root=comm.size // 2) == comm.size // 2
        assert part.allgather_object(comm.rank) == list(range(comm.size))


def test_lanes_have_tags_of_their_own():
    transport = MpiTransport(MPI.COMM_SELF)
    channels = [transport.channel(sequence, lane) for sequence in range(100)
                for lane in range(LANES)]
    assert len({channel._tag for channel in channels}) == len(channels)
    assert transport.channel(7).lane(2)._tag == transport.channel(7, 2)._tag
    limit = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767
    assert all(0 < transport.channel(sequence, LANES - 1)._tag <= limit
               for sequence in range(limit // LANES - 2, limit // LANES + 2))
    with pytest.raises(mpiring.ConfigError, match=f"lane {LANES}: expected 0 to"):
        transport.channel(0, LANES)
    transport.free()
