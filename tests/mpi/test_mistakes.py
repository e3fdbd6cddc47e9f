"""Tests that what all ranks do wrong is told by its name, and leaves the communicator as it was."""

import copy
import pickle
import signal

import numpy as np
import pytest
from mpi4py import MPI

import mpiring
from mpiring import ConfigError, elastic
from mpiring.data import TokenBatches
from mpiring.numpy import Checkpoints, DataParallel
from mpiring.reducers import Mean, TopK
from mpiring.resilience import Stopping, set_random_state

pytestmark = pytest.mark.mpi

OF_MPI = {"SUM": "sum", "PROD": "prod", "MIN": "min", "MAX": "max", "BAND": "band", "BOR": "bor",
          "BXOR": "bxor"}
LOGICAL = {"LAND": "band", "LOR": "bor", "LXOR": "bxor"}


@pytest.mark.parametrize(("theirs", "ours"), [*OF_MPI.items(), *LOGICAL.items()])
def test_ops_of_mpi4py(comm, theirs, ours):
    op, dtype = getattr(MPI, theirs), bool if theirs in LOGICAL else np.int64
    x = np.arange(2 * comm.size).astype(dtype) ^ dtype(comm.rank % 2)
    want = comm.allreduce(x.copy(), op=ours)
    assert (comm.allreduce(x.copy(), op=op) == want).all()
    assert (comm.iallreduce(x.copy(), op=op).wait() == want).all()
    chunk = comm.reduce_scatter(x.copy(), op=op)
    assert (chunk == want[2 * comm.rank:2 * comm.rank + 2]).all()
    # Not only this very object: one that was pickled, say, is another.
    assert (comm.allreduce(x.copy(), op=MPI.Op.fromhandle(op.handle)) == want).all()
    if theirs in LOGICAL:
        numbers = np.full(3, 2)
        with pytest.raises(ConfigError, match=f"op=MPI.{theirs} on int64: .*x != 0 .*'{ours}'"):
            comm.allreduce(numbers, op=op)
        assert (numbers == 2).all()
        # This is what MPI would have made of it.
        mpis = MPI.COMM_WORLD.allreduce(2, op)
        assert bool(mpis) == comm.allreduce(numbers != 0, op=ours)[0]


@pytest.mark.parametrize("name", ["avg", "average"])
def test_other_names_of_the_mean(comm, name):
    x = np.arange(2 * comm.size) + float(comm.rank)
    mean = np.arange(2 * comm.size) + (comm.size - 1) / 2
    own = slice(2 * comm.rank, 2 * comm.rank + 2)
    again, scattered = x.copy(), x.copy()
    persistent = comm.persistent_allreduce(again, op=name)
    scattering = comm.persistent_reduce_scatter(scattered, op=name)
    for _ in range(3):
        again[...] = scattered[...] = x
        assert (persistent() == mean).all() and (scattering() == mean[own]).all()
        assert (comm.allreduce(x.copy(), op=name) == mean).all()
        assert (comm.iallreduce(x.copy(), op=name).wait() == mean).all()
        assert (comm.reduce_scatter(x.copy(), op=name) == mean[own]).all()
    # To the other ranks it is the same.
    assert (comm.allreduce(x.copy(), op="mean" if comm.rank else name) == mean).all()


