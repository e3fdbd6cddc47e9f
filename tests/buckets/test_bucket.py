"""Tests the plan of fusion, and that every gradient has its own aligned place."""

import numpy as np
import pytest
import simulated_gpu
from hypothesis import given
from hypothesis import strategies as st

from mpiring import ConfigError
from mpiring.buckets.bucket import (
    FIRST_BUCKET_BYTES, Bucket, TensorSpec, owners_by_cost, plan, usual_bytes)
from mpiring.gpu.device import Device
from mpiring.gpu.interface import await_event
from mpiring.memory.arrays import CACHE_LINE_BYTES

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
DTYPES = st.sampled_from(["float16", "float32", "float64", "complex128"]).map(np.dtype)


@st.composite
def tensors(draw):
    pairs = draw(st.lists(st.tuples(SHAPES, DTYPES), min_size=1, max_size=12))
    return [TensorSpec(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(pairs)]


def specs(*sizes):
    return [TensorSpec(f"t{i}", (size,), np.dtype("float32")) for i, size in enumerate(sizes)]


@given(tensors=tensors(), bucket_bytes=st.integers(1, 5000))
def test_any_plan(tensors, bucket_bytes):
    buckets = plan(tensors, bucket_bytes)
    names = [tensor.name for bucket in buckets for tensor in bucket.tensors]
    assert sorted(names) == sorted(tensor.name for tensor in tensors)
    place = {tensor.name: i for i, tensor in enumerate(tensors)}
    last = [place[bucket.tensors[-1].name] for bucket in buckets]
    assert last == sorted(last), "buckets become full in their order"
    for bucket in buckets:
        assert {tensor.dtype for tensor in bucket.tensors} == {bucket.dtype}
        order = [place[tensor.name] for tensor in bucket.tensors]
        assert order == sorted(order)
        assert bucket.size * bucket.dtype.itemsize <= bucket_bytes or len(bucket.tensors) == 1
    assert plan(tensors, bucket_bytes) == buckets


@given(costs=st.lists(st.integers(0, 9), max_size=12), size=st.integers(1, 5))
def test_owners_have_similar_costs(costs, size):
    owners = owners_by_cost({f"t{i}": cost for i, cost in enumerate(costs)}, size)
    sums = [0] * size
    for i, cost in enumerate(costs):
        sums[owners[f"t{i}"]] += cost
    # No rank would have more if it gave its last tensor away.
    assert max(sums) - min(sums) <= max(costs, default=0)
    assert list(owners_by_cost(dict.fromkeys("abcd", 1.0), 3).values()) == [0, 1, 2, 0]


@given(tensors=tensors(), data=st.data(), bucket_bytes=st.integers(1, 5000))
def test_tensors_with_owners_are_complete_in_the_slices_of_these(tensors, data, bucket_bytes):
    size = 3
    owners = data.draw(st.dictionaries(
        st.sampled_from([tensor.name for tensor in tensors]), st.integers(0, size - 1)))
    buckets = plan(tensors, bucket_bytes, owners=owners)
    assert sorted(tensor.name for bucket in buckets for tensor in bucket.tensors) == sorted(
        tensor.name for tensor in tensors)
    for bucket in buckets:
        bounds, start = bucket.bounds(size), 0
        assert bounds[0] == 0 and bounds[-1] == bucket.size and sorted(bounds) == [*bounds]
        assert bucket.bounds(1)[0] == 0 and bucket.bounds(1)[-1] == bucket.size
        is_owned = {tensor.name in owners for tensor in bucket.tensors}
        assert is_owned == {bool(bucket.owners)}
        for tensor in bucket.tensors if bucket.owners else ():
            owner = owners[tensor.name]
            assert bounds[owner] <= start and start + tensor.padded_size <= bounds[owner + 1]
            start += tensor.padded_size


def test_a_bucket_has_tensors_of_all_owners():
    """Unless an owner has few tensors, and the bucket would become long."""
    def owners_in_buckets(owners):
        buckets = plan(specs(*[100] * len(owners)), 1, owners={
            f"t{i}": owner for i, owner in enumerate(owners)})
        return [bucket.owners for bucket in buckets]

    assert owners_in_buckets([0, 1, 1, 0, 0, 0, 1]) == [(0, 1), (0, 1), (0, 0, 1)]
    assert owners_in_buckets([0] * 9 + [1]) == [(0,) * 4, (0,) * 4, (0, 1)]
    assert owners_in_buckets([2, 2]) == [(2,), (2,)]


@given(tensors=tensors())
def test_views_are_apart_and_aligned(tensors):
    for index, bucket_plan in enumerate(plan(tensors, 2000)):
        bucket = Bucket(index, bucket_plan, np.empty)
        assert not bucket.flat.any()
        start = bucket.flat.ctypes.data
        for number, (name, view) in enumerate(bucket.views.items(), start=1):
            assert (view.ctypes.data - start) % CACHE_LINE_BYTES == 0 or not view.size
            view[...] = number
            assert np.shares_memory(view, bucket.flat) or not view.size
        for number, tensor in enumerate(bucket_plan.tensors, start=1):
            assert bucket.views[tensor.name].shape == tensor.shape
            assert (bucket.views[tensor.name] == number).all()


def test_filling_up():
    (a, b, c) = plan(specs(16, 16, 100, 16), 4 * 32)
    assert [tensor.name for tensor in a.tensors] == ["t0", "t1"]
    assert [tensor.name for tensor in b.tensors] == ["t2"]
    assert [tensor.name for tensor in c.tensors] == ["t3"]
    assert b.size == 112, "padded to cache lines"


def test_the_first_and_the_last_buckets_are_short():
    """What leaves early has the more computing to hide behind, what leaves last has none."""
    quarter = FIRST_BUCKET_BYTES // 4 // 4
    buckets = plan(specs(*[quarter] * 40), 3 * FIRST_BUCKET_BYTES)
    assert [len(bucket.tensors) for bucket in buckets] == [4, 8, 12, 8, 4, 4]
    assert [len(bucket.tensors) for bucket in plan(specs(*[quarter] * 8), FIRST_BUCKET_BYTES // 2)
            ] == [2] * 4


def test_buckets_are_usually_short_between_a_few_nodes():
    mib = [usual_bytes(nodes) >> 20 for nodes in (1, 2, 32, 64, 128, 200, 1000)]
    assert mib == [25, 4, 4, 8, 16, 25, 25]


@pytest.mark.parametrize("bucket_bytes", [0, -1])
def test_a_bucket_needs_room(bucket_bytes):
    with pytest.raises(ConfigError, match="bucket_bytes=.*expected a whole number of at least 1"):
        plan(specs(1), bucket_bytes)


def test_retired_views_cannot_be_mistaken_for_gradients():
    bucket = Bucket(0, plan(specs(3), 100)[0], np.empty)
    view = bucket.views["t0"]
    bucket.retire()
    with pytest.raises(ValueError, match="read-only"):
        view += 1
    assert np.isnan(view).all()


def test_only_tensors_are_named_and_poisoned():
    """Not what lies between them, which Reducers read and may write."""
    bucket = Bucket(0, plan(specs(3, 5, 7), 1000)[0], np.empty)
    bucket.flat[3:16] = np.nan
    assert bucket.nonfinite_names(0, bucket.plan.size) == []
    bucket.views["t2"][6] = np.inf
    assert bucket.nonfinite_names(0, bucket.plan.size) == ["t2"]
    bucket.poison()
    for view in bucket.views.values():
        assert np.isnan(view).all()
        view[...] = 0
    assert not bucket.flat.any()


class Late:
    """A mark behind something that is done at the third look."""

    def __init__(self, action):
        self.looks, self.action = 0, action

    def test(self):
        self.looks += 1
        if self.looks == 3:
            self.action()
        return self.looks >= 3


def test_it_is_looked_at_when_others_have_written_it():
    """They may do that on streams of their own, as PyTorch does."""
    device = Device(simulated_gpu.SimulatedGpu())
    vector = device.allocate(64).view(np.float32)
    bucket = Bucket(0, plan(specs(16), 64)[0],
                    lambda n, dtype: device.gpu.array(vector, (n,)), device)
    await_event(device.gpu.mark())
    for value in (np.inf, 1.0):
        bucket.written.append(Late(lambda value=value: simulated_gpu.content(vector).fill(value)))
        assert bucket.holds_finite(bucket.flat) == np.isfinite(value)
