"""Tells backward passes, which add to gradients, from those that only return derivatives."""

from collections import deque
from collections.abc import Set
from typing import Any

import torch

_Leaf: Any = torch._C._functions.AccumulateGrad


def leaves_behind(node: Any, parameters: Set[torch.Tensor]) -> list[Any]:
    """Return the nodes at which a pass that begins at `node` will show whether it is one.

    That is the nearest of a parameter, which takes few looks; all leaves where there is none.

    Args:
        node: Of the graph.
        parameters: Leaves to prefer: somebody may ask for the gradients of other leaves only.
    """
    found, seen, nodes = [], {node}, deque([node])
    while nodes:
        node = nodes.popleft()
        if isinstance(node, _Leaf):
            if node.variable in parameters:
                return [node]
            found.append(node)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return found


def adds_to_gradients(leaves: list[Any]) -> bool:
    """Return whether the pass under way adds to the gradients of all these leaves.

    `backward()` adds to those of all leaves that it reaches, torch.autograd.grad to none, and
    backward(inputs=[...]) to those that it names.

    Args:
        leaves: As `leaves_behind` has returned them for a node that the pass has reached.
    """
    try:
        return bool(leaves) and all(map(torch._C._will_engine_execute_node, leaves))
    except RuntimeError:
        # It refuses to answer for a leaf whose derivative torch.autograd.grad is to return.
        return False
