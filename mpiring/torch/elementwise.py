"""Finds out whether an optimizer treats each element for itself, so that tensors may be cut."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import Parameter

from ..errors import ConfigError
from ..memory.pytrees import leaves

_REASONS = {
    "LBFGS": "it takes the gradients of all parameters as one vector",
    "Adafactor": "it keeps sums over rows and columns of whole matrices",
    "Muon": "it makes whole matrices orthogonal",
    "SparseAdam": "it takes sparse gradients, which are in no buckets",
}
_SHAPE, _CUT, _STEPS = (5, 7), 9, 3
# Arithmetic may be vectorised otherwise; 16-bit weights are rounded once per step.
_TOLERANCE = {torch.bfloat16: 2 ** -5, torch.float16: 2 ** -8}


def refuse_whole_tensors(optimizer_class: Any) -> None:
    """Raise ConfigError for classes that are known to look at whole tensors, or are none."""
    if not (isinstance(optimizer_class, type)
            and issubclass(optimizer_class, torch.optim.Optimizer)):
        given = (f"an optimizer, {type(optimizer_class).__name__}(...)"
                 if isinstance(optimizer_class, torch.optim.Optimizer) else
                 f"{optimizer_class!r:.100}")
        raise ConfigError(
            f"optimizer_class is {given}; pass a class and its settings, as in "
            f"Sharded(torch.optim.AdamW, model, lr=1e-3)")
    for base in optimizer_class.__mro__:
        if base.__name__ in _REASONS:
            raise ConfigError(
                f"{optimizer_class.__name__} cannot be sharded: {_REASONS[base.__name__]}; use it "
                f"with DataParallel alone")


def elementwise_state(optimizer_class: Any, defaults: Mapping[str, Any],
                      group: Mapping[str, Any], like: torch.Tensor, *, apart: bool) -> set[str]:
    """Return the names of an optimizer's state that has an element for each of a parameter.

    Args:
        optimizer_class: Its class.
        defaults: Its settings.
        group: Those of a group of parameters.
        like: One of these.
        apart: Whether its parameters are to take their steps one after the other.

    Raises:
        ConfigError: A small tensor became another one than in two pieces, or its state did; or
            the class remembers in an attribute what cannot be kept when slices are cut again.
    """
    generator = torch.Generator().manual_seed(1)
    first, *gradients = (torch.randn(_SHAPE, generator=generator).to(like)
                         for _ in range(1 + _STEPS))
    uncut = _stepped(optimizer_class, defaults, group, [first], [[g] for g in gradients], apart)
    parts = _stepped(
        optimizer_class, defaults, group, _cut(first), list(map(_cut, gradients)), apart)
    name = optimizer_class.__name__
    joined = torch.cat([p.detach() for p, _ in parts])
    tolerance = _TOLERANCE.get(like.dtype, 2 ** -16)
    (p, state), = uncut
    if not torch.allclose(joined, p.detach().reshape(-1), rtol=tolerance, atol=tolerance):
        raise ConfigError(
            f"{name} cannot be sharded: a tensor became another one when it was cut in two; only "
            f"optimizers that treat each element for itself can")
    elementwise = {key for key, x in state.items() if _is_like(x, p)}
    for q, its_state in parts:
        if its_state.keys() != state.keys() or any(
                _is_like(x, q) != (key in elementwise) or not (key in elementwise or is_number(x))
                for key, x in its_state.items()):
            raise ConfigError(
                f"{name} cannot be sharded: its state {sorted(map(str, state))} has neither an "
                f"element for each of a parameter's nor is it a number")
    return elementwise


def attributes(optimizer: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Return an optimizer's own attributes: nests of numbers and texts, and others as a text.

    Lists of its parameters are equal texts, whatever their values.
    """
    plain, others = {}, {}
    for name, x in vars(optimizer).items():
        if name not in ("defaults", "state", "param_groups"):
            its = [leaf for _, leaf in leaves(x)]
            if all(isinstance(leaf, int | float | complex | str | None) for leaf in its):
                plain[name] = x
            else:
                others[name] = repr([leaf for leaf in its if not isinstance(leaf, Parameter)])
    return plain, others


def is_number(x: Any) -> bool:
    """Return whether state is a number, or a tensor of one."""
    return x.dim() == 0 if isinstance(x, torch.Tensor) else isinstance(x, int | float | None)


def _is_like(x: Any, p: torch.Tensor) -> bool:
    return isinstance(x, torch.Tensor) and x.shape == p.shape


def _cut(x: torch.Tensor) -> list[torch.Tensor]:
    return list(x.reshape(-1).tensor_split([_CUT]))


def _stepped(optimizer_class: Any, defaults: Mapping[str, Any], group: Mapping[str, Any],
             weights: Sequence[torch.Tensor], gradients: Sequence[Sequence[torch.Tensor]],
             apart: bool) -> list[tuple[Parameter, Mapping[str, Any]]]:
    """Return parameters, and their state, after some steps."""
    parts = [Parameter(x.clone()) for x in weights]
    optimizer = optimizer_class([{"params": parts, **group}], **defaults)
    _, before = attributes(optimizer)
    for step in gradients:
        for p, gradient in zip(parts, step):
            p.grad = gradient.clone()
            if apart:
                optimizer.step()
                p.grad = None
        if not apart:
            optimizer.step()
    for name, text in attributes(optimizer)[1].items():
        if text != before.get(name):
            raise ConfigError(
                f"{optimizer_class.__name__} cannot be sharded: its steps change its attribute "
                f"{name}={text:.100}, which is lost when slices are cut again; keep numbers there, "
                f"and tensors in self.state[p]")
    return [(p, dict(optimizer.state[p])) for p in parts]
