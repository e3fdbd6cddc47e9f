"""Tests DataParallel for NumPy models on real MPI, at any number of ranks."""

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import mpiring
from mpiring.numpy import DataParallel

pytestmark = pytest.mark.mpi

SHAPES = {"w1": (20, 30), "b1": (30,), "w2": (30, 10), "b2": (10,), "scale": ()}


def model(rank, dtype=np.float32):
    random = np.random.default_rng(rank)
    return {name: np.asarray(random.random(shape), dtype) for name, shape in SHAPES.items()}


def step(dp, comm, number, order):
    for name in order:
        dp.grads[name][...] = (comm.rank + 1) * number
        dp.ready(name)
    dp.wait()
    for grad in dp.grads.values():
        # A mean in 16 bits divides before it adds, and rounds.
        tolerance = 2e-3 if grad.dtype == np.float16 else 0
        np.testing.assert_allclose(grad, (comm.size + 1) / 2 * number, rtol=tolerance)


def test_parameters_become_rank_0s(comm):
    params = model(comm.rank)
    kept = params["w1"]
    dp = DataParallel(params, comm)
    assert params["w1"] is kept
    for name, want in model(0).items():
        assert np.array_equal(params[name], want)
        assert dp.grads[name].shape == want.shape and dp.grads[name].dtype == want.dtype


@pytest.mark.parametrize(("bucket_bytes", "dtype"), [
    (1, np.complex128), (500, np.float16), (25 << 20, np.float32)])
def test_gradients_become_the_mean(comm, bucket_bytes, dtype):
    dp = DataParallel(model(0, dtype), comm, bucket_bytes=bucket_bytes)
    for number in range(1, 4):
        step(dp, comm, number, list(SHAPES)[::-1])


def test_views_stay_whatever_the_order_of_the_gradients(comm):
    dp = DataParallel(model(0), comm, bucket_bytes=500)
    kept, order = dict(dp.grads), dp.order
    assert sorted(order) == sorted(SHAPES)
    for number in range(1, 4):
        # Ranks may differ in their order.
        step(dp, comm, number, ["b2", "w1", "scale", "b1", "w2"] if comm.rank else list(SHAPES))
        assert dp.order == order
        assert all(dp.grads[name] is view for name, view in kept.items())


def test_the_order_of_an_older_checkpoint_is_taken(comm):
    """Means move, and a view that was kept cannot be mistaken for a gradient."""
    dp, older = DataParallel(model(0), comm, bucket_bytes=500), ["b2", "w1", "scale", "b1", "w2"]
    step(dp, comm, 1, list(SHAPES))
    kept, grads = dict(dp.grads), dp.grads
    dp.load_own_state_dict({"order": older, "reducers": []})
    assert dp.order == older and dp.steps == 1 and dp.grads is grads
    assert [*dp.gradients.buckets[0].views] == ["b2"]
    for name, view in kept.items():
        assert (grads[name] == (comm.size + 1) / 2).all() and np.isnan(view).all()
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 0
    step(dp, comm, 2, list(SHAPES))
    now = dict(grads)
    dp.load_own_state_dict(dp.own_state_dict())
    assert all(grads[name] is view for name, view in now.items()), "the order is the same"
    again = DataParallel(model(0), comm, bucket_bytes=500, order=older)
    assert [list(bucket.views) for bucket in again.gradients.buckets] == [
        list(bucket.views) for bucket in dp.gradients.buckets]


def test_gradients_are_written_into_and_not_replaced(comm):
    dp = DataParallel(model(0), comm)
    views = dict(dp.grads)
    for name in SHAPES:
        dp.grads[name][...] = 1
        dp.grads[name] += 2
        assert dp.grads[name] is views[name] and (views[name] == 3).all()
    for name in ("b1", "b3"):
        with pytest.raises(mpiring.GradientError, match=rf"write into it: grads\['{name}'\]"):
            dp.grads[name] = np.ones(30, np.float32)
    assert dp.grads["b1"] is views["b1"] and sorted(dp.grads) == sorted(SHAPES)
    with pytest.raises(KeyError, match=r"no parameter is called 'bb1'; grads has b1, "):
        dp.grads["bb1"]
    assert "bb1" not in dp.grads


def test_models_and_buckets_that_cannot_be_are_refused(comm):
    for params, told in (
            ({}, "pass a dict of the model's arrays"),
            ([np.zeros(3)], "pass a dict of the model's arrays"),
            ({0: np.zeros(3)}, "names must be strings"),
            ({"steps": np.zeros(3, np.int64)}, "'steps'.*leave it out of params"),
            ({"turned": np.zeros((4, 4))[::2]}, "'turned'.*not contiguous"),
            ({"mask": np.zeros(3, bool)}, "'mask'.*leave it out of params")):
        with pytest.raises(mpiring.ConfigError, match=told):
            DataParallel(params, comm)
    with pytest.raises(mpiring.ConfigError, match=r"mpiring.Communicator\(comm\)"):
        DataParallel(model(0), MPI.COMM_WORLD)
    for bucket_bytes in (0, "4M", 1e6):
        with pytest.raises(mpiring.ConfigError, match="bucket_bytes=.*whole number of at least 1"):
            DataParallel(model(0), comm, bucket_bytes=bucket_bytes)


