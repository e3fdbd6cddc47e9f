"""A large cluster of equal nodes, simulated by one of them."""

from collections.abc import Callable
from typing import Any

from .network import SimulatedNetwork

_LONGEST_ELEMENT = 32


def cyclic(node: int, nodes: int) -> int:
    """Return the opposite node: it sends to node 0 when node 0 sends to `node`."""
    return -node % nodes


def pairwise(node: int, nodes: int) -> int:
    """Return the same node: where nodes exchange in pairs, as in recursive doubling."""
    return node


class SymmetricNetwork(SimulatedNetwork):
    """A cluster of which only the ranks of node 0 are run, as all nodes do the same at once.

    What a rank sends to another node arrives as what the opposite node sends here; chunks
    are taken to be equal, although they may differ by an element. It can neither carry data,
    nor run a schedule that does not treat all nodes alike.

    Args:
        nodes, ranks_per_node: Of the cluster.
        symmetry: Which node is opposite: `cyclic`, or `pairwise`.
        prices: As of SimulatedNetwork.
    """

    def __init__(self, nodes: int, ranks_per_node: int, symmetry: Callable[[int, int], int],
                 **prices: Any) -> None:
        super().__init__(nodes * ranks_per_node, node_of=ranks_per_node, payload=False,
                         **prices)
        self.stepped = range(ranks_per_node)
        self.slack_bytes = _LONGEST_ELEMENT
        self._nodes, self._symmetry = nodes, symmetry

    def _received(self, source: int, dest: int) -> tuple[int, int]:
        node, local = divmod(dest, len(self.stepped))
        return self._symmetry(node, self._nodes) * len(self.stepped) + source, local
