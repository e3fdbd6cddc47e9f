"""Tests allreduce over nodes of several ranks: results, bytes, time, rounding, disagreement."""

from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from cluster import run
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiring.collectives import hierarchical
from mpiring.collectives.operation import Tuning
from mpiring.memory.reduction import reduction
from mpiring.launch.topology import ranks_of_nodes
from mpiring.simulated.network import Link, SimulatedNetwork


# Arrays of these tests' sizes take every path, in several pieces.
SMALL = Tuning(slice_bytes=48, chunk_bytes=1, short_bytes=24)
# Which ranks have their arrays in windows.
MEMORIES = {
    "all": lambda rank, node: True, "none": lambda rank, node: False,
    "some nodes": lambda rank, node: node % 2 == 0, "some ranks": lambda rank, node: rank % 2 == 0}


def allreduce(node_of, xs, op="sum", memory="none", tuning=SMALL, **network):
    """Combine one vector per rank as the communicator does; return all results, and the network."""
    def program(collectives):
        x = xs[collectives.rank].copy()
        if memory != "none" and x.size:
            # All ranks of a node must ask for a window, whether they use it or not.
            window = yield from collectives.empty(x.shape, x.dtype)
            if MEMORIES[memory](collectives.rank, node_of[collectives.rank]):
                window[...], x = x, window
        yield from collectives.allreduce(x, op=op, algorithm="hierarchical")
        return x

    return run(node_of, program, slot_bytes=2048, tuning=tuning, **network)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), n=st.integers(0, 300), seed=st.integers(0, 2**32),
       memory=st.sampled_from(list(MEMORIES)))
def test_any_placement(data, n, seed, memory):
    node_of = data.draw(st.lists(st.integers(0, 4), min_size=3, max_size=12).filter(
        lambda nodes: 1 < len(set(nodes)) < len(nodes)))
    rows = np.random.default_rng(seed).standard_normal((len(node_of), n)).astype("float32")
    results, _ = allreduce(node_of, rows, "mean", memory, seed=seed)
    np.testing.assert_allclose(results[0], rows.mean(axis=0), rtol=1e-4, atol=1e-5)
    assert all(x.tobytes() == results[0].tobytes() for x in results)


def test_what_is_short_takes_one_message_per_pair_of_nodes():
    node_of = [0, 1, 2, 3] * 2
    latency_s = 1e-3
    network = SimulatedNetwork(8, between=Link(latency_s), node_of=node_of)
    results, _ = allreduce(node_of, np.ones((8, 6), "float32"), network=network)
    assert all((x == 8).all() for x in results)
    assert network.messages_sent == [1 + 3] * 4 + [0] * 4
    # The header's and the contribution's: no data before it is known that all agree.
    assert network.time_s == pytest.approx(2 * latency_s)


