"""Tests optimisers on real MPI: sharded or not, with all that a step has to get along with."""

import ml_dtypes
import numpy as np
import pytest

import mpiring
from mpiring.numpy import DataParallel, LossScaler
from mpiring.optim import SGD, AdamW

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
        with pytest.raises(mpiring.ConfigError, match="rank 1: SGD has lr of .w1.=1.0, but on r"):
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
