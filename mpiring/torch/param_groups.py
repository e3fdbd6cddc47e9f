"""Reads groups of parameters, as PyTorch's optimizers take them, by the parameters' names."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..errors import ConfigError
from ..text import first_few

_SCHEDULED = ("lr", "momentum", "betas", "weight_decay")


# Parameters with the same settings: as "params", their names in the model, in the user's order, and
# the settings that the group has of its own.
ParamGroup = Mapping[str, Any]


def param_groups(module: torch.nn.Module, params: Any) -> list[ParamGroup]:
    """Return the groups of an optimizer's parameters.

    Args:
        module: Its parameters.
        params: Parameters; or pairs of names and parameters; or dicts, with the same as "params"
            and settings besides. None for all parameters.

    Raises:
        ConfigError: There are others than the module's, or some twice, or a trained one is missing.
    """
    names = {p: name for name, p in module.named_parameters()}
    given = list(names) if params is None else params
    if isinstance(given, torch.Tensor) or not isinstance(given, Iterable):
        raise ConfigError(f"params is a {type(params).__name__}; pass a list of parameters, or of "
                          f"dicts such as {{'params': [...], 'lr': 1e-3}}")
    given = list(given)
    if not (given and isinstance(given[0], Mapping)):
        given = [{"params": given}]
    groups = [_group(group, names) for group in given]
    seen: set[str] = set()
    for name in (name for group in groups for name in group["params"]):
        if name in seen:
            raise ConfigError(f"{name} is twice in the groups of parameters; give it to one")
        seen.add(name)
    refuse_ungrouped([name for p, name in names.items() if p.requires_grad], seen)
    return groups


def refuse_ungrouped(trained: Iterable[str], grouped: set[str]) -> None:
    """Raise ConfigError where parameters that are trained are in no group."""
    left_out = [name for name in trained if name not in grouped]
    if left_out:
        raise ConfigError(
            f"{first_few(left_out, 5)}: trained, but in no group of parameters, so that nothing "
            f"would update what all ranks average; add a group, or freeze with "
            f"requires_grad_(False)")


def _group(group: Any, names: Mapping[torch.Tensor, str]) -> ParamGroup:
    if not isinstance(group, Mapping) or "params" not in group:
        raise ConfigError(f"a group of parameters is a {type(group).__name__}; expected a dict "
                          f"with 'params'")
    settings, = settings_of([group])
    params = group["params"]
    items = [params] if isinstance(params, torch.Tensor) else list(params)
    if items and all(isinstance(item, tuple) for item in items):
        # As PyTorch's optimizers note them.
        settings["param_names"] = [name for name, _ in items]
        items = [p for _, p in items]
    for p in items:
        if not isinstance(p, torch.Tensor) or p not in names:
            label = (f"a tensor of shape {tuple(p.shape)}" if isinstance(p, torch.Tensor) else
                     f"a {type(p).__name__}")
            raise ConfigError(f"{label} in a group of parameters is no parameter of the model; "
                              f"pass those of model.parameters()")
    return {"params": [names[p] for p in items], **settings}


def settings_of(groups: Iterable[ParamGroup]) -> list[dict[str, Any]]:
    """Return the settings of groups, without their parameters."""
    return [{key: x for key, x in group.items() if key != "params"} for group in groups]


def described(groups: Sequence[Mapping[str, Any]]) -> str:
    """Return the settings of groups as a text, to be compared across ranks.

    Those that schedules change come first, since long texts are cut. One that is equal in all
    groups stands there once.
    """
    texts = [{name: f"{float(x) if isinstance(x, torch.Tensor) else x}"
              for name, x in its.items() if _is_plain(x)} for its in settings_of(groups)]
    names = sorted({name for its in texts for name in its},
                   key=lambda name: (name not in _SCHEDULED, name))
    values = {name: [its.get(name, "nothing") for its in texts] for name in names}
    return ", ".join(f"{name}={its[0]}" if len(set(its)) == 1 else f"{name}=[{', '.join(its)}]"
                     for name, its in values.items())


def _is_plain(x: Any) -> bool:
    if isinstance(x, tuple | list):
        return all(map(_is_plain, x))
    return (x is None or isinstance(x, bool | int | float | str)
            or isinstance(x, torch.Tensor) and x.numel() == 1)
