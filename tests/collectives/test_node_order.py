"""Tests that every collective runs in node order, and that nobody but the wires can tell."""

import numpy as np
import pytest
from cluster import order_of, run

from mpiring.launch.topology import neighbours, ranks_of_nodes

ROUND_ROBIN = [0, 1, 2, 3, 0, 1, 2, 3]
UNEVEN = [0, 1, 0, 2, 1, 0]
PLACEMENTS = {"block": [0, 0, 1, 1, 2, 2], "round-robin": ROUND_ROBIN, "uneven": UNEVEN}


def test_node_order():
    assert order_of(ROUND_ROBIN) == (0, 4, 1, 5, 2, 6, 3, 7)
    assert order_of(UNEVEN) == (0, 2, 5, 1, 4, 3)
    assert order_of([0, 0, 1, 1]) == (0, 1, 2, 3)


def test_a_ring_leaves_each_node_once():
    n = 8 * 1000

    def program(collectives):
        return collectives.allreduce(np.ones(n, "float32"), algorithm="ring")

    ring_bytes = 2 * 7 * 4 * n // 8
    _, in_node_order = run(ROUND_ROBIN, program)
    _, in_rank_order = run(ROUND_ROBIN, program, order=range(8))
    header = 192
    assert in_node_order.bytes_between == dict.fromkeys(range(4), ring_bytes + header)
    assert in_rank_order.bytes_between == dict.fromkeys(range(4), 2 * ring_bytes + header)
    _, uneven = run(UNEVEN, lambda collectives: collectives.allreduce(
        np.ones(6000, "float32"), algorithm="ring"))
    assert uneven.bytes_between == dict.fromkeys(range(3), 2 * 5 * 4 * 1000 + header)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("n", [0, 3, 50])
def test_results_stand_where_the_contract_says(placement, n):
    node_of = PLACEMENTS[placement]
    p = len(node_of)
    whole = np.arange(n, dtype="float64")
    chunks = [whole[r * n // p:(r + 1) * n // p] for r in range(p)]

    def program(collectives):
        rank = collectives.rank
        x = whole * (rank + 1)
        mine = yield from collectives.reduce_scatter(x)
        start = rank * n // p
        assert np.array_equal(mine, chunks[rank] * p * (p + 1) / 2)
        assert np.shares_memory(mine, x[start:start + mine.size]) or not mine.size
        yield from collectives.allgather(x)
        y = np.full(n, float(rank))
        yield from collectives.broadcast(y, 2)
        texts = yield from collectives.allgather_bytes(np.full(rank, rank, np.uint8))
        text = yield from collectives.broadcast_bytes(np.full(rank, rank, np.uint8), 3)
        z = whole * (rank + 1)
        yield from collectives.allreduce(z, algorithm="ring")
        return x, y, texts, text, z

    for seed in range(5):
        for x, y, texts, text, z in run(node_of, program, seed=seed)[0]:
            assert np.array_equal(x, whole * p * (p + 1) / 2)
            assert np.array_equal(z, x)
            assert (y == 2).all()
            assert [list(t) for t in texts] == [[r] * r for r in range(p)]
            assert list(text) == [3, 3, 3]


def test_nodes_and_their_neighbours():
    nodes = ranks_of_nodes([0, 1, 0, 3, 1, 0], (0, 2, 5, 1, 4, 3))
    assert nodes == ((0, 2, 5), (1, 4), (3,))
    assert [neighbours(rank, nodes) for rank in range(6)] == [
        (3, 1), (0, 3), None, (1, 0), None, None]
    assert neighbours(0, ((0, 1),)) is None