X = np.ones(3, np.float32)
ON_COMM = [
    (lambda comm: comm.allreduce(X, op="median"), "op='median': expected one of sum, mean"),
    (lambda comm: comm.reduce_scatter(X, op="median"), "op='median'"),
    (lambda comm: comm.allreduce(X, op="bor"), "integers of its width"),
    (lambda comm: comm.allreduce(X, algorithm="tree"), "algorithm='tree': expected one of auto"),
    (lambda comm: mpiring.init(config=mpiring.Config(algorithm="tree")),
     "algorithm='tree': expected one of auto, nccl, sha"),
    (lambda comm: comm.allreduce(X, op=MPI.MAXLOC), "expected one of sum, .* MPI.SUM, MPI.PROD"),
    (lambda comm: comm.allreduce(X, op=MPI.OP_NULL), "expected one of sum"),
    (lambda comm: comm.reduce_scatter(X, op={}), "op={}: expected one of sum"),
    (lambda comm: comm.allreduce(X, algorithm=[]), r"algorithm=\[\]: expected one of auto"),
    (lambda comm: comm.allreduce([3.0]), "numpy.asarray"),
    (lambda comm: comm.allreduce("text"), "broadcast_object"),
    (lambda comm: comm.broadcast(None), "broadcast_object"),
    (lambda comm: comm.empty(-1), r"empty\(-1, .*expected a whole number from 0"),
    (lambda comm: comm.empty((3, -1)), r"empty\(\(3, -1\)"),
    (lambda comm: comm.empty("a"), r"empty\('a'"),
    (lambda comm: comm.empty(1.5), r"empty\(1.5"),
    (lambda comm: comm.empty(None), r"empty\(None"),
    (lambda comm: comm.empty(1 << 70), "Maximum allowed dimension"),
    (lambda comm: comm.empty(3, "float33"), "'float33'.*a dtype of NumPy's"),
    (lambda comm: comm.empty(3, 7), "a dtype of NumPy's"),
    (lambda comm: comm.empty(3, object), "broadcast_object"),
    (lambda comm: comm.empty(3, device="gpu"), "expected cpu, cuda"),
    (lambda comm: comm.split("a"), "color='a': expected a whole number from 0 to 2147483647"),
    (lambda comm: comm.split(1.5), "color=1.5: expected a whole number"),
    (lambda comm: comm.split(1 << 40), "color=1099511627776: expected"),
    (lambda comm: comm.split(0, key="a"), "key='a': expected a whole number"),
    (lambda comm: comm.split(0, key=0.5), "key=0.5: expected a whole number"),
    (lambda comm: comm.split(0, key=None), "key=None: expected a whole number"),
    (lambda comm: comm.dump_flight(last="a"), "last='a': expected a whole number"),
    (lambda comm: comm.dump_flight(folder=3), "folder=3: expected a path"),
    (lambda comm: comm.broadcast_object(lambda: 3), "rank 0: a function does not pickle"),
    (lambda comm: comm.allgather_object(lambda: 3), "rank 0: a function does not pickle"),
    (lambda comm: Stopping(comm, time_limit_s="1h"), "time_limit_s='1h': expected seconds"),
    (lambda comm: Stopping(comm, margin_s=[1]), "margin_s=.*expected seconds"),
    (lambda comm: Stopping(comm, signals=signal.SIGUSR1), r"as \[signal.SIGUSR1\]"),
    (lambda comm: Stopping(comm, signals=["SIGTERM"]), r"as \[signal.SIGUSR1\]"),
    (lambda comm: Stopping(comm, signals=[signal.SIGUSR1, signal.SIGKILL]), "can be caught"),
    (lambda comm: Stopping(comm, checkpoints="run1"), "checkpoints is a str; pass Checkpoints"),
    (lambda comm: Stopping(MPI.COMM_WORLD), r"comm is a Intracomm; pass mpiring.init\(\)"),
    (lambda comm: Checkpoints(None, MPI.COMM_WORLD), r"comm is a Intracomm; pass mpiring.init\(\)"),
    (lambda comm: Checkpoints(3, comm), "folder=3: expected a path"),
    (lambda comm: Checkpoints(None, comm, seed=1.5), "seed=1.5: expected a whole number"),
    (lambda comm: elastic.run(3, elastic.State(comm)), "train is a int; pass a function"),
    (lambda comm: elastic.run(len, elastic.State(comm), max_ranks=0), "max_ranks=0: expected a"),
    (lambda comm: elastic.run(len, elastic.State(comm), max_ranks=comm.size + 1),
     "max_ranks=.*: this launcher ends the job .* mpirun --with-ft ulfm"),
    (lambda comm: set_random_state(3), "state of random numbers is a int"),
    (lambda comm: set_random_state({}), "state of random numbers lacks python, numpy"),
]
ROOTS = [1.0, 0.0, "0", None, True, False, [0], np.array([0, 1]), -1, 1 << 40]


def all_is_well(comm):
    """The ranks are still in step."""
    assert (comm.allreduce(np.full(3, comm.rank)) == sum(range(comm.size))).all()


@pytest.mark.parametrize("case", range(len(ON_COMM)))
def test_mistakes_of_all_ranks(comm, case):
    mistake, told = ON_COMM[case]
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    with pytest.raises(ConfigError, match=told):
        mistake(comm)
    all_is_well(comm)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before


