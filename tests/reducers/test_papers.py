"""Compares each method with its paper's algorithm in plain NumPy, and counts what it sends."""

import numpy as np
import pytest
from reducing import Model

from mpiring.reducers import Cast, ErrorFeedback, Int8, OneBit, PowerSGD, TopK
from mpiring.reducers.powersgd import orthogonal
from mpiring.transport.base import HEADER_BYTES

SHAPE = (48, 32)
N = SHAPE[0] * SHAPE[1]


def rows_of(step, p, n=N):
    return np.random.default_rng([step, p]).standard_normal((p, n)).astype("float32")


def orthonormal(p):
    """Gram and Schmidt on columns, in the order of the paper."""
    p = p.astype("float64").copy()
    for i in range(p.shape[1]):
        p[:, i] /= np.linalg.norm(p[:, i])
        for j in range(i + 1, p.shape[1]):
            p[:, j] -= (p[:, i] @ p[:, j]) * p[:, i]
    return p


@pytest.mark.parametrize("p", [2, 3, 5])
def test_powersgd_is_the_papers(p):
    rank = 3
    model = Model(lambda: PowerSGD(rank, start_step=0), list(range(p)), {"w": SHAPE})
    # It starts from normal numbers, drawn from the seed and the tensor's name.
    q = np.random.default_rng([0, *b"w"]).standard_normal((rank, SHAPE[1]), "float32").T
    q = q.astype("float64")
    errors = np.zeros((p, *SHAPE))
    for step in range(4):
        rows = rows_of(step, p)
        m = rows.reshape(p, *SHAPE) + errors
        left = orthonormal(np.mean([matrix @ q for matrix in m], axis=0))
        q = np.mean([matrix.T @ left for matrix in m], axis=0)
        mean = left @ q.T
        errors = m - mean
        np.testing.assert_allclose(model.step(rows)[0], mean.reshape(-1), rtol=1e-3, atol=1e-4)


def test_powersgd_of_full_rank_loses_nothing():
    model = Model(lambda: PowerSGD(32, start_step=0, min_compression=0.1), [0, 1], {"w": SHAPE})
    for step in range(2):
        rows = rows_of(step, 2)
        np.testing.assert_allclose(model.step(rows)[0], rows.mean(axis=0), rtol=1e-3, atol=1e-4)


def test_powersgd_finds_its_directions_again():
    """After a gradient of zeros, Q must not stay empty."""
    model = Model(lambda: PowerSGD(2, start_step=0), [0, 1], {"w": SHAPE})
    model.step(np.zeros((2, N), "float32"))
    low_rank = np.outer(np.arange(48), np.arange(32)).reshape(-1).astype("float32")
    for _ in range(3):
        result = model.step(np.array([low_rank, low_rank]))[0]
    np.testing.assert_allclose(result, low_rank, rtol=1e-3, atol=1e-2)


def test_rows_that_depend_on_others_become_zeros():
    row = np.arange(1.0, 9).astype("float32")
    basis = orthogonal(np.array([row, 2 * row, np.zeros(8, "float32")]))
    np.testing.assert_allclose(basis[0], row / np.linalg.norm(row), rtol=1e-6)
    assert not basis[1:].any()


@pytest.mark.parametrize(("momentum", "clip_norm", "p"), [
    (0.0, None, 2), (0.9, None, 3), (0.0, 3.0, 3), (0.9, 3.0, 2)])
def test_topk_is_deep_gradient_compression(momentum, clip_norm, p):
    density, n = 0.05, 200
    model = Model(lambda: TopK(density, momentum=momentum, clip_norm=clip_norm), list(range(p)),
                  {"w": (n,)})
    u, v = np.zeros((p, n), "float32"), np.zeros((p, n), "float32")
    for step in range(6):
        rows = rows_of(step, p, n)
        mean = np.zeros(n, "float32")
        for r in range(p):
            gradient = rows[r].copy()
            if clip_norm:
                limit = clip_norm / np.sqrt(p)
                gradient *= min(1.0, limit / np.linalg.norm(gradient))
            u[r] = np.float32(momentum) * u[r] + gradient
            v[r] = v[r] + u[r]
            chosen = np.argsort(np.abs(v[r]))[-int(np.ceil(density * n)):]
            mean[chosen] += v[r][chosen] / p
            u[r][chosen] = v[r][chosen] = 0
        np.testing.assert_allclose(model.step(rows)[0], mean, rtol=1e-4, atol=1e-5)


