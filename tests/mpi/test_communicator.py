"""Tests the communicator's face on real MPI, at any number of ranks."""

import time

import contract
import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import mpiring
from mpiring.collectives import native
from mpiring.transport.mpi import MpiTransport

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("algorithm", ["auto", "ring", "native"])
@pytest.mark.parametrize("op", contract.OPS)
@pytest.mark.parametrize("dtype", contract.DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_contract(comm, dtype, op, algorithm):
    for n in (0, 1, comm.size - 1, comm.size, comm.size + 1, 1000, 70_001):
        x = contract.contribution(comm.rank, n, dtype)
        if not contract.defined(op, dtype):
            with pytest.raises(mpiring.ConfigError, match="is not defined for"):
                comm.allreduce(x, op=op, algorithm=algorithm)
        elif algorithm == "native" and not native.supports(dtype, op):
            with pytest.raises(mpiring.ConfigError, match="algorithm='native'"):
                comm.allreduce(x, op=op, algorithm=algorithm)
        else:
            assert comm.allreduce(x, op=op, algorithm=algorithm) is x
            contract.check(x, comm.size, op)
            assert len(set(comm.allgather_object(x.tobytes()))) == 1, "bits differ"


def test_shapes_and_orders(comm):
    for x in (np.ones((3, 4, 5), np.float32), np.asfortranarray(np.ones((3, 4))),
              np.array(1.0), np.ones((0, 3)), np.ones(7)[2:5]):
        assert (comm.allreduce(x) == comm.size).all()


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


def test_unknown_words_are_refused(comm):
    x = np.ones(3)
    with pytest.raises(mpiring.ConfigError, match="op='avg': expected one of sum, mean"):
        comm.allreduce(x, op="avg")
    with pytest.raises(mpiring.ConfigError, match="algorithm='tree': expected"):
        comm.allreduce(x, algorithm="tree")
    with pytest.raises(mpiring.ConfigError, match="is no rank; expected 0 to"):
        comm.broadcast(x, root=comm.size)
    # A refused call uses no number: the ranks are still in step.
    assert comm.allreduce(x)[0] == comm.size


def test_nan_and_infinity_reach_every_rank(comm):
    for op in ("sum", "mean", "max", "min", "prod"):
        x = np.ones(5, np.float32)
        if comm.rank == comm.size - 1:
            x[2] = np.nan
        comm.allreduce(x, op=op)
        assert np.isnan(x).tolist() == [False, False, True, False, False]
    large = np.array([60000], np.float16)
    assert comm.allreduce(large, op="mean")[0] == pytest.approx(60000, rel=1e-3)


def test_reduce_scatter_then_allgather_is_allreduce(comm):
    for n in (0, 1, comm.size + 1, 1001):
        x = contract.contribution(comm.rank, n, "float64")
        chunk = comm.reduce_scatter(x)
        want = contract.expected(comm.size, n, "float64", "sum")
        start, stop = (r * n // comm.size for r in (comm.rank, comm.rank + 1))
        assert chunk.base is not None and np.shares_memory(chunk, x) or n < comm.size
        assert np.array_equal(chunk, want[start:stop])
        assert comm.allgather(x) is x
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


def test_objects(comm):
    for root in range(comm.size):
        found = comm.broadcast_object({"from": comm.rank, "data": "x" * 100_000}, root=root)
        assert found["from"] == root
    assert comm.allgather_object("x" * comm.rank) == ["x" * rank for rank in range(comm.size)]


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
    while not (handle.done if threaded else handle.test()):
        np.sort(np.arange(1000.0))
        assert time.monotonic() < deadline
    comm.barrier()


def test_split(comm):
    part = comm.split(comm.rank % 2, key=-comm.rank)
    assert part.size == len(range(comm.rank % 2, comm.size, 2))
    assert part.allgather_object(comm.rank) == sorted(
        range(comm.rank % 2, comm.size, 2), reverse=True)
    both = comm.iallreduce(np.ones(3)), part.iallreduce(np.ones(3))
    assert both[1 - comm.rank % 2].wait() is not None
    assert both[0].wait()[0] == comm.size and both[1].wait()[0] == part.size
    part.close()
    with pytest.raises(mpiring.ConfigError, match="color=-1"):
        comm.split(-1)
    alone = comm.split(0 if comm.rank == 0 else None)
    assert (alone is None) == (comm.rank != 0)
    if alone is not None:
        assert alone.size == 1
        alone.close()


def test_two_communicators_may_be_used_in_different_orders(comm):
    other = comm.split(0)
    first, second = (comm, other) if comm.rank % 2 else (other, comm)
    handles = [group.iallreduce(np.ones(10)) for group in (first, second) for _ in range(5)]
    assert all((handle.wait() == comm.size).all() for handle in handles)
    other.close()


def test_topology_of_one_node(comm):
    assert (comm.local_rank, comm.local_size) == (comm.rank, comm.size)
    assert (comm.node_rank, comm.num_nodes) == (0, 1)


def test_use_after_close():
    comm = mpiring.init()
    comm.close()
    comm.close()
    with pytest.raises(mpiring.ClosedError, match="is closed"):
        comm.allreduce(np.ones(3))
    assert "closed" in repr(comm)


def test_only_intracommunicators():
    with pytest.raises(mpiring.ConfigError, match=r"pass mpiring.Config\(...\)"):
        mpiring.init(config={})
    with pytest.raises(mpiring.ConfigError, match=r"pass mpiring.Config\(...\)"):
        mpiring.Communicator(MPI.COMM_WORLD, config={})
    with pytest.raises(mpiring.ConfigError, match="intracommunicator"):
        mpiring.Communicator("world")
    with pytest.raises(mpiring.ConfigError, match="intracommunicator"):
        mpiring.Communicator(MPI.COMM_NULL)


def test_statistics_count_bytes_and_seconds(comm):
    comm.barrier()
    before = comm.statistics
    comm.allreduce(np.ones(1_000_000, np.float32), algorithm="ring")
    cost = comm.statistics - before
    if comm.size == 1:
        assert cost == mpiring.Statistics()
        return
    assert cost.operations == 1
    header_bytes = 192
    payload = 2 * (comm.size - 1) / comm.size * 4_000_000
    assert cost.bytes_sent == pytest.approx(payload + header_bytes, abs=16)
    assert 0 < cost.communication_s and 0 < cost.exposed_s
    assert 0 <= cost.hidden_share <= 1


def test_long_messages_travel_in_pieces():
    """The path of messages over 1 GiB, with a smaller limit."""
    transport = MpiTransport(MPI.COMM_WORLD, piece_bytes=1000)
    net = transport.channel(0)
    x, y = np.arange(2501, dtype=np.float32) + net.rank, np.empty(2501, np.float32)
    requests = [net.irecv(y, (net.rank - 1) % net.size), net.isend(x, (net.rank + 1) % net.size)]
    while not all([request.test() for request in requests]):
        pass
    assert np.array_equal(y, np.arange(2501) + (net.rank - 1) % net.size)
    transport.free()
