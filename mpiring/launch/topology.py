"""Knows who shares a node with whom, and in which order a ring visits the ranks."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """One rank's place among the nodes.

    Attributes:
        local_rank, local_size: Within this node.
        node_rank, num_nodes: Of this node among all; nodes are numbered by their lowest rank.
    """

    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int


def node_order(leaders: Sequence[int]) -> tuple[int, ...]:
    """Return all ranks, node after node, so that a ring in this order leaves each node once.

    Args:
        leaders: As in `topology`.
    """
    return tuple(sorted(range(len(leaders)), key=lambda rank: (leaders[rank], rank)))


def ranks_of_nodes(leaders: Sequence[int], order: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each node, nodes and ranks in the given order.

    Args:
        leaders: For every rank, the lowest rank that shares its node's memory.
        order: From `node_order`.
    """
    nodes: dict[int, list[int]] = {}
    for rank in order:
        nodes.setdefault(leaders[rank], []).append(rank)
    return tuple(tuple(ranks) for ranks in nodes.values())


def topology(rank: int, leaders: Sequence[int]) -> Topology:
    """Derive a rank's place from the lowest rank on each rank's node.

    Args:
        rank: This rank.
        leaders: For every rank, the lowest rank that shares its node.
    """
    nodes = sorted(set(leaders))
    mine = [other for other, leader in enumerate(leaders) if leader == leaders[rank]]
    return Topology(
        local_rank=mine.index(rank), local_size=len(mine),
        node_rank=nodes.index(leaders[rank]), num_nodes=len(nodes))


def neighbours(rank: int, nodes: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """Return the lowest ranks of the nodes before and after this rank's, if it is its node's.

    Args:
        rank: This rank.
        nodes: From `ranks_of_nodes`; headers must go the way of the data.

    Returns:
        None for other ranks, and where there is one node only.
    """
    leaders = [ranks[0] for ranks in nodes]
    if rank not in leaders or len(leaders) == 1:
        return None
    here = leaders.index(rank)
    return leaders[here - 1], leaders[(here + 1) % len(leaders)]