def test_the_wire_does_not_wait_for_a_node():
    """While the ranks of a node meet, another piece is under way."""
    piece_s, count = 1.0, 32
    slice_bytes, nodes, local = 480, 4, 2
    piece_bytes = local * slice_bytes
    bandwidth = 2 * (nodes - 1) / nodes * piece_bytes / piece_s
    node_of = [0, 0, 1, 1, 2, 2, 3, 3]
    xs = np.ones((8, count * piece_bytes // 4), "float32")
    # With slots of 2 KiB, a piece's slices pass in one section: two barriers for a piece.
    barrier_s = piece_s / 4

    def time_of(in_flight, slot_bytes):
        tuning = replace(SMALL, slice_bytes=slice_bytes, in_flight=in_flight)
        network = SimulatedNetwork(8, between=Link(0, bandwidth), node_of=node_of)

        def program(collectives):
            return collectives.allreduce(xs[collectives.rank].copy(), algorithm="hierarchical")

        run(node_of, program, network=network, barrier_s=barrier_s, slot_bytes=slot_bytes,
            tuning=tuning)
        return network.time_s

    wire_s, in_node_s = count * piece_s, count * 2 * barrier_s
    assert time_of(1, 1024) == pytest.approx(wire_s + in_node_s, rel=0.05)
    # Two pieces meet on the wire now and then; three do not let it wait.
    assert time_of(2, 2048) < wire_s + 0.4 * in_node_s
    assert time_of(3, 3072) < wire_s + 0.1 * in_node_s


def rounded_twice(node_of, rows, op, dtype):
    """Combine in float32 on each node, then the nodes' in order, rounding each."""
    leaders = [node_of.index(node) for node in node_of]
    nodes = ranks_of_nodes(leaders, sorted(range(len(node_of)), key=lambda r: (leaders[r], r)))
    largest, p = max(map(len, nodes)), len(node_of)
    ufunc = np.multiply if op == "prod" else np.add
    divisors = (largest, p / largest) if op == "mean" else (1, 1)

    def combined(parts, divisor):
        total = parts[0].astype("float32")
        for part in parts[1:]:
            total = ufunc(total, part.astype("float32"))
        return (total / np.float32(divisor)).astype(dtype)

    return combined([combined([rows[r] for r in ranks], divisors[0]) for ranks in nodes],
                    divisors[1])


@pytest.mark.parametrize("node_of", [[0, 0, 1, 1], [0, 1, 2] * 3, [0, 0, 0, 1, 2, 2, 2, 0]])
@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
@pytest.mark.parametrize("n", [6, 500])
def test_sixteen_bits_are_rounded_on_the_node_and_at_the_end(node_of, dtype, n):
    rows = np.random.default_rng(n).standard_normal((len(node_of), n)).astype(dtype)
    for op, memory in (("sum", "none"), ("mean", "all"), ("prod", "some nodes")):
        results, _ = allreduce(node_of, rows, op, memory, seed=1)
        assert all(x.tobytes() == results[0].tobytes() for x in results)
        assert results[0].tobytes() == rounded_twice(node_of, rows, op, dtype).tobytes()


@pytest.mark.parametrize("node_of", [[0, 0, 1, 1], [0, 0, 0, 1, 2, 2], [0, 0, 0, 0, 1]])
@pytest.mark.parametrize("n", [1, 100])
@pytest.mark.parametrize("value", [60000.0, 6e-8])
def test_a_mean_of_halves_neither_overflows_nor_vanishes_on_the_way(node_of, n, value):
    rows = np.full((len(node_of), n), value, "float16")
    for x in allreduce(node_of, rows, "mean")[0]:
        np.testing.assert_allclose(x, rows[0], rtol=2e-3)


@settings(deadline=None, max_examples=25)
@given(n=st.integers(0, 3 * 10**6), sizes=st.lists(st.integers(1, 9), min_size=2, max_size=6),
       dtype=st.sampled_from(["float32", "float16"]))
def test_pieces_cover_the_array_and_the_scratch_memory_is_small(n, sizes, dtype):
    nodes = [range(size) for size in sizes]
    itemsize = np.dtype(dtype).itemsize
    tuning = Tuning()
    pieces = hierarchical.pieces_of(n, itemsize, nodes, tuning)
    parts = [part for piece in pieces for part in piece]
    assert {len(piece) for piece in pieces} == {max(sizes)}
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == n
    longest = max(tuning.slice_bytes, len(nodes) * tuning.chunk_bytes) + itemsize
    assert all((part.stop - part.start) * itemsize <= longest for part in parts)
    operation = SimpleNamespace(nodes=nodes, combiner=reduction)
    levels = hierarchical.Levels.of(operation, "sum", np.dtype(dtype))
    assert levels.direct == (dtype == "float16")
    # No more than a slice for each piece under way.
    assert hierarchical.inbox_size(n, itemsize, nodes, levels, tuning) * itemsize <= (
        tuning.in_flight * (longest + 100))
