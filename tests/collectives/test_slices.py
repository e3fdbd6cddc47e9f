"""Holds reduce_scatter and allgather of slices, with any bounds, to NumPy and to allreduce."""

from dataclasses import replace

import contract
import ml_dtypes
import numpy as np
import pytest
from cluster import IN_WINDOWS, NODES, run
from hypothesis import given
from hypothesis import strategies as st

from mpiring.collectives.operation import Tuning
from mpiring.memory.arrays import aligned_bounds, bounds_of
from mpiring.simulated.network import SimulatedNetwork

HEADER_BYTES = 192
# Arrays of these tests' sizes take every path, in several pieces.
SMALL = Tuning(moved_bytes=75, slice_bytes=48, chunk_bytes=1, ring_bytes=24, direct_bytes=(8, 40),
               short_bytes=100, direct_nodes=4, gathered_bytes=200)
SIZES = 1, 2, 3, 4, 5, 7, 9
LENGTHS = (lambda p: 0, lambda p: 1, lambda p: p - 1, lambda p: 2 * p + 1, lambda p: 129)
BOUNDS = {
    "equal": lambda n, p: None,
    "aligned": lambda n, p: bounds_of(n, p, 8),
    "the last has all": lambda n, p: [0] * p + [n],
    "uneven": lambda n, p: [0, *sorted(n * rank * rank // (p * p) for rank in range(1, p)), n]}


def halves(node_of, rows, op, bounds, memory="none", **options):
    """Return each rank's slice, and its vector after an allgather; and the network."""
    def program(collectives):
        rank, x = collectives.rank, rows[collectives.rank].copy()
        y = yield from collectives.empty(x.shape, x.dtype)
        if IN_WINDOWS[memory](rank):
            y[...], x = x, y
        own_slice = yield from collectives.reduce_scatter(x, op=op, bounds=bounds)
        assert np.shares_memory(own_slice, x) or not own_slice.size
        own_slice = own_slice.copy()
        # What the other slices hold must not matter.
        where = bounds or bounds_of(x.size, len(node_of))
        kept = x[where[rank]:where[rank + 1]].copy()
        assert kept.tobytes() == own_slice.tobytes()
        yield from collectives.barrier()
        x[:where[rank]] = 77
        x[where[rank + 1]:] = 77
        yield from collectives.allgather(x, bounds=bounds)
        return own_slice, x.copy()

    return run(node_of, program, slot_bytes=2048, tuning=SMALL, **options)


@pytest.mark.parametrize("nodes", NODES)
def test_contract(nodes):
    for seed, (op, dtype, p, length, cut, memory) in enumerate(contract.cases(
            SIZES, LENGTHS, tuple(BOUNDS.values()), tuple(IN_WINDOWS))):
        n = length(p)
        bounds = cut(n, p)
        rows = [contract.contribution(rank, n, dtype) for rank in range(p)]
        results, _ = halves(NODES[nodes](p), rows, op, bounds, memory, seed=seed)
        where = bounds or bounds_of(n, p)
        for rank, (own_slice, x) in enumerate(results):
            assert x.tobytes() == results[0][1].tobytes(), "bits differ"
            assert own_slice.tobytes() == x[where[rank]:where[rank + 1]].tobytes()
        contract.check(results[0][1], p, op)


@pytest.mark.parametrize("node_of", [[0] * 4, [0, 1, 2, 3], [0, 0, 1, 1], [0, 1, 0, 2, 1, 0]])
@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
def test_sixteen_bits_are_rounded_as_allreduce_rounds_them(node_of, dtype):
    rows = np.random.default_rng(1).standard_normal((len(node_of), 200)).astype(dtype)
    for op in ("sum", "mean", "prod"):
        xs = rows.copy()
        run(node_of, lambda collectives: collectives.allreduce(xs[collectives.rank], op=op),
            tuning=SMALL)
        for bounds in BOUNDS.values():
            results, _ = halves(node_of, rows, op, bounds(200, len(node_of)), "all")
            assert all(x.tobytes() == xs[0].tobytes() for _, x in results)


@pytest.mark.parametrize("node_of", [
    [0, 0, 1, 1, 2, 2], [0, 1, 2, 0, 1, 2], [0, 0, 0, 1, 2, 2], [0, 1, 2, 3]])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("memory", ["all", "none"])
def test_a_node_sends_the_least_possible(node_of, dtype, memory):
    p, nodes, n = len(node_of), len(set(node_of)), 720 * len(node_of)
    tuning = replace(SMALL, slice_bytes=720, short_bytes=24)
    # Slices of 16 bits, and those of uneven nodes, take another way.
    even = dtype == "float32" and len({*map(node_of.count, node_of)}) == 1
    for call in ("allreduce", *(("reduce_scatter", "allgather") if even else ())):
        def program(collectives):
            x = np.ones(n, dtype)
            if memory == "all":
                x = yield from collectives.empty((n,), dtype)
                x[...] = 1
            yield from getattr(collectives, call)(x)

        network = run(node_of, program, slot_bytes=2048, tuning=tuning, algorithm=(
            "ring" if nodes == p else "hierarchical"))[1]
        ways, itemsize = 2 if call == "allreduce" else 1, np.dtype(dtype).itemsize
        assert network.bytes_between == dict.fromkeys(
            range(nodes), ways * (nodes - 1) * n * itemsize // nodes + HEADER_BYTES)


def test_scratch_memory_suffices_where_the_shorter_slices_are_cut_into_fewer_pieces():
    """Of 300,001 elements on six ranks, one rank has one more than the others."""
    p, n = 6, 300_001
    rows = [contract.contribution(rank, n, "float16") for rank in range(p)]

    def program(collectives):
        return (yield from collectives.reduce_scatter(rows[collectives.rank].copy()))

    slices, _ = run([0, 0, 0, 1, 1, 1], program, slot_bytes=1 << 19)
    contract.check(np.concatenate(slices), p, "sum")


def test_no_rank_reads_a_window_after_its_owner_has_gone_on():
    def program(collectives):
        x = yield from collectives.empty((60,), "float32")
        for step in range(4):
            x[...] = step + collectives.rank
            own_slice = yield from collectives.reduce_scatter(x)
            assert (own_slice == 3 * step + 3).all()
            x[...] = -1
            x[20 * collectives.rank:][:20] = 10 * step + collectives.rank
            yield from collectives.allgather(x)
            assert np.array_equal(x, np.repeat(10 * step + np.arange(3), 20))
            x[...] = -1

    for seed in range(30):
        run([0, 0, 0], program, network=SimulatedNetwork(3, node_of=[0] * 3, seed=seed),
            tuning=SMALL if seed % 2 else Tuning())


@given(n=st.integers(0, 1000), itemsize=st.sampled_from([1, 2, 4, 8, 16, 32]), p=st.integers(1, 9))
def test_aligned_bounds(n, itemsize, p):
    bounds = aligned_bounds(n, itemsize, p)
    assert len(bounds) == p + 1 and (bounds[0], bounds[-1]) == (0, n)
    assert list(bounds) == sorted(bounds)
    assert all(bound * itemsize % 64 == 0 or bound == n for bound in bounds)
    longest = max(stop - start for start, stop in zip(bounds, bounds[1:]))
    assert longest * itemsize < n * itemsize / p + 2 * 64
