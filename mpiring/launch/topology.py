"""Computes a rank's position among the nodes, and the order in which a ring visits all ranks."""

import operator
from collections.abc import Sequence
from typing import NamedTuple


class Topology(NamedTuple):
    """Position of a rank among the nodes.

    Attributes:
        local_rank, local_size: Number of this rank on its node, and number of ranks on the node.
        node_rank, num_nodes: Number of this node and number of nodes. Nodes are in the order of
            their lowest ranks.
    """

    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int


def compact(ranks: Sequence[int]) -> Sequence[int]:
    """Return consecutive ranks as a range, which saves memory; otherwise return a tuple."""
    consecutive = range(ranks[0], ranks[0] + len(ranks)) if ranks else range(0)
    return consecutive if all(map(operator.eq, ranks, consecutive)) else tuple(ranks)


def node_order(leaders: Sequence[int]) -> Sequence[int]:
    """Return all ranks, grouped by node, so that a ring in this order leaves each node once.

    The leaders are, for each rank, the lowest rank on its node.
    """
    return compact(sorted(range(len(leaders)), key=lambda rank: (leaders[rank], rank)))


def ranks_of_nodes(leaders: Sequence[int], order: Sequence[int]) -> Sequence[Sequence[int]]:
    """Return the ranks of each node or memory, in an order; for leaders, see `node_order`."""
    groups: dict[int, list[int]] = {}
    for rank in order:
        groups.setdefault(leaders[rank], []).append(rank)
    return tuple(map(compact, groups.values()))


def topology(rank: int, leaders: Sequence[int]) -> Topology:
    """Return the position of a rank; for leaders, see `node_order`."""
    nodes = sorted(set(leaders))
    on_node = [other for other, leader in enumerate(leaders) if leader == leaders[rank]]
    return Topology(
        local_rank=on_node.index(rank), local_size=len(on_node),
        node_rank=nodes.index(leaders[rank]), num_nodes=len(nodes))


def neighbors(rank: int, nodes: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """Return the first ranks of the previous and the next group, if this rank leads a group.

    The groups are in the order of the ring, so that headers use the same links as the data. Return
    None unless this rank leads one of several groups.
    """
    leaders = [ranks[0] for ranks in nodes]
    if rank not in leaders or len(leaders) == 1:
        return None
    position = leaders.index(rank)
    return leaders[position - 1], leaders[(position + 1) % len(leaders)]
