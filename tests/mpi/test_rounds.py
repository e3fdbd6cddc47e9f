"""Tests short calls that are made again, and so run as rounds, on real MPI."""

import io
import random
import sys
import threading
import time
import zlib

import contract
import numpy as np
import pytest
from launching import SOON_S
from mpi4py import MPI

import mpiring
from mpiring.collectives.operation import Tuning
from mpiring.memory.arrays import chunks_of
from mpiring.transport import waiting
from mpiring.transport.layout import SLOTS

pytestmark = pytest.mark.mpi

if MPI.COMM_WORLD.size == 1:
    pytest.skip(reason="there is no other rank", allow_module_level=True)


# Where there is compiled code, see test_real_mpi.
HAS_CODE = bool(mpiring.Config().tuning_folder) and mpiring.Config().machine_code


def rounds(comm):
    return comm._group.sharing.counter.fast_calls


def node_calls(comm):
    return [a for prepared in comm._group.fast_calls.prepared for a in (
        prepared.node_call, *prepared._at_positions.values(), *prepared._started) if a]


@pytest.fixture(scope="module", params=["auto", "mixed"])
def comm(request):
    """Communicators whose ranks run rounds in one way, or each in its own."""
    ways = ("python", "off", "auto")
    how = ways[MPI.COMM_WORLD.rank % 3] if request.param == "mixed" else request.param
    with mpiring.Communicator(MPI.COMM_WORLD, config=mpiring.Config(rounds=how)) as comm:
        yield comm


