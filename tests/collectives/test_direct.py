"""Tests that direct rounds once, costs what a ring costs, and believes no rank too early."""

import contract
import ml_dtypes
import numpy as np
import pytest
from cluster import run
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiring.collectives import direct
from mpiring.jit import sums
from mpiring.simulated.prices import Link, NoCombine, ghost
from mpiring.simulated.network import SimulatedNetwork

SIXTEEN_BIT = ["float16", ml_dtypes.bfloat16]


def allreduced(rows, op, seed=0, algorithm="auto"):
    """Run it on every rank, and return what rank 0 has when all have the same bits."""
    xs = [row.copy() for row in rows]
    run(range(len(xs)), lambda collectives: collectives.allreduce(
        xs[collectives.rank], op=op, algorithm=algorithm), seed=seed)
    assert all(x.tobytes() == xs[0].tobytes() for x in xs)
    return xs[0]


@settings(deadline=None, max_examples=200)
@given(p=st.integers(1, 16), n=st.integers(0, 300), seed=st.integers(0, 2**32),
       op=st.sampled_from(["sum", "mean", "prod"]), dtype=st.sampled_from(SIXTEEN_BIT),
       anything=st.booleans())
def test_16_bits_are_combined_in_rank_order_and_rounded_once(p, n, seed, op, dtype, anything):
    random = np.random.default_rng(seed)
    rows = (random.integers(0, 1 << 16, (p, n), dtype=np.uint16).view(dtype) if anything else
            (random.standard_normal((p, n)) * 10 ** random.uniform(-8, 4, (p, n))).astype(dtype))
    want = contract.rounded_once(rows, op) if p > 1 else rows[0]
    assert contract.same_bits(allreduced(rows, op, seed, "direct"), want)
    xs = list(rows.copy())
    chunks, _ = run(range(p), lambda collectives: collectives.reduce_scatter(
        xs[collectives.rank], op=op), seed=seed, algorithm="direct")
    assert contract.same_bits(np.concatenate(chunks), want)


@pytest.mark.parametrize(("p", "itemsize"), [(2, 4), (3, 2), (8, 4), (16, 2)])
def test_bytes_time_and_memory(p, itemsize):
    """As many bytes as a ring, no NIC waits for another, and little scratch memory."""
    n, dtype, bandwidth = p * 500_000, f"f{itemsize}", 1e8
    inbox = ghost(direct.inbox_size(n, p, itemsize), dtype)
    net = SimulatedNetwork(p, between=Link(5e-6, bandwidth), payload=False)
    net.run(lambda channel: direct.allreduce(channel, ghost(n, dtype), inbox, NoCombine()))
    limit_bytes = 2 * (p - 1) * n * itemsize // p
    assert net.bytes_sent == [limit_bytes] * p
    # The simulated NIC takes messages in the order they were posted, not as they could come in.
    assert limit_bytes / bandwidth <= net.time_s <= 1.15 * limit_bytes / bandwidth
    for elements in (p, 10_000, n, 100_000_000):
        assert direct.inbox_size(elements, p, itemsize) * itemsize <= (
            -(-elements // p) * itemsize + (1 << 20))


@pytest.mark.parametrize("node_of, loads", [([0, 1, 2], False), ([0, 0, 1], True)])
def test_a_rank_alone_on_its_node_loads_no_compiled_sums(node_of, loads, monkeypatch):
    """They take 50 MiB of a process that waits for the wire."""
    asked = []
    monkeypatch.setattr(sums, "code", asked.append)
    xs = [np.full(3 << 19, rank + 1, "float32") for rank in range(len(node_of))]
    run(node_of, lambda collectives: collectives.allreduce(xs[collectives.rank]),
        algorithm="direct")
    assert all((x == sum(range(1, len(xs) + 1))).all() for x in xs)
    assert bool(asked) == loads
