"""Distinguishes backward passes, which add to gradients, from passes that return derivatives."""

from collections import deque
from collections.abc import Set
from typing import Any

import torch

_Leaf: Any = torch._C._functions.AccumulateGrad


def leaves_behind(node: Any, parameters: Set[torch.Tensor]) -> list[Any]:
    """Return the leaves from which `adds_to_gradients` can decide, for a pass through `node`.

    That is the nearest leaf of a parameter, which is found soon; without one, all leaves.

    Args:
        node: Of the autograd graph.
        parameters: Leaves to prefer, since a pass may be for the gradients of other leaves only.
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
        # Raised for a leaf whose derivative torch.autograd.grad is to return.
        return False
