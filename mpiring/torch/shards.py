"""Reads an optimizer's parameter groups, and cuts this rank's slices of buckets into shards."""

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter

from ..communicator import Communicator
from ..errors import ConfigError
from ..memory.pytrees import leaves
from ..sharding.state import TensorRange, ranges_in
from ..text import first_few
from ..training.averager import Averager
from .tensors import in_shape_of
from .weights import WeightBuckets, flat

_SCHEDULED = ("lr", "momentum", "betas", "weight_decay")

# Settings of a group of parameters, and the names of these parameters in the model, as "params", in
# the user's order.
ParamGroup = Mapping[str, Any]


def param_groups(module: torch.nn.Module, params: Any) -> list[ParamGroup]:
    """Return the parameter groups of an optimizer for parameters of the module.

    `params` are parameters, or pairs of names and parameters, or dicts with either of these as
    "params" and with settings; None for all parameters. Raises ConfigError if a parameter is not in
    the module, or is in two groups, or if a trained parameter is in no group.
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
    """Raise ConfigError if trained parameters are in no group."""
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
        # PyTorch optimizers record names under this key.
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
    """Return the settings of groups as a string, which ranks compare.

    Settings that schedules change come first, since long strings are truncated. A setting that is
    equal in all groups appears once.
    """
    plain = [{name: f"{float(x) if isinstance(x, torch.Tensor) else x}"
              for name, x in settings.items() if _is_plain(x)} for settings in settings_of(groups)]
    texts = []
    for name in sorted(set().union(*plain), key=lambda name: (name not in _SCHEDULED, name)):
        values = [settings.get(name, "nothing") for settings in plain]
        is_equal = len(set(values)) == 1
        texts.append(f"{name}={values[0]}" if is_equal else f"{name}=[{', '.join(values)}]")
    return ", ".join(texts)


def _is_plain(x: Any) -> bool:
    return all(leaf is None or isinstance(leaf, bool | int | float | str)
               or isinstance(leaf, torch.Tensor) and leaf.numel() == 1 for _, leaf in leaves(x))


@dataclass(frozen=True, eq=False)
class Shard:
    """Consecutive tensors, or ranges of tensors, that this rank updates as one parameter.

    Attributes:
        parameter: Shape (n,), or the shape of a tensor that has an owner; a view of the weights.
        gradient: Same shape; a view of the bucket, which holds the means once they have arrived.
        bucket: Index of the bucket.
        ranges: Ranges of the tensors in the shard, separated by padding of zeros; none in a
            placeholder without weights.
    """

    parameter: Parameter
    gradient: torch.Tensor
    bucket: int
    ranges: Sequence[TensorRange]


@dataclass(frozen=True, eq=False)
class ShardLayout:
    """The memory of weights and gradients; `parameters` are the trained ones."""

    parameters: Mapping[str, Parameter]
    weights: WeightBuckets
    gradients: Averager
    comm: Communicator


def cut(layout: ShardLayout, group_of: Mapping[str, int], groups: int,
        kind_of: Callable[[str], Hashable]) -> list[list[Shard]]:
    """Return this rank's shards of all buckets, per parameter group; at least one in total.

    `group_of` has the index of each parameter's group. `kind_of` returns the kind of the tensor
    with a given name; a shard has tensors of one kind only.
    """
    shards: list[list[Shard]] = [[] for _ in range(groups)]
    for shard in _shards(layout, lambda name: (group_of[name], kind_of(name))):
        shards[group_of[shard.ranges[0].name]].append(shard)
    if not any(shards):
        shards[0].append(_placeholder(next(iter(layout.parameters.values())).device))
    return shards


def _shards(layout: ShardLayout, kind_of: Callable[[str], Hashable]) -> list[Shard]:
    shards = []
    for index, bucket in enumerate(layout.weights.buckets):
        gradients = layout.gradients.buckets[index]
        own_slice = layout.gradients.own_slice(gradients)
        ranges = ranges_in(bucket.plan, own_slice.start, own_slice.stop)
        owners = bucket.plan.owners
        for _, group in itertools.groupby(
                ranges, lambda part: part.name if owners else kind_of(part.name)):
            run = list(group)
            start, stop = own_slice.start + run[0].start, own_slice.start + run[-1].stop
            vectors = [flat(memory, slice(start, stop)) for memory in (bucket, gradients)]
            if owners:
                vectors = [in_shape_of(layout.parameters[run[0].name], x) for x in vectors]
            shards.append(Shard(Parameter(vectors[0]), vectors[1], index,
                                list(ranges_in(bucket.plan, start, stop))))
    return shards


def _placeholder(device: torch.device) -> Shard:
    """Return a shard without weights, because GradScaler needs a gradient to check.

    It is a matrix, which all classes accept.
    """
    parameter, gradient = (torch.zeros(1, 1, device=device) for _ in range(2))
    return Shard(Parameter(parameter), gradient, -1, [])
