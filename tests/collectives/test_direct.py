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
from mpiring.operations.agreement import Call
from mpiring.collectives.operation import Tuning
from mpiring.operations.algorithms import Case, choose
from mpiring.errors import BufferMismatchError
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
    assert contract.same_bits(allreduced(rows, op, seed), want)
    xs = list(rows.copy())
    mine, _ = run(range(p), lambda collectives: collectives.reduce_scatter(
        xs[collectives.rank], op=op), seed=seed)
    assert contract.same_bits(np.concatenate(mine), want)


@pytest.mark.parametrize("p", [2, 3, 8, 16])
def test_small_addends_are_not_lost(p):
    """2048 + 1 + 1 … stays 2048 in float16 if it is rounded at every hop."""
    rows = [np.array([2048.0 if rank == 0 else 1.0] * p, "float16") for rank in range(p)]
    want = np.float16(2048 + p - 1)
    assert (allreduced(rows, "sum") == want).all()
    if p >= 8:
        assert not (allreduced(rows, "sum", algorithm="ring") == want).all()


def test_sums_that_cancel_or_overflow_on_the_way():
    rows = [np.full(9, x, "float16") for x in (60000, 60000, 1, -60000, -60000)]
    assert (allreduced(rows, "sum") == 1).all()
    assert (allreduced(rows[:2], "mean") == 60000).all()
    assert np.isposinf(allreduced(rows[:2], "sum")).all()


def test_infinity_and_nan_reach_every_rank():
    rows = [np.array(x, "float16") for x in (
        [np.inf, np.inf, np.nan, 1, 2.0**-24], [1, -np.inf, 1, -0.0, 2.0**-24],
        [1, 1, 1, 1, -(2.0**-24)])]
    total = allreduced(rows, "sum")
    assert np.isposinf(total[0]) and np.isnan(total[1:3]).all()
    assert total[3] == 2 and total[4] == np.float16(2.0**-24)


def chosen(dtype, op, wish):
    return choose(Case(16, np.dtype(dtype), op, 4, 4, Tuning()), wish).name


def test_auto_takes_it_where_a_ring_would_round_at_every_hop():
    for dtype in SIXTEEN_BIT:
        assert {chosen(dtype, op, "auto") for op in ("sum", "mean", "prod")} == {"direct"}
        assert chosen(dtype, "max", "auto") == "ring"
        assert chosen(dtype, "sum", "ring") == "ring"
    assert chosen("float64", "sum", "direct") == "direct"


@pytest.mark.parametrize("p", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("itemsize", [2, 4])
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
    assert inbox.nbytes <= n * itemsize // p + (1 << 20)


VARIANTS = {
    "usual": (12, "float16", "sum"),
    "shorter": (11, "float16", "sum"),
    "much shorter": (0, "float16", "sum"),
    "other dtype": (12, np.dtype(ml_dtypes.bfloat16), "sum"),
    "other op": (12, "float16", "prod"),
    "ring": (12, "float32", "sum"),
}


@settings(deadline=None, max_examples=500)
@given(seed=st.integers(0, 2**32),
       choices=st.lists(st.sampled_from(list(VARIANTS)), min_size=2, max_size=7))
def test_disagreement_is_found_and_never_gives_a_result(seed, choices):
    def program(collectives):
        n, dtype, op = VARIANTS[choices[collectives.rank]]
        return collectives.reduce_scatter(np.ones(n, dtype), op=op)

    results, _ = run(range(len(choices)), program, seed=seed, return_errors=True,
                     call=lambda rank: Call("reduce_scatter", str(VARIANTS[choices[rank]])))
    failed = [isinstance(result, Exception) for result in results]
    if len(set(choices)) == 1:
        assert not any(failed)
        return
    assert all(failed)
    for rank, result in enumerate(results):
        if choices[rank] != choices[rank - 1]:
            assert isinstance(result, BufferMismatchError)


def test_its_scratch_memory_is_no_more_than_a_chunk_plus_a_mebibyte():
    for p in (2, 4, 16, 32):
        for n in (p, 10_000, 1_000_000, 100_000_000):
            assert direct.inbox_size(n, p, 2) <= -(-n // p) + (1 << 19)


def test_any_op_and_dtype_may_go_directly():
    rows = [np.arange(40, dtype="int32") * (rank - 1) for rank in range(4)]
    for op, want in (("sum", sum(rows)), ("max", np.max(rows, axis=0))):
        assert np.array_equal(allreduced(rows, op, algorithm="direct"), want)


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