def test_contract(comm):
    """Of what fits into a slot, and is just too long for it, in bytes and elements more."""
    slot, sums = 16 << 10, []
    for op, dtype, (nbytes, more) in contract.cases(
            ((0, 0), (0, 1), (0, 3), (slot, -1), (slot, 0), (slot, 1))):
        for _ in range(2):
            x = contract.contribution(comm.rank, nbytes // np.dtype(dtype).itemsize + more, dtype)
            assert comm.allreduce(x, op=op) is x
            contract.check(x, comm.size, op)
            sums.append(zlib.crc32(x.tobytes()))
    assert comm.allgather_object(sums) == [sums] * comm.size, "bits differ"


def test_contract_of_the_others(comm):
    p, rank, longest = comm.size, comm.rank, Tuning.moved_bytes // 4
    # What is longer is no round. A reduce_scatter of the longest ones is in three pieces and more.
    for op, dtype, n in (*contract.cases((0, 1, 3, 1001)), ("max", "float32", longest),
                         ("max", "float32", longest + 1), ("sum", "float32", 3 * longest + 5),
                         ("mean", "float64", 2 * longest + 1), ("sum", "int8", 9 * longest),
                         ("sum", "float16", 5 * longest + 3)):
        own_slice, ones = slice(rank * n // p, (rank + 1) * n // p), np.ones(n, dtype)
        for step in range(2):
            x = contract.contribution(rank, n, dtype)
            chunk = comm.reduce_scatter(x, op=op)
            assert np.array_equal(chunk, contract.expected(p, n, x.dtype, op)[own_slice])
            assert chunk.shape == (own_slice.stop - own_slice.start,) and (chunk.base is x or not n)
            full = contract.contribution(step, n, dtype)
            x = ones.copy()
            x[own_slice] = full[own_slice]
            assert comm.allgather(x) is x and np.array_equal(x, full)
            for root in {0, p - 1}:
                x = full.copy() if rank == root else ones.copy()
                x.flags.writeable = rank != root or step > 0
                assert comm.broadcast(x, root=root) is x and np.array_equal(x, full)
    if comm._group.fast_calls.memory is not None:
        assert max(a.length for a in node_calls(comm) if a.kind <= SLOTS) == longest


def test_the_others_on_arrays_and_roots_of_all_kinds(comm):
    p, rank = comm.size, comm.rank
    for step in range(3):
        x = np.full((4, 6), rank + step, np.float32)
        for array in (x, np.asfortranarray(x), x.T, x.view(Sub), comm.empty((4, 6))):
            array[...] = rank + step
            assert comm.broadcast(array, root=p - 1) is array and (array == p - 1 + step).all()
            array[...] = rank + 1
            comm.reduce_scatter(array)
            array.reshape(-1, order="A")[...] = rank
            assert comm.allgather(array) is array
            assert np.array_equal(array.reshape(-1, order="A"), [
                r for r in range(p) for _ in range((r + 1) * 24 // p - r * 24 // p)])
        assert comm.broadcast(np.full(3, rank), root=np.int64(1))[0] == 1
        for root in (True, 1.0, p, -1, None):
            with pytest.raises(mpiring.ConfigError, match="root"):
                comm.broadcast(np.ones(3, int), root=root)
        for op in ("median", None, ["sum"], 1):
            with pytest.raises(mpiring.ConfigError, match="op="):
                comm.reduce_scatter(np.ones(3), op=op)
        for call in (comm.allgather, comm.broadcast, comm.reduce_scatter):
            with pytest.raises(mpiring.ConfigError, match="is not contiguous"):
                call(np.ones((4, 6))[::2])


def test_objects(comm):
    """Short ones travel as rounds; what they are longer, after that."""
    p, rank = comm.size, comm.rank
    before = comm.statistics
    for n in (0, 7, 700, 1100, 100_000):
        for step in range(3):
            text = "x" * (n + rank * step * 20)
            assert comm.allgather_object((rank, text)) == [
                (r, "x" * (n + r * step * 20)) for r in range(p)]
            assert comm.broadcast_object((rank, text), root=1) == (1, "x" * (n + step * 20))
    assert (comm.statistics - before).operations == 42
    with pytest.raises(mpiring.ConfigError, match="does not pickle"):
        comm.allgather_object(lambda: None if rank else 0)


def test_rounds_run_where_they_may_and_count(comm):
    x, config = np.ones(10), comm.config.rounds
    before, called = rounds(comm), comm.statistics
    for _ in range(6):
        comm.allreduce(x, op="max")
        comm.broadcast(x)
        comm.allgather(x)
        comm.reduce_scatter(x)
    now = comm.statistics - called
    assert now.operations == 24 and now.exposed_s > 0
    if config == "off":
        assert rounds(comm) == 0
    elif comm._group.sharing.memory is not None:
        # One that was late is the engine's. On a busy machine, all of them may be.
        assert before <= rounds(comm) <= before + 24
        comm.dump_flight(last=20, file=(text := io.StringIO()))
        for call in ("allreduce max of float64 (10,), algorithm auto, 80 b",
                     "broadcast of float64 (10,) from root 0", "allgather float64 (10,)",
                     "reduce_scatter sum of float64 (10,)"):
            assert text.getvalue().count(call) == 5
    has_none = config == "off" or comm._group.sharing.memory is None
    assert any(comm.allreduce(np.array([has_none or rounds(comm) > before], float), op="min")[0]
               for _ in range(1000)), "no call was fast"
    for _ in range(2):
        comm.allreduce(np.ones(10))
    if comm._group.fast_calls.memory is not None:
        has_code = {a.code is not None for a in node_calls(comm)}
        assert (True in has_code) == (HAS_CODE and config == "auto")


def test_nothing_about_an_array_is_kept(comm):
    x = np.zeros((4, 6), np.float32)

    def check(array):
        array[...] = comm.rank + 1
        comm.allreduce(array)
        assert (array == comm.size * (comm.size + 1) // 2).all()

    for _ in range(3):
        check(x)
    for shape in ((24,), (2, 12), (4, 6)):
        x.shape = shape
        check(x)
        check(x)
    check(x.view(np.int32))
    check(x.T)
    check(np.asfortranarray(x))
    for _ in range(5):
        # At the address, and perhaps with the id, of one that has died.
        check(np.empty((4, 6), np.float32))
    parts = np.zeros((8, 6), np.float32)
    check(parts[::2].copy())
    with pytest.raises(mpiring.ConfigError, match="is not contiguous"):
        comm.allreduce(parts[::2])
    x.flags.writeable = False
    with pytest.raises(mpiring.ConfigError, match="read-only"):
        comm.allreduce(x)
    for op in ("median", ["sum"], None):
        with pytest.raises(mpiring.ConfigError, match="op="):
            comm.allreduce(np.zeros((4, 6), np.float32), op=op)
    window = comm.empty((4, 6))
    check(window)
    del window
    check(comm.empty((4, 6)))
    check(np.zeros((4, 6), np.float32))
    check(np.float32([7])[:0].reshape(0, 3))
    for _ in range(2):
        check(np.zeros(()))
        assert comm.allreduce(x.view(Sub) * 0 + 1)[0, 0] == comm.size
        assert comm.allreduce(np.ones(5), op=MPI.SUM)[0] == comm.size
        assert comm.allreduce(np.ones(5), algorithm="direct")[0] == comm.size
        with pytest.raises(mpiring.ConfigError, match="masked"):
            comm.allreduce(np.ma.ones(5))


class Sub(np.ndarray):
    """An array of another class."""


def test_rounds_amid_other_operations(comm):
    same_dice, dice = random.Random(3), random.Random(comm.rank)
    part = comm.split(comm.rank % 2)
    waiting = []
    for step in range(200):
        if same_dice.random() < 0.1:
            waiting.append((comm.iallreduce(np.full(20_000, step, np.float32)), step))
        if same_dice.random() < 0.1:
            comm.barrier()
        if dice.random() < 0.02:
            time.sleep(dice.random() * 0.003)
        x = np.full(same_dice.choice([2, 300]), comm.rank + step)
        total = comm.size * step + comm.size * (comm.size - 1) // 2
        kind = same_dice.randrange(4)
        if kind < 2:
            x = comm.reduce_scatter(x) if kind else comm.allreduce(x)
            assert (x == total).all()
        elif kind == 2:
            root = same_dice.randrange(comm.size)
            assert (comm.broadcast(x, root=root) == root + step).all()
        else:
            assert comm.allgather(x).sum() == sum(
                (r + step) * len(part) for r, part in enumerate(chunks_of(x, comm.size)))
        if step % 5 == 0:
            assert part.allreduce(np.ones(2))[0] == part.size
        if waiting and same_dice.random() < 0.1:
            handle, then = waiting.pop(0)
            assert (handle.wait() == comm.size * then).all()
    for handle, then in waiting:
        assert (handle.wait() == comm.size * then).all()
    part.close()


def test_handles_of_rounds(comm):
    x, y, z = np.zeros(3), np.zeros((2, 2), np.float32), np.zeros(3)
    total = comm.size * (comm.size + 1) // 2
    log = []
    for step in range(30):
        for array in (x, y, z):
            array[...] = comm.rank + 1
        handles = [comm.iallreduce(array) for array in (x, y, z)]
        if step % 4 == 1:
            assert comm.allreduce(np.ones(5))[0] == comm.size
        if step % 4 == 2:
            handles[0].when_done(log.append)
            assert "allreduce sum of float64 (3,)" in repr(handles[2].flight)
        if step % 4 == 3:
            while not all(handle.test() for handle in handles):
                pass
            assert all(handle.done for handle in handles)
        for handle, array in list(zip(handles, (x, y, z)))[::1 if step % 2 else -1]:
            assert handle.wait(60) is array and handle.done and handle.wait() is array
            assert (array == total).all()
    assert log == [None] * 7
    # Nobody waits for these.
    for _ in range(5):
        comm.iallreduce(np.ones(3))
    comm.split(0).close()
    assert comm.allreduce(np.ones(3))[0] == comm.size


def test_a_look_amid_a_run_of_the_same_handle():
    """As by a signal's handler: the call is not run within itself."""
    with mpiring.Communicator(MPI.COMM_WORLD, config=mpiring.Config(rounds="python")) as comm:
        x, looks = np.ones(3), []
        comm.allreduce(x)
        x[:], before = comm.rank + 1, comm.statistics
        handle = comm.iallreduce(x)
        call = handle._node_call
        combined = call.combined

        def looking(out):
            if not looks:
                looks.append(None)
                looks[0] = handle.done
            combined(out)

        call.combined = looking
        assert handle.wait(60) is x and handle.done and looks in ([], [False])
        assert (x == comm.size * (comm.size + 1) // 2).all()
        assert (comm.statistics - before).operations == 1


@pytest.mark.parametrize("kind", ["allreduce", "two", "allgather", "long"])
def test_threads_that_make_identical_calls(comm, kind):
    """As rounds, and otherwise: a round of one thread leaves another's alone."""
    p, threads, wrong = comm.size, 3, []
    total, n = p * (p + 1) // 2, 30_001 if kind == "long" else 1001

    def filled():
        return np.full(n, comm.rank + 1, np.float32)

    def once():
        x, y = filled(), filled()
        if kind in ("allreduce", "long"):
            comm.allreduce(x)
        elif kind == "allgather":
            gathered = np.repeat(x[:p], 100)
            comm.allgather(gathered)
            assert np.array_equal(gathered, np.repeat(np.arange(p) + 1, 100))
            return
        else:
            for handle in [comm.iallreduce(x), comm.iallreduce(y)]:
                handle.wait()
        assert (x == total).all() and (kind != "two" or (y == total).all())

    def work():
        try:
            for _ in range(20):
                once()
        except BaseException as error:
            wrong.append(error)

    once()
    before, interval = comm.statistics, sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        workers = [threading.Thread(target=work, daemon=True) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not wrong and not any(worker.is_alive() for worker in workers), wrong
    assert (comm.statistics - before).operations == 20 * threads * (1 + (kind == "two"))


# What rank 0 calls, with a sum, and what the others do, after both calls were made before.
CALLS = {
    "blocking": lambda comm, x, op: comm.allreduce(x, op=op),
    "started": lambda comm, x, op: comm.iallreduce(x, op=op).wait(),
    "in place": lambda comm, x, op: comm.allreduce(x, op=op),
    "scattered": lambda comm, x, op: comm.reduce_scatter(x, op=op),
    "copied": lambda comm, x, op: comm.broadcast(x, root=int(op == "max")),
    # What travels is of one length and dtype.
    "pickled": lambda comm, x, op: (comm.broadcast(np.empty(1024, np.uint8)) if op == "max"
                                    else comm.broadcast_object(1)),
    "other": lambda comm, x, op: comm.allgather(x) if op == "max" else comm.broadcast(x)}


def array_for(comm, name):
    return comm.empty(70_000) if name == "in place" else np.empty(3, np.float32)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("how", [("python", "off"), ("auto", "auto")])
def test_ranks_that_disagree(how, name, breakable):
    comm = breakable(rounds=how[MPI.COMM_WORLD.rank > 0])
    x, call = array_for(comm, name), CALLS[name]
    for _ in range(3):
        for op in ("sum", "max"):
            x[:] = 1
            call(comm, x, op)
    x[:] = 5
    with pytest.raises(mpiring.BufferMismatchError, match=(
            "rank [0-9] called (allreduce|reduce_scatter|broadcast|broadcast_object|allgather) "
            ".* but rank")):
        call(comm, x, "max" if comm.rank else "sum")
    assert (x == 5).all()
    with pytest.raises(mpiring.TransportError, match="an earlier operation failed"):
        call(comm, x, "sum")


@pytest.mark.parametrize(("how", "name"), [("python", "blocking"), ("auto", "in place")])
def test_a_missing_call(how, name, breakable, monkeypatch):
    comm = breakable(rounds=how, stall_warning_s=0)
    x = array_for(comm, name)
    x[:] = 1
    for _ in range(3):
        comm.allreduce(x)
    last = comm._group.sharing.counter.sequence - 1
    # Rank 0 answers while it waits for the others at the end of the test: late on a busy machine.
    # Of several others, those that have raised an error do not answer.
    answers = comm._group.threaded and comm.size == 2
    if answers:
        monkeypatch.setattr(waiting, "ANSWER_S", SOON_S)
    if comm.rank:
        comm._group.set_stall_timeout(1.0)
        with pytest.raises(mpiring.StallError) as raised:
            comm.allreduce(x)
        assert f"#{last + 1} allreduce sum of float32 ({x.size},)" in str(raised.value)
        if answers:
            text = f"rank 0 has NOT CALLED it; its last call was #{last} allreduce"
            assert text in str(raised.value)
