"""Knows who shares a node with whom."""

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
