"""Broadcasts parameters and optimizer state from one rank."""

from typing import Any

import torch

from ...provisional import adapter
from ..functions import allgather_object, broadcast_object, named
from ..world import global_process_set

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state",
           "broadcast_parameters"]


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Copy the tensors of one rank to all ranks.

    Args:
        params: `model.state_dict()`, `model.named_parameters()` or `model.parameters()`.
        root_rank: Rank whose tensors are copied.

    Raises:
        ValueError: `params` is none of these, or the tensors differ between ranks.

    Collective: yes. Blocking: yes.
    """
    tensors = list(named(params, torch.Tensor))
    adapter.states.broadcast_named(
        tensors, global_process_set.arrive("broadcast_parameters"), root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int,
                              model: torch.nn.Module | None = None) -> None:
    """Copy the state and the settings of one rank's optimizer to the optimizers of all ranks.

    As with Horovod, parameters without a gradient get a gradient of zeros. This does not apply to
    SparseAdam, which rejects dense gradients.

    Args:
        optimizer: PyTorch optimizer or DistributedOptimizer, with the same parameters on all ranks.
        root_rank: Rank whose state is copied.
        model: Argument for compatibility with Horovod; ignored.

    Raises:
        ValueError: The optimizer is LBFGS.
        ConfigError: Optimizers differ between ranks.

    Collective: yes. Blocking: yes.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    adapter.states.broadcast_optimizer_state(
        optimizer, global_process_set.arrive("broadcast_optimizer_state"), root=root_rank)
    if isinstance(optimizer, torch.optim.SparseAdam):
        return
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p)
