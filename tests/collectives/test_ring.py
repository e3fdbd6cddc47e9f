"""Tests that the ring costs exactly what its paper says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiring.collectives import ring
from mpiring.collectives.operation import Tuning
from mpiring.memory.reduction import Reduction
from mpiring.simulated.prices import Link, NoCombine, ghost
from mpiring.simulated.network import SimulatedNetwork

ALPHA, BETA = 5e-6, 1 / 1e9


def time_of(p, n, piece_bytes=Tuning.ring_bytes, **network):
    net = SimulatedNetwork(p, between=Link(ALPHA, 1 / BETA), payload=False, **network)
    inbox = ghost(ring.inbox_size(n, p, 4, piece_bytes), "float32")
    net.run(lambda channel: ring.allreduce(
        channel, ghost(n, "float32"), inbox, NoCombine(), piece_bytes))
    return net


@pytest.mark.parametrize("p", [2, 3, 4, 5, 7, 8, 16, 33, 64])
def test_steps_bytes_and_virtual_time(p):
    n = p * 1000
    net = time_of(p, n)
    assert net.messages_sent == [2 * (p - 1)] * p
    assert net.bytes_sent == [2 * (p - 1) * 4 * n // p] * p
    assert net.time_s == pytest.approx(
        2 * (p - 1) * ALPHA + 2 * (p - 1) / p * 4 * n * BETA, rel=1e-9)


@pytest.mark.parametrize(("p", "k"), [(2, 3), (3, 8), (4, 2), (7, 3), (8, 8), (33, 2)])
def test_pieces_cost_messages_but_neither_bytes_nor_time(p, k):
    """A piece is longer on the wire than the latency, which therefore counts once, at the end."""
    piece_bytes = 10_000
    n = p * k * piece_bytes // 4
    net = time_of(p, n, piece_bytes)
    assert net.messages_sent == [2 * (p - 1) * k] * p
    assert net.bytes_sent == [2 * (p - 1) * 4 * n // p] * p
    assert net.time_s == pytest.approx(ALPHA + 2 * (p - 1) / p * 4 * n * BETA, rel=1e-9)


def test_chunks_that_fit_one_piece_are_not_cut():
    for p in (2, 5):
        n = p * Tuning.ring_bytes // 4
        assert time_of(p, n).messages_sent == [2 * (p - 1)] * p
        assert time_of(p, n + 1).messages_sent == [4 * (p - 1)] * p


@given(n=st.integers(0, 10**9), p=st.integers(2, 1000))
def test_the_scratch_memory_is_one_chunk_or_two_pieces(n, p):
    chunk, size = -(-n // p), ring.inbox_size(n, p, 4)
    assert size <= chunk + 1 and 4 * size <= 2 * (Tuning.ring_bytes + 4)
    assert ring.inbox_size(n, 1, 4) == 0


def test_adding_waits_for_a_piece_and_no_more_than_its_piece():
    """While the first piece is added, the second one is under way in both directions."""
    posted = []

    class Add(NoCombine):
        def accumulate(self, out, contribution):
            posted.append(net.messages_sent[0])

    net = SimulatedNetwork(2, between=Link(ALPHA, 1 / BETA), payload=False)
    net.run(lambda channel: ring.reduce_scatter(
        channel, [ghost(100, "float32")] * 2, ghost(20, "float32"),
        Add() if channel.rank == 0 else NoCombine(), piece_bytes=40))
    assert posted == [*range(2, 11), 10]


def test_a_rank_that_is_alone_prepares_and_finishes_too():
    class Change(NoCombine):
        def prepare(self, x):
            x += 1

        def finish(self, chunk):
            chunk *= 2

    x, y = np.ones(3), np.ones(3)
    SimulatedNetwork(1).run(lambda net: ring.allreduce(net, x, np.empty(0), Change()))
    SimulatedNetwork(1).run(lambda net: ring.reduce_scatter(net, [y], np.empty(0), Change()))
    assert list(x) == list(y) == [4, 4, 4]


def test_a_payload_free_ring_of_10_gigabytes_needs_no_memory():
    assert time_of(2, 2_500_000_000).time_s == pytest.approx(10, rel=1e-3)


def test_ranks_that_share_a_nic_in_ring_order_cost_no_more():
    """Only one rank of each node sends out, so the NIC is not shared."""
    assert time_of(8, 8000, node_of=2).time_s <= time_of(8, 8000).time_s


@settings(deadline=None, max_examples=200)
@given(p=st.integers(1, 9), n=st.integers(0, 50), seed=st.integers(0, 2**32),
       op=st.sampled_from(["sum", "mean", "max", "min", "prod"]),
       dtype=st.sampled_from(["float32", "float64"]))
def test_any_input_gives_close_results_and_equal_bits(p, n, seed, op, dtype):
    rows = np.random.default_rng(seed).standard_normal((p, n)).astype(dtype)
    xs = list(rows.copy())
    inbox_size = ring.inbox_size(n, p, np.dtype(dtype).itemsize)
    SimulatedNetwork(p, seed=seed).run(lambda net: ring.allreduce(
        net, xs[net.rank], np.empty(inbox_size, dtype), Reduction(op, dtype, p)))
    want = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "prod": np.prod}[op]
    np.testing.assert_allclose(xs[0], want(rows, axis=0), rtol=1e-4, atol=1e-5)
    assert all(x.tobytes() == xs[0].tobytes() for x in xs)


def test_a_mean_in_16_bits_does_not_overflow_on_the_way():
    xs = [np.array([60000.0], "float16") for _ in range(4)]
    SimulatedNetwork(4).run(lambda net: ring.allreduce(
        net, xs[net.rank], np.empty(1, "float16"), Reduction("mean", "float16", 4)))
    assert xs[0][0] == 60000
