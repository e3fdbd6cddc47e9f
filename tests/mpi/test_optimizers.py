"""Tests optimisers on real MPI: sharded or not, with all that a step has to get along with."""

import tempfile

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import mpiring
from mpiring.numpy import Checkpoints, DataParallel, LossScaler, MasterWeights
from mpiring.optim import LAMB, SGD, AdamW
from mpiring.reducers import Cast, ErrorFeedback, Int8, OneBit, PowerSGD, TopK

pytestmark = pytest.mark.mpi

SHAPES = {"w1": (37, 11), "b1": (11,), "scale": (), "w2": (3001,), "w3": (40, 50), "b3": (1,)}


def model(dtype="float32"):
    return {name: np.random.default_rng(list(name.encode())).standard_normal(shape).astype(dtype)
            .reshape(shape) for name, shape in SHAPES.items()}


def backward(dp, step, factor=1.0, order=None):
    """Let gradients differ between ranks, and mark them in another order than at first."""
    for name in order or [*dp.params][::-1]:
        random = np.random.default_rng([step, dp.comm.rank, *name.encode()])
        dp.grads[name][...] = factor * random.standard_normal(SHAPES[name])
        dp.ready(name)


def same_on_all_ranks(comm, params):
    bits = [x.tobytes() for x in params.values()]
    return comm.broadcast_object(bits, root=0) == bits


def close(one, other, tolerance=1e-5):
    for name, x in one.items():
        np.testing.assert_allclose(x.astype("f4"), other[name].astype("f4"), tolerance, tolerance)


