"""Tests that the ring costs exactly what its paper says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiring.collectives import ring
from mpiring.memory.reduction import Reduction
from mpiring.transport.simulated import Link, NoCombine, SimulatedNetwork, ghost

ALPHA, BETA = 5e-6, 1 / 1e9


def time_of(p, n, **network):
    net = SimulatedNetwork(p, between=Link(ALPHA, 1 / BETA), payload=False, **network)
    net.run(lambda channel: ring.allreduce(
        channel, ghost(n, "float32"), ghost(ring.inbox_size(n, p), "float32"), NoCombine()))
    return net


@pytest.mark.parametrize("p", [2, 3, 4, 5, 7, 8, 16, 33, 64])
def test_steps_bytes_and_virtual_time(p):
    n = p * 1000
    net = time_of(p, n)
    assert net.messages_sent == [2 * (p - 1)] * p
    assert net.bytes_sent == [2 * (p - 1) * 4 * n // p] * p
    assert net.time_s == pytest.approx(
        2 * (p - 1) * ALPHA + 2 * (p - 1) / p * 4 * n * BETA, rel=1e-9)


def test_a_payload_free_ring_of_100_gigabytes_needs_no_memory():
    assert time_of(8, 25_000_000_000).time_s == pytest.approx(175, rel=1e-3)


def test_ranks_that_share_a_nic_in_ring_order_cost_no_more():
    """Only one rank of each node sends out, so the NIC is not shared."""
    assert time_of(8, 8000, ranks_per_node=2).time_s <= time_of(8, 8000).time_s


@settings(deadline=None, max_examples=200)
@given(p=st.integers(1, 9), n=st.integers(0, 50), seed=st.integers(0, 2**32),
       op=st.sampled_from(["sum", "mean", "max", "min", "prod"]),
       dtype=st.sampled_from(["float32", "float64"]))
def test_any_input_gives_close_results_and_equal_bits(p, n, seed, op, dtype):
    rows = np.random.default_rng(seed).standard_normal((p, n)).astype(dtype)
    xs = list(rows.copy())
    SimulatedNetwork(p, seed=seed).run(lambda net: ring.allreduce(
        net, xs[net.rank], np.empty(ring.inbox_size(n, p), dtype), Reduction(op, dtype, p)))
    want = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "prod": np.prod}[op]
    np.testing.assert_allclose(xs[0], want(rows, axis=0), rtol=1e-4, atol=1e-5)
    assert all(x.tobytes() == xs[0].tobytes() for x in xs)


def test_a_mean_in_16_bits_does_not_overflow_on_the_way():
    xs = [np.array([60000.0], "float16") for _ in range(4)]
    SimulatedNetwork(4).run(lambda net: ring.allreduce(
        net, xs[net.rank], np.empty(1, "float16"), Reduction("mean", "float16", 4)))
    assert xs[0][0] == 60000