def test_what_works_in_the_rank_only_is_not_copied(comm):
    handle = comm.iallreduce(np.ones(3))
    for original in (comm, handle, comm.persistent_allreduce(np.ones(3)), comm.messages(),
                     {"dataset": [comm]}, DataParallel({"w": np.ones(3)}, comm)):
        for copying in pickle.dumps, copy.copy, copy.deepcopy:
            if copying is not copy.copy or type(original) not in (dict, DataParallel):
                with pytest.raises(ConfigError, match="cannot be pickled or copied.*comm.rank"):
                    copying(original)
    x = comm.empty(3)
    x[...] = comm.rank
    assert (pickle.loads(pickle.dumps(x)) == comm.rank).all()
    handle.wait()
    all_is_well(comm)


@pytest.mark.parametrize(("name", "value", "odd"), [
    ("operations_in_flight", 2, 3), ("digest_steps", 1000, 0), ("digest_action", "stop", "restore"),
    ("shared_memory", True, False), ("reducer", "bf16", "topk:0.1")])
def test_settings_must_agree(comm, name, value, odd):
    if comm.size == 1:
        return
    own_value = odd if comm.rank == comm.size - 1 else value
    with pytest.raises(ConfigError, match=f"rank {comm.rank}.*'{name}': '?{odd}|'{name}': '?{odd}"):
        mpiring.Communicator(MPI.COMM_WORLD, config=mpiring.Config(**{name: own_value}))
    all_is_well(comm)


def test_a_configured_algorithm_gives_way_to_what_mpi_cannot_do(caplog):
    with mpiring.init(config=mpiring.Config(algorithm="native")) as comm:
        for _ in range(2):
            assert (comm.allreduce(np.full(3, comm.rank, "f4"), op="max") == comm.size - 1).all()
    assert caplog.text.count("MPI's own max is wrong or missing for float32") == (comm.rank == 0)


def test_roots(comm):
    for root in ROOTS:
        for mistake in (lambda: comm.broadcast(np.ones(3), root=root),
                        lambda: comm.broadcast_object(3, root=root)):
            with pytest.raises(ConfigError, match=f"rank {comm.rank}: root=.*whole number from 0"):
                mistake()
    for root in (np.int64(comm.size - 1), np.uint8(comm.size - 1), np.array(comm.size - 1)):
        x = np.full(3, comm.rank)
        assert (comm.broadcast(x, root=root) == comm.size - 1).all()
        assert comm.broadcast_object(comm.rank, root=root) == comm.size - 1


def test_a_rank_whose_object_does_not_pickle_is_named_by_all(comm):
    last = comm.size - 1
    obj = (lambda: 3) if comm.rank == last else 3
    for call in (comm.allgather_object, lambda obj: comm.broadcast_object(obj, root=last)):
        with pytest.raises(ConfigError, match=f"rank {last}: a function does not pickle"):
            call(obj)
    all_is_well(comm)


PARAMS = {"w": np.ones((3, 4), np.float32), "b": np.ones(4, np.float32)}
ON_MODEL = [
    (lambda dp: TokenBatches([3], dp.comm, tokens=3, shuffle=0), "shuffle=0: expected True"),
    (lambda dp: dp.weigh(10**400), r"weigh\(tokens\): tokens=1000.*: expected a number from 0 to"),
    (lambda dp: DataParallel(PARAMS, dp.comm, reducer={1: Mean()}), r"reducer\[1\]: expected the"),
    (lambda dp: DataParallel(PARAMS, dp.comm, reducer={None: Mean()}), r"reducer\[None\]"),
    (lambda dp: DataParallel(PARAMS, dp.comm, order=3), "order=3: expected a list of names"),
    (lambda dp: DataParallel(PARAMS, dp.comm, order=[["w"], ["b"]]), "expected a list of names"),
    (lambda dp: dp.rescale(0), "factor=0: expected a finite number above 0"),
]


@pytest.mark.parametrize("case", range(len(ON_MODEL)))
def test_mistakes_with_a_model(comm, case):
    mistake, told = ON_MODEL[case]
    dp = DataParallel(PARAMS, comm)
    with pytest.raises(ConfigError, match=told):
        mistake(dp)
    for name in (3, None, ["w"]):
        with pytest.raises(mpiring.GradientError, match="there is no gradient"):
            dp.ready(name)
    for name in PARAMS:
        dp.ready(name)
    dp.wait()
    all_is_well(comm)


def test_reducers_that_are_loaded_with_anything(comm):
    for state, told in ((3, "is a int"), (None, "is a NoneType"), ({}, "lacks edition")):
        with pytest.raises(ConfigError, match=f"the state of TopK.* {told}"):
            TopK().load_state_dict(state)
