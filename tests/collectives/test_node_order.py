"""Tests that every collective runs in node order, and that nobody but the wires can tell."""

import numpy as np
from cluster import order_of, run

from mpiring.launch.topology import neighbors, ranks_of_nodes

ROUND_ROBIN = [0, 1, 2, 3, 0, 1, 2, 3]
UNEVEN = [0, 1, 0, 2, 1, 0]


def test_node_order():
    assert list(order_of(ROUND_ROBIN)) == [0, 4, 1, 5, 2, 6, 3, 7]
    assert list(order_of(UNEVEN)) == [0, 2, 5, 1, 4, 3]
    assert list(order_of([0, 0, 1, 1])) == [0, 1, 2, 3]


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


def test_nodes_and_their_neighbors():
    nodes = ranks_of_nodes([0, 1, 0, 3, 1, 0], (0, 2, 5, 1, 4, 3))
    assert list(map(list, nodes)) == [[0, 2, 5], [1, 4], [3]]
    assert [neighbors(rank, nodes) for rank in range(6)] == [
        (3, 1), (0, 3), None, (1, 0), None, None]
    assert neighbors(0, ((0, 1),)) is None