def test_the_density_falls_in_five_stages():
    topk = TopK(0.001, warmup_steps=50)
    assert [topk.density_at(step) for step in (0, 9, 10, 20, 30, 39, 40, 50, 10**6)] == [
        0.25, 0.25, 0.0625, 0.015625, 0.004, 0.004, 0.001, 0.001, 0.001]
    assert TopK(0.1, warmup_steps=50).density_at(35) == 0.1
    assert TopK(0.001).density_at(0) == 0.001


def test_on_one_node_momentum_is_that_of_sgd():
    model = Model(lambda: TopK(momentum=0.5), [0, 0], {"w": (10,)})
    velocity = np.zeros(10)
    for step in range(4):
        rows = rows_of(step, 2, 10)
        velocity = 0.5 * velocity + rows.mean(axis=0)
        np.testing.assert_allclose(model.step(rows)[0], velocity, rtol=1e-4, atol=1e-6)


def signs(x, block):
    parts = [x[start:start + block] for start in range(0, x.size, block)]
    return np.concatenate([np.where(np.signbit(s), -1, 1) * np.abs(s).mean() for s in parts])


def test_onebit_compresses_twice_and_feeds_both_errors_back():
    p, block, n = 2, 32, 128
    model = Model(lambda: OneBit(block, warmup_steps=0), [0, 1], {"w": (n,)})
    errors, server = np.zeros((p, n)), np.zeros(n)
    for step in range(4):
        rows = rows_of(step, p, n)
        x = rows + errors
        sent = np.array([signs(row, block) for row in x])
        errors = x - sent
        # What a rank contributes to its own half is added as it is.
        for r, own in enumerate((slice(0, 64), slice(64, 128))):
            sent[r, own], errors[r, own] = x[r, own], 0
        total = sent.mean(axis=0) + server
        mean = signs(total, block)
        server = total - mean
        np.testing.assert_allclose(model.step(rows)[0], mean, rtol=1e-3, atol=1e-4)


def test_int8_can_be_repeated():
    """It is right on average, as its codec is."""
    rows = rows_of(0, 3, 300)
    first, other, model = (Model(lambda: Int8(64, seed=seed), [0, 1, 2], {"w": (300,)})
                           for seed in (5, 6, 5))
    result = first.step(rows)[0].tobytes()
    assert other.step(rows)[0].tobytes() != result == model.step(rows)[0].tobytes()
    assert model.step(rows)[0].tobytes() != result, "the same chance in each step"


SIDE = 512
BIG = {"w": (SIDE, SIDE)}
LEAST = {
    "cast": (lambda: Cast("bfloat16"), 1.99, 2.0), "int8": (Int8, 3.9, 4.0),
    "onebit": (lambda: OneBit(warmup_steps=0), 28, 32.0),
    "feedback": (lambda: ErrorFeedback(Int8()), 3.9, 4.0),
    "topk": (lambda: TopK(0.001), 250, 700),
}


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("name", LEAST)
def test_ratios(name, p):
    make, least, most = LEAST[name]
    model = Model(make, list(range(p)), BIG)
    model.step(rows_of(0, p, SIDE**2))
    dense = 2 * (p - 1) / p * 4 * SIDE**2
    sent = max(model.network.bytes_sent) - HEADER_BYTES
    assert least <= dense / sent <= most


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("inner", [None, Cast("bfloat16")])
def test_the_ratio_of_powersgd_is_its_formulas(p, inner):
    model = Model(lambda: PowerSGD(2, start_step=0, reducer=inner), list(range(p)), BIG)
    model.step(rows_of(0, p, SIDE**2))
    itemsize = 2 if inner else 4
    wanted = 2 * (p - 1) / p * itemsize * 2 * (SIDE + SIDE)
    assert max(model.network.bytes_sent) - HEADER_BYTES == pytest.approx(wanted, rel=0.05)


def test_nodes_of_several_ranks_send_no_more():
    """Each rank has its share of what the node sends."""
    single, double = (Model(Int8, node_of, BIG) for node_of in ([0, 1], [0, 0, 1, 1]))
    single.step(rows_of(0, 2, SIDE**2))
    double.step(rows_of(0, 4, SIDE**2))
    assert double.network.bytes_between[0] == pytest.approx(
        single.network.bytes_between[0], rel=0.01)
