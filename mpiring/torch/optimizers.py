"""Follows the steps of optimizers, and lists the state that should be equal on all ranks."""

import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..training.replicas import Replicated, replicated_in
from .devices import DEVICE_TYPES
from .vectors import Loan


class Follower(Protocol):
    """An object with something to do before optimizers take a step."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Prepare for the step of an optimizer, of whatever parameters."""


def follow_steps(follower: Follower) -> None:
    """Call `before_step` of an object before each step of any optimizer, while it lives."""
    reference = weakref.ref(follower)

    def hook(optimizer: Optimizer, *_: object) -> None:
        living = reference()
        if living is not None:
            living.before_step(optimizer)

    # For good: a hook that is removed while others run breaks PyTorch's loop over them.
    register_optimizer_step_pre_hook(hook)


def replicated_parts(module: torch.nn.Module, stepped: Iterable[Optimizer],
                     watched: Mapping[str, Any]) -> Iterator[Replicated]:
    """Yield what should be equal on all ranks: parameters, optimizers' state, watched tensors.

    Args:
        module: Its parameters; for each, the state in the optimizer that updated it last.
        stepped: Optimizers in the order of their last steps.
        watched: Nests of tensors by name.
    """
    seen: set[int] = set()

    def leaf(name: str, x: Any) -> Replicated | None:
        if not isinstance(x, torch.Tensor) or id(x) in seen:
            return None
        if x.device.type not in DEVICE_TYPES or x.layout is not torch.strided:
            return None
        seen.add(id(x))
        return Replicated(name, functools.partial(Loan(staged=True).raw, x, written=False),
                          functools.partial(_write, x))

    names = {p: name for name, p in module.named_parameters()}
    for p, name in names.items():
        yield from replicated_in(p, name, leaf)
    latest = {p: optimizer for optimizer in stepped for group in optimizer.param_groups
              for p in group["params"] if p in names}
    for p, optimizer in latest.items():
        if p in optimizer.state:
            yield from replicated_in(
                optimizer.state[p], f"{type(optimizer).__name__}[{names[p]!r}]", leaf)
    for optimizer in dict.fromkeys(latest.values()):
        for group in optimizer.param_groups:
            first = next((p for p in group["params"] if latest.get(p) is optimizer), None)
            if first is not None:
                # Only the settings of the group.
                seen.update(map(id, group["params"]))
                yield from replicated_in(
                    group, f"{type(optimizer).__name__}[{names[first]!r}, ...]", leaf)
    for name, nest in watched.items():
        yield from replicated_in(nest, name, leaf)


def _write(tensor: torch.Tensor, raw: Any) -> None:
    # `data`, since no user has written here, which NodeWeights would take it for.
    tensor.data.copy_(torch.from_numpy(raw).view(tensor.dtype).view(tensor.shape))
