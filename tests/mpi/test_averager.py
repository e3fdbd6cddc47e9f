"""Tests the averager on its own, on real MPI."""

import time

import numpy as np
import pytest

import mpiring
from mpiring.buckets.bucket import TensorSpec
from mpiring.training.averager import Averager
from mpiring.training.fused import Fusion
from mpiring.training.search import Choice

pytestmark = pytest.mark.mpi

SHAPES = {"a": (30,), "b": (4, 5), "c": (), "d": (70,)}
TENSORS = [TensorSpec(name, shape, np.dtype("float32")) for name, shape in SHAPES.items()]
ORDER = ["c", "a", "d", "b"]
OTHER = ["b", "d", "a", "c"]


def write(averager, comm, step, order=ORDER):
    """Write tensors that differ between ranks; return their means."""
    means = {}
    for name in order:
        rows = [np.random.default_rng([step, rank, *name.encode()]).integers(
            -99, 99, SHAPES[name]).astype("float32") for rank in range(comm.size)]
        averager.views[name][...] = rows[comm.rank]
        means[name] = np.mean(rows, axis=0, dtype="float32")
        averager.ready(name)
    return means


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("bucket_bytes", [100, 300])
@pytest.mark.parametrize("fused", [None, OTHER])
def test_tensors_become_their_means_whatever_the_buckets(overlap, bucket_bytes, fused, comm):
    averager = Averager(TENSORS, comm, Fusion(bucket_bytes, order=fused), overlap=overlap)
    assert len(averager.buckets) > (2 if bucket_bytes == 100 else 1)
    assert averager.order == (fused or [*SHAPES][::-1])
    assert sorted(averager.home) == sorted(SHAPES)
    views = dict(averager.views)
    for step, order in enumerate((OTHER, ORDER, OTHER)):
        assert averager.steps == step
        means = write(averager, comm, step, order)
        averager.wait()
        assert averager.finite and averager.due is None
        for name, mean in means.items():
            assert averager.views[name] is views[name]
            np.testing.assert_allclose(views[name], mean, rtol=1e-5, atol=1e-5)


def test_an_averager_continues_another_one(comm):
    """Its steps and what is compared; its settings, if only the buckets are others."""
    before = Averager(TENSORS, comm, Fusion(100))
    write(before, comm, 0)
    before.wait()
    before.compared["optimizer"] = "after an update"
    before.use(Choice(300, 3, short="native"))
    assert before.due == Fusion(300, order=before.order)
    before.use(Choice(100, 3, short="native"))
    assert before.due is None, "these buckets fit again"
    before.load_own_state_dict({"order": ORDER, "reducers": []})
    due = before.due
    assert due.order == ORDER and due.bucket_bytes == 100
    before.close()
    assert comm.tunable.operations_in_flight == comm.config.operations_in_flight
    after = Averager(TENSORS, comm, due, before=before)
    assert after.steps == 1 and after.order == ORDER and after.due is None
    assert after.weighing is before.weighing and after.compared["optimizer"] == "after an update"
    assert after.choice == before.choice and comm.tunable.operations_in_flight == 3
    means = write(after, comm, 1)
    after.wait()
    for name, mean in means.items():
        np.testing.assert_allclose(after.views[name], mean, rtol=1e-5, atol=1e-5)
    after.close()
    fewer = Averager(TENSORS[:2], comm, Fusion(100), before=after)
    assert fewer.steps == 2 and fewer.choice.short == "auto"
    with pytest.raises(mpiring.ConfigError, match="the loaded state is of another model: it has"):
        fewer.load_own_state_dict({"order": ORDER, "reducers": []})


def test_seconds_in_which_two_buckets_are_under_way_count_once(apart):
    tensors = [TensorSpec(f"t{i}", (200_000,), np.dtype("float32")) for i in range(8)]
    averager = Averager(tensors, apart, Fusion(800_000))
    for _ in range(3):
        began_s = time.monotonic()
        for tensor in tensors:
            averager.ready(tensor.name)
        averager.wait()
        assert averager.statistics.operations == (8 if apart.size > 1 else 0)
        assert averager.statistics.communication_s <= time.monotonic() - began_s


def test_a_nan_is_in_all_slices(comm):
    averager = Averager(TENSORS, comm, Fusion(100))
    averager.scatter()
    for step in range(3):
        for name in ORDER:
            bad = name == "a" and comm.rank == 0 and step != 1
            averager.views[name][...] = np.nan if bad else 1
            averager.ready(name)
        averager.wait()
        assert averager.finite == (step == 1)
        for bucket in averager.buckets:
            assert step != 1 or np.isfinite(bucket.flat[averager.own_slice(bucket)]).all()
        if step != 1:
            assert all(np.isnan(view).all() for view in averager.views.values())


def test_mistakes_are_named(comm):
    averager = Averager(TENSORS, comm, Fusion(100))
    with pytest.raises(mpiring.GradientError, match="there is no gradient 'aa'; did you mean 'a'"):
        averager.ready("aa")
    averager.ready("a")
    with pytest.raises(mpiring.GradientError, match="gradient 'a' was marked ready twice; call w"):
        averager.ready("a")
    with pytest.raises(mpiring.GradientError, match="with 3 of 4 gradients missing: d, c, b; "):
        averager.wait()
    with pytest.raises(mpiring.GradientError, match="scatter.. during a step; call it between"):
        averager.scatter()
    for name in ("b", "c", "d"):
        averager.ready(name)
    averager.wait()
    averager.close()
    with pytest.raises(mpiring.ConfigError, match="bucket_bytes=0: expected a whole number"):
        Averager(TENSORS, comm, Fusion(0))
