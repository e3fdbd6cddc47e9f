"""Derives from the ranks' nodes where a rank stands, and in which order a ring visits all ranks."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """Position of a rank among the nodes.

    Attributes:
        local_rank, local_size: This rank within its node, and the number of ranks there.
        node_rank, num_nodes: This node, in the order of nodes' lowest ranks, and their number.
    """

    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int


def compact(ranks: Sequence[int]) -> Sequence[int]:
    """Return ranks that follow each other as a range, which takes no memory for each; else a tuple.
    """
    consecutive = range(ranks[0], ranks[0] + len(ranks)) if ranks else range(0)
    return consecutive if all(map(operator.eq, ranks, consecutive)) else tuple(ranks)


def node_order(leaders: Sequence[int]) -> Sequence[int]:
    """Return all ranks, node after node, so that a ring in this order leaves each node once.

    Args:
        leaders: As for `topology`.
    """
    return compact(sorted(range(len(leaders)), key=lambda rank: (leaders[rank], rank)))


def ranks_of_nodes(leaders: Sequence[int], order: Sequence[int]) -> Sequence[Sequence[int]]:
    """Return the ranks of each node or memory, in the given order.

    Args:
        leaders: For every rank, the lowest rank on its node, or that shares its memory.
        order: From `node_order`.
    """
    groups: dict[int, list[int]] = {}
    for rank in order:
        groups.setdefault(leaders[rank], []).append(rank)
    return tuple(map(compact, groups.values()))


def topology(rank: int, leaders: Sequence[int]) -> Topology:
    """Return the position of a rank.

    Args:
        rank: This rank.
        leaders: For every rank, the lowest rank on its node.
    """
    nodes = sorted(set(leaders))
    on_node = [other for other, leader in enumerate(leaders) if leader == leaders[rank]]
    return Topology(
        local_rank=on_node.index(rank), local_size=len(on_node),
        node_rank=nodes.index(leaders[rank]), num_nodes=len(nodes))


def neighbours(rank: int, nodes: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """Return the first ranks of the groups before and after the one that this rank leads.

    Args:
        rank: This rank.
        nodes: From `ranks_of_nodes`: headers must go the way of the data.

    Returns:
        None unless this rank leads one of several groups.
    """
    leaders = [ranks[0] for ranks in nodes]
    if rank not in leaders or len(leaders) == 1:
        return None
    position = leaders.index(rank)
    return leaders[position - 1], leaders[(position + 1) % len(leaders)]
