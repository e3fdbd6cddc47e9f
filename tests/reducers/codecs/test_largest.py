"""Tests that exactly the largest elements are found, and come back from a payload."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiring import ConfigError
from mpiring.reducers.codecs import largest
from mpiring.reducers.codecs.largest import pack, packed_size, select_largest, unpack

N = 300_000                                     # sampled, and several blocks


def inputs():
    random = np.random.default_rng(0)
    few = random.standard_normal(N) * (random.random(N) < 0.002)
    periodic = np.zeros(N)
    periodic[::largest._SAMPLE // 8] = 1 + np.arange(periodic[::largest._SAMPLE // 8].size)
    vectors = {
        "normal": random.standard_normal(N), "cubes": random.laplace(size=N)**3,
        "zeros": np.zeros(N), "equal": -np.ones(N), "rising": np.arange(N),
        "falling": -np.arange(N)[::-1], "few": few, "periodic": periodic,
        "tiny": random.standard_normal(N) * 1e-40,
        "last": np.where(np.arange(N) < N - 500, 0, 9)}
    return [pytest.param(x.astype("float32"), id=name) for name, x in vectors.items()]


def check(x, k, key=0):
    with np.errstate(all="raise"):
        indices, finite = select_largest(x, k, key)
    assert finite is True
    assert indices.dtype == np.int64 and indices.size == k
    assert (np.diff(indices) > 0).all()
    if k:
        assert 0 <= indices[0] and indices[-1] < x.size
        magnitudes = np.abs(x)
        out = np.delete(magnitudes, indices)
        assert out.size == 0 or magnitudes[indices].min() >= out.max()


@pytest.mark.parametrize("x", inputs())
def test_exactly_the_largest(x):
    for k in (0, 1, 30, 300, 30_000, N - 1, N):
        check(x, k, key=k)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_short_vectors(data):
    x = np.array(data.draw(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False),
                                    max_size=50)), np.float32)
    check(x, data.draw(st.integers(0, x.size)))


@pytest.mark.parametrize(("bad", "n", "how_many"), [
    (np.inf, N, 1), (-np.inf, 1000, 1), (np.nan, 1, 1), (np.nan, N, 1000), (np.inf, 1000, 1000),
    (-np.inf, N, 1000)])
def test_not_finite(bad, n, how_many):
    x = np.random.default_rng(1).standard_normal(n).astype("float32")
    x[np.random.default_rng(2).integers(0, n, how_many)] = bad
    for k in {0, 1, n // 3, n}:
        indices, finite = select_largest(x, k, 0)
        assert finite is False
        assert indices.size == k and np.unique(indices).size == k
        assert ((0 <= indices) & (indices < n)).all()


def test_equal_keys_give_equal_results():
    x = np.random.default_rng(0).integers(0, 5, N).astype("float32")
    assert np.array_equal(select_largest(x, 300, 4)[0], select_largest(x, 300, 4)[0])


def test_memory_is_that_of_some_blocks():
    x = np.zeros(4 << 20, np.float32)           # of which all are equal to the least of the largest
    select_largest(x, 4000, 0)
    tracemalloc.start()
    select_largest(x, 4000, 0)
    assert tracemalloc.get_traced_memory()[1] < x.nbytes / 3
    tracemalloc.stop()


@pytest.mark.parametrize("n", [0, 1, 65_535, 65_536, 65_537, N])
def test_sparse_vectors_come_back(n):
    random = np.random.default_rng(n)
    for k in {0, min(n, 1), n // 100, n}:
        indices = np.sort(random.permutation(n)[:k])
        values = random.standard_normal(k).astype("float32")
        assert packed_size(k, n) == 6 * k + 4 * -(-n // 65_536)
        payload = np.full(packed_size(k, n), 0xff, np.uint8)
        pack(values, indices, n, payload)
        got_values, got_indices = unpack(payload, k, n)
        assert np.array_equal(got_values, values) and got_values.dtype == np.float32
        assert np.array_equal(got_indices, indices) and got_indices.dtype == np.int64
        payload[:] = 0
        assert np.array_equal(got_values, values), "a copy"


def test_a_payload_of_another_length_is_refused():
    with pytest.raises(ConfigError, match="expected 16 bytes"):
        unpack(np.zeros(17, np.uint8), 2, 100)
    with pytest.raises(ConfigError, match="expected 16 bytes"):
        pack(np.zeros(2, np.float32), np.arange(2), 100, np.zeros(15, np.uint8))
