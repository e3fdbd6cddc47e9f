"""Holds Adasum to the formula of its paper, on simulated clusters of 1 to 8 ranks."""

import ml_dtypes
import numpy as np
import pytest
from cluster import run
from reducing import Model, count

from mpiring.errors import ConfigError
from mpiring.reducers import Adasum

EPS = {"float16": 2.0 ** -10, "bfloat16": 2.0 ** -7, "float32": 2.0 ** -23, "float64": 2.0 ** -52}
DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in EPS}


def pairwise(vectors):
    """Combine vectors of float64 as the docstring says, in plain NumPy."""
    def combined(a, b):
        factors = [1 - a @ b / (2 * (x @ x)) if x.any() else 1 for x in (a, b)]
        return factors[0] * a + factors[1] * b

    vectors = list(vectors)
    paired = 1 << len(vectors).bit_length() - 1
    for r in range(paired, len(vectors)):
        vectors[r - paired] = combined(vectors[r - paired], vectors[r])
    del vectors[paired:]
    while len(vectors) > 1:
        vectors = [combined(*pair) for pair in zip(vectors[::2], vectors[1::2])]
    return vectors[0]


def on_ranks(rows, bounds=None, node_of=None):
    """Return what `Adasum.schedule_for` leaves on each rank, given each rank's vector."""
    vectors = [row.copy() for row in rows]
    bounds = [0, vectors[0].size] if bounds is None else bounds
    run(node_of or range(len(rows)),
        lambda collectives: Adasum.schedule_for(collectives, vectors[collectives.rank], bounds))
    assert all(x.tobytes() == vectors[0].tobytes() for x in vectors)
    return vectors[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", range(1, 9))
def test_each_tensor_of_a_bucket_is_combined_by_the_formula(size, dtype):
    """One is longer than the blocks that are computed at a time; one is zeros on some ranks."""
    shapes = {"w": (70, 500), "b": (7,), "scale": (), "none": (0,), "zeros": (3, 5), "v": (64,)}
    rows = np.random.default_rng(size).standard_normal((size, count(shapes)))
    ends = np.cumsum([np.prod(shape, dtype=int) for shape in shapes.values()])
    rows[::2, ends[3]:ends[4]] = 0
    rows += np.random.default_rng(0).standard_normal(count(shapes))
    rows[::2, ends[3]:ends[4]] = 0
    rows = rows.astype(DTYPES[dtype])
    result = Model(Adasum, list(range(size)), shapes, DTYPES[dtype]).step(rows)[0]
    starts = [0, *ends[:-1]]
    for start, end in zip(starts, ends):
        wanted = pairwise(rows[:, start:end].astype(np.float64))
        difference = np.abs(result[start:end] - wanted)
        # It is rounded once for each level.
        assert (difference <= 6 * EPS[dtype] * np.abs(rows[:, start:end]).astype(
            np.float64).sum(axis=0)).all()


@pytest.mark.parametrize("node_of", [[0, 0, 0], [0, 1, 0, 1, 0, 1], [0, 0, 0, 1, 2, 2, 2]])
def test_it_does_not_depend_on_nodes(node_of):
    rows = np.random.default_rng(0).standard_normal((len(node_of), 1000), np.float32)
    bounds = [0, 0, 1, 300, 1000]
    assert on_ranks(rows, bounds, node_of).tobytes() == on_ranks(rows, bounds).tobytes()


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_orthogonal_vectors_add_up_and_equal_ones_stay(size):
    rows = np.kron(np.eye(size), np.arange(1, 6)).astype(np.float32)
    assert (on_ranks(rows) == rows.sum(axis=0)).all()
    rows = np.tile(np.arange(-7, 8, dtype=np.float32), (size, 1))
    assert (on_ranks(rows) == rows[0]).all()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_parallel_vectors_from_tiny_to_huge_are_averaged(size, dtype):
    limits = np.finfo(dtype)
    lengths = np.geomspace(float(limits.tiny), float(limits.max) ** 0.5, size)
    a = np.random.default_rng(size).standard_normal(1024)
    for order in (slice(None), slice(None, None, -1)):
        rows = np.outer(lengths[order], a).astype(dtype)
        true = rows.astype(np.float64).sum(axis=0) / size
        error = np.linalg.norm(true - on_ranks(rows)) / np.linalg.norm(true)
        assert error / 100 < EPS[dtype]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_norms_beyond_the_range_of_the_dtype(dtype):
    """Neither their squares nor the factors may overflow."""
    limits = ml_dtypes.finfo(DTYPES[dtype])
    for value in (float(limits.max) / 4, float(limits.smallest_normal)):
        rows = np.full((4, 5000), value).astype(DTYPES[dtype])
        rows[::2, ::2] *= -1
        # Of each pair half the elements are opposite: they are orthogonal.
        wanted = pairwise(rows.astype(np.float64))
        np.testing.assert_allclose(on_ranks(rows).astype(np.float64), wanted, rtol=8 * EPS[dtype])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rank", range(3))
def test_what_is_not_finite_on_one_rank_is_finite_on_none(rank, value):
    """In its tensor; also where the others have zeros, whose factor is always 1."""
    for others in (np.zeros((3, 8)), np.random.default_rng(0).standard_normal((3, 8))):
        rows = others.astype(np.float32)
        rows[rank, 2] = value
        result = on_ranks(rows, [0, 5, 8])
        assert not np.isfinite(result[:5]).any() and np.isfinite(result[5:]).all()


@pytest.mark.parametrize("dtype", ["int32", "complex64"])
def test_dtypes_that_are_not_floating_are_refused(dtype):
    with pytest.raises(ConfigError, match=rf"rank 0: Adasum of {dtype} \(3,\).*floating"):
        on_ranks(np.ones((1, 3), dtype))