def samples_of(comm, number, rank=None):
    """Return samples of a rank, or of all; some ranks have none in a step."""
    if rank is None:
        return np.concatenate([samples_of(comm, number, rank) for rank in range(comm.size)])
    n = 9 if comm.size == 1 else (2 * rank + number) % (comm.size + 2)
    return np.random.default_rng([number, rank]).random(n) + 1


@pytest.mark.parametrize(("dtype", "rtol"), [
    (np.float32, 1e-6), (np.float64, 1e-12), (np.complex64, 1e-6), (np.float16, 4e-3),
    (ml_dtypes.bfloat16, 3e-2)])
def test_ranks_weigh_as_much_as_they_have(comm, dtype, rtol):
    """Also where that is nothing, whose mean is NaN; and not in the next step."""
    dp = DataParallel(model(0, dtype), comm, bucket_bytes=500)
    for number in range(comm.size + 2):
        own, all_samples = samples_of(comm, number, comm.rank), samples_of(comm, number)
        dp.weigh(np.int32(own.size) if number % 2 else own.size)
        # The user's own settings have no say.
        with np.errstate(all="raise"):
            for name in SHAPES:
                dp.grads[name][...] = own.mean() if own.size else np.nan
                dp.ready(name)
            dp.wait()
        for grad in dp.grads.values():
            np.testing.assert_allclose(grad.astype(complex), all_samples.mean(), rtol=rtol)
        step(dp, comm, number + 1, list(SHAPES))


def test_weighed_gradients_are_accumulated_and_may_all_be_nothing(comm):
    dp = DataParallel(model(0), comm)
    dp.weigh(2 * comm.rank + 2)
    for number in (1, 2):
        for name in SHAPES:
            # Of as many samples as this rank has the number.
            dp.grads[name][...] += (comm.rank + 1) * number / (2 * comm.rank + 2)
            if number == 2:
                dp.ready(name)
    dp.wait()
    for grad in dp.grads.values():
        np.testing.assert_allclose(grad, 1.5, rtol=1e-6)
    dp.weigh(0)
    for name in SHAPES:
        dp.grads[name][...] = np.inf
        dp.ready(name)
    dp.wait()
    assert dp.finite and not any(grad.any() for grad in dp.grads.values())


def test_wrong_weights_are_refused(comm):
    dp = DataParallel(model(0), comm)
    for wrong in (-1, np.nan, np.inf, "5", None, True, np.ones(2), 1j):
        with pytest.raises(mpiring.ConfigError, match=(
                rf"rank {comm.rank}: weigh\(tokens\): tokens=.*a number from 0 to 2")):
            dp.weigh(wrong)
    dp.weigh(3)
    with pytest.raises(mpiring.GradientError, match=r"weigh\(2.5\) after weigh\(3\) in one step"):
        dp.weigh(2.5)
    step(dp, comm, 1, list(SHAPES))
    dp.grads["w1"][...] = 1
    dp.ready("w1")
    with pytest.raises(mpiring.GradientError, match=r"weigh\(3\) comes too late"):
        dp.weigh(3)
    for name in ("b1", "w2", "b2", "scale"):
        dp.ready(name)
    dp.wait()
    dp.weigh(3)
    for wrong in ("w3", 3):
        with pytest.raises(mpiring.GradientError, match="there is no gradient"):
            dp.ready(wrong)
    step(dp, comm, 1, list(SHAPES))


def test_a_reducer_that_sends_nothing(comm):
    class Local:
        def __repr__(self):
            return "Local()"

        def reduce(self, collectives, bucket):
            return
            yield

    dp = DataParallel({"w": np.zeros(3)}, comm, reducer=Local())
    dp.grads["w"][...] = comm.rank
    dp.ready("w")
    dp.wait()
    assert (dp.grads["w"] == comm.rank).all()


def test_statistics_of_a_step_are_of_its_operations_only():
    config = mpiring.Config(shared_memory=False, tuning=False)
    with mpiring.init(config=config) as comm, comm.split(0) as part:
        dp, order, sent = DataParallel(model(0), comm, bucket_bytes=500), list(SHAPES)[::-1], []
        step(dp, comm, 1, order)
        for others in (0, 3):
            before = comm.statistics.bytes_sent
            dp.ready(order[0])
            for _ in range(others):
                comm.allreduce(np.ones(1000))
                part.allreduce(np.ones(1000))
            for name in order[1:]:
                dp.ready(name)
            for _ in range(others):
                comm.iallreduce(np.ones(1000)).wait()
            dp.wait()
            sent.append(comm.statistics.bytes_sent - before)
            assert dp.statistics.operations == (4 if comm.size > 1 else 0), "of four buckets"
            assert dp.statistics.communication_s >= dp.statistics.hidden_s >= 0
            assert dp.statistics.bytes_sent == sent[0]
        assert sent[1] > sent[0] or comm.size == 1
        before = comm.statistics
        part.allreduce(np.ones(1000))
        assert comm.statistics == before, "what was split counts for itself"