@pytest.mark.parametrize("dtype", ["float32", ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_slices_are_updated_as_the_whole(comm, dtype):
    results = []
    for sharded in (False, True):
        dp = DataParallel(model(dtype), comm, bucket_bytes=3000)
        optimizer = AdamW(dp, lr=lambda step: 0.1 / (1 + step), no_decay=("b*",), sharded=sharded)
        order = ["w2", "b1", "b3", "w1", "w3", "scale"]
        for step in range(5):
            backward(dp, step, order=order)
            assert optimizer.step()
            assert same_on_all_ranks(comm, dp.params)
        results.append(dp.params)
    close(*results, tolerance=1e-5 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_step_that_is_skipped_leaves_no_trace(comm, sharded):
    results = []
    for bad_step in (None, 2):
        dp = DataParallel(model("float16"), comm, bucket_bytes=3000)
        optimizer = SGD(dp, lr=0.1, momentum=0.9, sharded=sharded)
        scaler = LossScaler(dp, initial_scale=2.0**10)
        for step in range(4):
            if step == bad_step:
                dp.grads["w1"][...] = np.inf if comm.rank == comm.size - 1 else 1
                for name in dp.params:
                    dp.ready(name)
                assert not optimizer.step(scaler) and scaler.scale == 2.0**9
            backward(dp, step, scaler.scale * 2.0**-3)
            assert optimizer.step(scaler)
        assert optimizer.steps == 4
        results.append(dp.params)
    close(*results, tolerance=2e-3)


@pytest.mark.parametrize("sharded", [False, True])
def test_mistakes_of_optimizers_are_named(comm, sharded):
    dp = DataParallel(model(), comm)
    with pytest.raises(mpiring.ConfigError, match=r"no_decay has 'c\*': no parameter has such"):
        SGD(dp, lr=0.1, no_decay=("c*",), sharded=sharded)
    with pytest.raises(mpiring.ConfigError, match=r"lr=-1: expected a finite number of at least"):
        SGD(dp, lr=-1, sharded=sharded)
    with pytest.raises(mpiring.ConfigError, match="has 'beta': expected some of lr, momentum, wei"):
        SGD(dp, groups={"b*": {"beta": 1}}, sharded=sharded)
    if comm.size > 1:
        with pytest.raises(mpiring.ConfigError, match="rank 1: SGD has lr of .w1.=1, but on r"):
            SGD(dp, lr=float(comm.rank == 1), sharded=sharded)
    optimizer = SGD(dp, lr=0.1, sharded=sharded)
    with pytest.raises(mpiring.ConfigError, match=r"SGD.*updates this model already; give groups"):
        SGD(dp, lr=0.1)
    with pytest.raises(mpiring.GradientError, match=r"step\(\) without new gradients; compute th"):
        optimizer.step()
    backward(dp, 0)
    assert optimizer.step()
    with pytest.raises(mpiring.GradientError, match=r"step\(\) without new gradients; compute th"):
        optimizer.step()
    backward(dp, 1)
    w1, dp.params["w1"] = dp.params["w1"], dp.params["w1"] + 0
    with pytest.raises(mpiring.ConfigError, match=r"params.'w1'. was replaced by another array,"):
        optimizer.step()
    dp.params["w1"] = w1
    optimizer.step()
    del optimizer
    optimizer = SGD(dp, lr=0.1, sharded=sharded)
    dp.ready("w1")
    with pytest.raises(mpiring.GradientError, match=r"wait\(\) with 5 of 6 gradients missing"):
        optimizer.step()
    with pytest.raises(mpiring.ConfigError, match="dp is a dict; pass a DataParallel of mpiring.n"):
        SGD({})


def test_weights_may_be_changed_by_hand(comm):
    for dtype in ("float32", ml_dtypes.bfloat16):
        for sharded in (False, True):
            dp = DataParallel(model(dtype), comm)
            optimizer = SGD(dp, lr=1.0, sharded=sharded)
            for number in (3.0, -7.0):
                for x in dp.params.values():
                    x[...] = number
                for name, grad in dp.grads.items():
                    grad[...] = 1
                    dp.ready(name)
                dp.wait()
                assert optimizer.step()
                assert all((x == number - 1).all() for x in dp.params.values())


def test_gradients_of_other_ranks_are_marked_as_junk(comm):
    dp = DataParallel(model(), comm)
    optimizer = SGD(dp, lr=1.0, sharded=True)
    for step in range(3):
        backward(dp, step)
        dp.wait()
        assert optimizer.step()
        assert all(np.isnan(grad).any() for grad in dp.grads.values())


REDUCERS = {"cast": lambda: Cast("bfloat16"), "feedback": lambda: ErrorFeedback(Cast("bfloat16")),
            "int8": Int8, "onebit": OneBit, "powersgd": lambda: PowerSGD(rank=2),
            "topk": lambda: TopK(density=0.1)}


@pytest.mark.parametrize("name", REDUCERS)
def test_all_reducers_leave_slices(apart, name):
    """A sharded optimiser gets the means that others get, but for their rounding."""
    results = []
    for sharded in (False, True):
        dp = DataParallel(model(), apart, bucket_bytes=3000, reducer=REDUCERS[name]())
        optimizer = SGD(dp, lr=0.1, momentum=0.9, sharded=sharded)
        for step in range(4):
            backward(dp, step)
            assert optimizer.step()
            assert same_on_all_ranks(apart, dp.params)
        results.append(dp.params)
    close(*results, tolerance=1e-3)


@pytest.fixture(scope="module")
def apart():
    """A communicator in which each rank is a node, as compression needs; it compares replicas."""
    config = mpiring.Config(shared_memory=False, tuning=False, digest_steps=1)
    with mpiring.Communicator(MPI.COMM_WORLD, config=config) as communicator:
        yield communicator


@pytest.mark.parametrize("dtype", ["float32", ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_a_checkpoint_of_slices_fits_all_ranks_and_one(comm, dtype):
    """What goes on from it has the bits of what was not interrupted."""
    with tempfile.TemporaryDirectory() as folder:
        folder = comm.broadcast_object(folder, root=0)

        def start(comm):
            dp = DataParallel(model(dtype), comm, bucket_bytes=3000, deterministic=True)
            return dp, LAMB(dp, lr=0.1, no_decay=("b*",), sharded=True)

        dp, optimizer = start(comm)
        for step in range(4):
            if step == 2:
                with Checkpoints(folder, comm) as checkpoints:
                    checkpoints.save(2, replicated=dp.params,
                                     sharded=optimizer.sharded_state_dict())
            backward(dp, step)
            assert optimizer.step()
        whole = optimizer.state_dict()

        again, resumed = start(comm)
        saved = Checkpoints(folder, comm).load()
        for name, x in again.params.items():
            x[...] = saved.replicated[name]
        resumed.load_state_dict(saved.sharded)
        for step in (2, 3):
            backward(again, step)
            assert resumed.step()
        assert resumed.steps == 4
        for name, x in dp.params.items():
            assert x.tobytes() == again.params[name].tobytes()
            for vector, leaf in resumed.state_dict()["tensors"][name].items():
                assert leaf.tobytes() == whole["tensors"][name][vector].tobytes()
        with comm.split(comm.rank) as alone:
            start(alone)[1].load_state_dict(saved.sharded)
        comm.barrier()


def test_a_state_of_others_is_refused(comm):
    dp = DataParallel(model(), comm)
    optimizer = AdamW(dp, sharded=True)
    state = optimizer.state_dict()
    for other, text in (
            (1, r"the state of AdamW is a int: pass what state_dict\(\) has returned"),
            ({**state, "optimizer": "SGD"}, "the state is of SGD, not of AdamW; build the optimiz"),
            ({**state, "tensors": {**state["tensors"], "x": {}}}, "of AdamW has x besides: pass"),
            ({**state, "tensors": {}}, "the state of AdamW lacks w1, b1, scale, w2, w3, b3: pass"),
            ({**state, "tensors": {**state["tensors"], "b1": {"m": np.zeros(3), "v": 0}}},
             r"m of 'b1' is float64 \(3,\) in the state, but float32 \(11,\) here; build the mo")):
        with pytest.raises(mpiring.ConfigError, match=text):
            optimizer.load_state_dict(other)
    if comm.size > 1:
        with pytest.raises(mpiring.ConfigError, match="^rank 1: the state of"):
            optimizer.load_state_dict(1 if comm.rank == 1 else state)


@pytest.fixture
def broken():
    """A communicator that a test may leave in any state."""
    communicator = mpiring.Communicator(MPI.COMM_WORLD)
    yield communicator
    MPI.COMM_WORLD.Barrier()
    communicator._group.closed = True
    communicator._group._forget()


def trained(comm, sharded, steps=2):
    dp = DataParallel(model("float16"), comm)
    optimizer, scaler = SGD(dp, lr=0.5, momentum=0.5, sharded=sharded), LossScaler(dp)
    for step in range(steps):
        backward(dp, step)
        optimizer.step(scaler)
    return dp, optimizer, scaler


def without_step(dp, optimizer, scaler, odd):
    dp.wait()
    if not odd:
        optimizer.step(scaler)


def by_other_steps(dp, optimizer, scaler, odd):
    dp.wait()
    if not odd:
        scaler.step()


# What one rank (`odd`) does otherwise, once gradients are ready, and the calls that differ.
ODD = {
    "no scaler": (lambda dp, optimizer, scaler, odd: optimizer.step(None if odd else scaler),
                  "loss scale 65536 after step 1, after update 2", "loss scale 65536 after step 2"),
    "no step": (without_step, "after update 1 with lr=0.5 mom", "after update 2 with lr=0.5 mom"),
    "no scaler.step": (by_other_steps, "after step 1", "after step 2"),
}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("case", ODD)
def test_a_step_that_differs_is_found_in_the_next_message(broken, case, sharded):
    if broken.size == 1:
        pytest.skip(reason="there is no other rank")
    act, odd_call, call = ODD[case]
    odd = broken.rank == broken.size - 1
    dp, optimizer, scaler = trained(broken, sharded)
    backward(dp, 2)
    with pytest.raises(mpiring.BufferMismatchError) as error:
        act(dp, optimizer, scaler, odd)
        backward(dp, 3)
        dp.wait()
    if broken.rank in (0, broken.size - 1):
        assert f"rank {broken.size - 1} called" in str(error.value)
        assert all(text in str(error.value) for text in ("rank 0 called", call))
        assert odd_call in str(error.value) or sharded and case == "no step", str(error.value)


# Collective calls that one rank does not make.
CALLS = {
    "SGD": lambda dp, optimizer, scaler: SGD(DataParallel({"x": np.ones(3)}, dp.comm)),
    "load_state_dict": lambda dp, optimizer, scaler: optimizer.load_state_dict(
        optimizer.state_dict()),
    "LossScaler": lambda dp, optimizer, scaler: LossScaler(dp),
    "LossScaler.load_state_dict": lambda dp, optimizer, scaler: scaler.load_state_dict(
        scaler.state_dict()),
    "MasterWeights.load_state_dict": lambda dp, optimizer, scaler: (
        lambda masters: masters.load_state_dict(masters.state_dict()))(MasterWeights(dp)),
    "grad_norm": lambda dp, optimizer, scaler: optimizer.grad_norm(),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_call_that_one_rank_does_not_make_is_found(broken, case):
    if broken.size == 1:
        pytest.skip(reason="there is no other rank")
    dp, optimizer, scaler = trained(broken, False)
    if case == "grad_norm":
        backward(dp, 2)
        dp.wait()
    with pytest.raises(mpiring.BufferMismatchError, match=r"rank \d+ called .*rank \d+ called"):
        if broken.rank < broken.size - 1:
            CALLS[case](dp, optimizer, scaler)
        broken.barrier()


def test_norms_are_those_of_all_gradients(comm):
    for sharded in (False, True):
        dp = DataParallel(model(), comm, bucket_bytes=3000)
        optimizer = AdamW(dp, sharded=sharded)
        for step in range(3):
            backward(dp, step)
            squares = 0.0
            for name, shape in SHAPES.items():
                rows = [np.random.default_rng([step, rank, *name.encode()]).standard_normal(shape)
                        for rank in range(comm.size)]
                squares += float((np.mean(rows, axis=0)**2).sum())
            assert optimizer.grad_norm() == pytest.approx(squares**0.5, rel=1e-5)
            assert optimizer.step()
        with pytest.raises(mpiring.GradientError, match=r"grad_norm\(\) without new gradients"):
            optimizer.grad_norm()


def test_state_of_whole_tensors_can_be_watched(apart):
    dp = DataParallel(model(), apart)
    optimizer = AdamW(dp)
    dp.watch(adamw=optimizer.state)
    for step in range(3):
        backward(dp, step)
        assert optimizer.step()
    if apart.size > 1:
        optimizer.state["w2"]["m"][5] += apart.rank == 1
        with pytest.raises(mpiring.ReplicaError, match=r"adamw\['w2'\]\['m'\]"):
            dp.compare_replicas()


def test_parameters_that_no_optimizer_updates_are_refused(comm):
    for x, text in ((np.zeros(3, np.complex64), "parameter x complex64 .*: optimizers update flo"),
                    (np.zeros((3, 4), order="F"), r"'x' of shape \(3, 4\) lies in Fortran's orde")):
        with pytest.raises(mpiring.ConfigError, match=text):
            SGD(DataParallel({"x": x}, comm))
