"""Tests optimisers on real MPI: sharded or not, with all that a step has to get along with."""

import ml_dtypes
import numpy as np
import pytest
from models import SHAPES, close, model, random, same_on_all_ranks

import mpiring
from mpiring.numpy import DataParallel, LossScaler
from mpiring.optim import SGD, AdamW
from mpiring.reducers import Cast, ErrorFeedback, Int8, PowerSGD, TopK

pytestmark = pytest.mark.mpi


def backward(dp, step, factor=1.0, order=None):
    """Let gradients differ between ranks, and mark them in another order than at first."""
    for name in order or [*dp.params][::-1]:
        dp.grads[name][...] = factor * random(name, step, dp.comm.rank)
        dp.ready(name)


@pytest.mark.parametrize("dtype", ["float32", ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_slices_are_updated_as_the_whole(comm, dtype):
    results = []
    for sharded in (False, True):
        dp = DataParallel(model(dtype=dtype), comm, bucket_bytes=3000)
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
        dp = DataParallel(model(dtype="float16"), comm, bucket_bytes=3000)
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
    with pytest.raises(mpiring.ConfigError, match="has 'beta': expected some of lr, momentum, wei"):
        SGD(dp, groups={"b*": {"beta": 1}}, sharded=sharded)
    optimizer = SGD(dp, lr=0.1, sharded=sharded)
    with pytest.raises(mpiring.ConfigError, match=r"SGD.*updates this model already; give groups"):
        SGD(dp, lr=0.1)
    for step in range(2):
        for call in (optimizer.step, optimizer.grad_norm):
            with pytest.raises(mpiring.GradientError, match=r"\(\) without new gradients; compute"):
                call()
        backward(dp, step)
        assert optimizer.step()
    state = optimizer.state_dict()
    for other, text in (
            ({"optimizer": "AdamW"}, "the state is of AdamW, not of SGD; build the optimizer"),
            ({"tensors": {**state["tensors"], "x": {}}}, "of SGD has x besides: pass")):
        with pytest.raises(mpiring.ConfigError, match=text):
            optimizer.load_state_dict({**state, **other})
    backward(dp, 2)
    w1, dp.params["w1"] = dp.params["w1"], dp.params["w1"] + 0
    with pytest.raises(mpiring.ConfigError, match=r"params.'w1'. was replaced by another array,"):
        optimizer.step()
    dp.params["w1"] = w1
    optimizer.step()
    del optimizer, call
    optimizer = SGD(dp, lr=0.1, sharded=sharded)
    dp.ready("w1")
    with pytest.raises(mpiring.GradientError, match=r"wait\(\) with 5 of 6 gradients missing"):
        optimizer.step()
    with pytest.raises(mpiring.ConfigError, match="dp is a dict; pass a DataParallel of mpiring.n"):
        SGD({})
    for x, text in ((np.zeros(3, np.complex64), "parameter x complex64 .*: optimizers update flo"),
                    (np.zeros((3, 4), order="F"), r"'x' of shape \(3, 4\) is in Fortran order")):
        with pytest.raises(mpiring.ConfigError, match=text):
            SGD(DataParallel({"x": x}, comm))


def test_weights_may_be_changed_by_hand(comm):
    for dtype in ("float32", ml_dtypes.bfloat16):
        for sharded in (False, True):
            dp = DataParallel(model(dtype=dtype), comm)
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


# tests/reducers tries all of them without MPI.
REDUCERS = {"feedback": lambda: ErrorFeedback(Cast("bfloat16")), "int8": Int8,
            "powersgd": lambda: PowerSGD(rank=2), "topk": lambda: TopK(density=0.1)}


@pytest.mark.parametrize("name", REDUCERS)
def test_all_reducers_leave_slices(apart, name):
    """A sharded optimizer gets the means that others get, but for their rounding."""
    results = []
    for sharded in (False, True):
        dp = DataParallel(model(), apart, bucket_bytes=3000, reducer=REDUCERS[name]())
        optimizer = SGD(dp, lr=0.1, momentum=0.9, sharded=sharded)
        for step in range(3):
            backward(dp, step)
            assert optimizer.step()
            assert same_on_all_ranks(apart, dp.params)
        dp.compare_replicas()
        results.append(dp.params)
    close(*results, tolerance=1e-3)


def test_norms_are_those_of_all_gradients(comm):
    for sharded in (False, True):
        dp = DataParallel(model(), comm, bucket_bytes=3000)
        optimizer = AdamW(dp, sharded=sharded)
        for step in range(2):
            backward(dp, step)
            squares = 0.0
            for name in SHAPES:
                rows = [random(name, step, rank) for rank in range(comm.size)]
                squares += float((np.mean(rows, axis=0)**2).sum())
            assert optimizer.grad_norm() == pytest.approx(squares**0.5, rel=1e-5)
            assert optimizer.step()


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
