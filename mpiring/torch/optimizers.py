"""Notices the steps of optimizers: what has to be done before, and whose state there is."""

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..training.replicas import Replicated, replicated_in
from .devices import KINDS
from .vectors import Loan

Leaf = Callable[[str, Any], Replicated | None]


class Follower(Protocol):
    """What wants to know of steps."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Prepare for the step of an optimizer, which may be anybody's."""


# In the order in which they were made, which is the same on every rank.
_followers: "weakref.WeakValueDictionary[int, Follower]" = weakref.WeakValueDictionary()
# When each optimizer took its last step.
_stepped: "weakref.WeakKeyDictionary[Optimizer, int]" = weakref.WeakKeyDictionary()
_numbers = itertools.count()


def follow_steps(follower: Follower) -> None:
    """Call `before_step` of an object before each step of any optimizer, while it lives."""
    _hook_steps()
    _followers[next(_numbers)] = follower


@functools.cache
def _hook_steps() -> None:
    # Once, and for good: a hook that is removed while others run breaks PyTorch's loop.
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, *_: object) -> None:
    _stepped[optimizer] = next(_numbers)
    for follower in tuple(_followers.values()):
        follower.before_step(optimizer)


def updates_any(optimizer: Optimizer, parameters: Iterator[Parameter]) -> bool:
    """Return whether an optimizer has some of these parameters."""
    own = {p for group in optimizer.param_groups for p in group["params"]}
    return not own.isdisjoint(parameters)


def replicated_parts(module: torch.nn.Module, watched: Mapping[str, Any]) -> Iterator[Replicated]:
    """Yield what all ranks have in common: parameters, their optimizers' state, and what else.

    Args:
        module: Its parameters; of each, the state in the optimizer that was the last to update it.
        watched: Nests of tensors by name.
    """
    seen: set[int] = set()

    def leaf(name: str, x: Any) -> Replicated | None:
        if not isinstance(x, torch.Tensor) or id(x) in seen:
            return None
        if x.device.type not in KINDS or x.layout is not torch.strided:
            return None
        seen.add(id(x))
        return Replicated(name, functools.partial(Loan(staged=True).raw, x, written=False),
                          functools.partial(_write, x))

    names = {p: name for name, p in module.named_parameters()}
    for p, name in names.items():
        yield from replicated_in({name: p}, name, name, leaf)
    yield from _state(names, leaf)
    for name in watched:
        yield from replicated_in(watched, name, name, leaf)


def _state(names: Mapping[Parameter, str], leaf: Leaf) -> Iterator[Replicated]:
    """Yield the state of the optimizers of some parameters, and the settings of their groups."""
    latest: dict[Parameter, Optimizer] = {}
    for optimizer in sorted(_stepped.keys(), key=lambda one: _stepped[one]):
        for group in optimizer.param_groups:
            latest.update((p, optimizer) for p in group["params"] if p in names)
    for p, optimizer in latest.items():
        if p in optimizer.state:
            yield from replicated_in(
                optimizer.state, p, f"{type(optimizer).__name__}[{names[p]!r}]", leaf)
    for optimizer in dict.fromkeys(latest.values()):
        for group in optimizer.param_groups:
            first = next((p for p in group["params"] if latest.get(p) is optimizer), None)
            if first is None:
                continue
            for key in group:
                if key != "params":
                    yield from replicated_in(group, key, f"{type(optimizer).__name__}"
                                             f"[{names[first]!r}, ...][{key!r}]", leaf)


def _write(tensor: torch.Tensor, raw: Any) -> None:
    with torch.no_grad():
        tensor.copy_(torch.from_numpy(raw).view(tensor.dtype).view(tensor.shape))
