"""Updates matrices with torch.optim.Muon, and other parameters with torch.optim.AdamW."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from ..arguments import truth
from ..errors import ConfigError
from ..text import first_few
from .class_updates import ClassUpdates, States
from .shards import ParamGroup, ShardLayout

# Default of torch.optim.Muon.
_NS_STEPS = 5


def divided(groups: Iterable[ParamGroup], module: nn.Module) -> list[ParamGroup]:
    """Return groups with `use_muon`: true for matrices, false for parameters that AdamW updates.

    A group without this key is divided in two: Muon gets all matrices except embeddings. Raises
    ConfigError if a group with use_muon=True has parameters that are not matrices.
    """
    parameters = dict(module.named_parameters())
    embeddings = {p for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)
                  for p in part.parameters(recurse=False)}
    parts: list[ParamGroup] = []
    for group in groups:
        names = group["params"]
        if "use_muon" in group:
            chosen = [truth("use_muon", group["use_muon"])] * len(names)
        else:
            chosen = [_is_matrix(parameters[name]) and parameters[name] not in embeddings
                      for name in names]
        for use_muon in sorted(set(chosen), reverse=True) or [group.get("use_muon", True)]:
            # PyTorch records the user's names of parameters in the same order.
            lists = {key: [x for x, uses in zip(group[key], chosen) if uses is use_muon]
                     for key in ("params", "param_names") if key in group}
            parts.append({**group, "use_muon": use_muon, **lists})
    _refuse_other_than_matrices(parts, parameters)
    return parts


def _is_matrix(p: torch.Tensor) -> bool:
    return p.dim() == 2 and not p.is_complex()


def _refuse_other_than_matrices(groups: Iterable[ParamGroup],
                                parameters: Mapping[str, torch.Tensor]) -> None:
    others = [name for group in groups if group["use_muon"] for name in group["params"]
              if name in parameters and not _is_matrix(parameters[name])]
    if others:
        raise ConfigError(
            f"{first_few(others, 5)}: Muon updates real matrices only, of 2 dimensions; give other "
            f"parameters to AdamW, in a group with use_muon=False")


def update_costs(groups: Iterable[ParamGroup], module: nn.Module,
                 defaults: Mapping[str, Any]) -> dict[str, float]:
    """Return the number of multiplications in Muon's update of each matrix, by name.

    A step of Newton-Schulz computes A = X Xᵀ, B = A A and B X, for X with at least as many columns
    as rows.
    """
    parameters, costs = dict(module.named_parameters()), {}
    for group in groups:
        steps = {"ns_steps": _NS_STEPS, **defaults, **group}["ns_steps"]
        for name in group["params"] if group["use_muon"] else ():
            rows, columns = sorted(parameters[name].shape)
            costs[name] = steps * rows**2 * (2 * columns + rows) + rows * columns
    return costs


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for groups with use_muon=True, and AdamW for the others.

    `muon` is torch.optim.Muon or a subclass. Each default applies to the groups whose class has
    this setting.
    """

    def __init__(self, params: Iterable[dict[str, Any]], muon: Any, **defaults: Any) -> None:
        groups, classes = list(params), {True: muon, False: torch.optim.AdamW}
        settings = {use_muon: _settings_of(optimizer_class)
                    for use_muon, optimizer_class in classes.items()}
        self._optimizers: dict[bool, torch.optim.Optimizer] = {}
        for use_muon, optimizer_class in classes.items():
            # A setting that neither class has is passed on, for an error.
            others = settings[not use_muon] - settings[use_muon]
            own_groups = [group for group in groups if group["use_muon"] is use_muon]
            if own_groups:
                self._optimizers[use_muon] = optimizer_class(
                    own_groups, **{key: x for key, x in defaults.items() if key not in others})
        # The groups now have the defaults of their classes.
        super().__init__(groups, {})

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update the parameters that have gradients; a closure is ignored."""
        for use_muon, optimizer in self._optimizers.items():
            # AdamW also converts state of older versions here.
            optimizer.__setstate__({"state": self.state, "param_groups": [
                group for group in self.param_groups if group["use_muon"] is use_muon]})
            optimizer.step()


def _settings_of(optimizer_class: Any) -> set[str]:
    return {name for base in optimizer_class.__mro__ if issubclass(base, torch.optim.Optimizer)
            for name in inspect.signature(base).parameters}


class MuonUpdates(ClassUpdates):
    """Updates with torch.optim.Muon, or a subclass, and AdamW; see ClassUpdates.

    The groups are results of `divided`. Each matrix of Muon has an owner.
    """

    def __init__(self, optimizer_class: Any, defaults: Mapping[str, Any],
                 groups: Sequence[ParamGroup], trained: Mapping[str, Parameter], *,
                 per_bucket: bool) -> None:
        self._groups = groups
        super().__init__(MuonWithAdamW, {**defaults, "muon": optimizer_class}, groups, trained,
                         per_bucket=per_bucket)

    def _cuts(self, settings: Mapping[str, Any]) -> bool:
        return not settings["use_muon"]

    def _prepare(self, layout: ShardLayout, states: States, settings: Sequence[Mapping[str, Any]],
                 elementwise: set[str]) -> Callable[[], None]:
        """See ClassUpdates; refuse parameters, and state, that belong to the other class."""
        _refuse_other_than_matrices(self._groups, layout.parameters)
        for name, use_muon in ((name, group["use_muon"]) for group in self._groups
                               for name in group["params"]):
            if states.get(name) and ("exp_avg" in states[name]) is use_muon:
                saved, other = ("AdamW", "Muon") if use_muon else ("Muon", "AdamW")
                raise ConfigError(
                    f"rank {layout.comm.rank}: the state of {name} is of {saved}, but {other} "
                    f"updates it here; set use_muon in its group as where the state was saved")
        return super()._prepare(layout, states, settings, elementwise)

    def loader_of(self, state_dict: Mapping[str, Any]) -> Callable[[], None]:
        """See ClassUpdates; groups keep their class, also if those in the state name none."""
        groups = state_dict["param_groups"]
        named = [{**group, "use_muon": own["use_muon"]} for group, own in zip(groups, self._groups)]
        return super().loader_of({**state_dict, "param_groups": [*named, *groups[len(named):]]})
