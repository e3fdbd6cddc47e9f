"""Cuts this rank's slices of weights and gradients into what an optimizer takes as parameters."""

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import Parameter

from ..sharding.state import TensorRange, ranges_in
from ..communicator import Communicator
from ..training.averager import Averager
from .weights import WeightBuckets, flat


@dataclass(frozen=True, eq=False)
class Shard:
    """Consecutive tensors, or ranges of them, that this rank updates: a parameter of an optimizer.

    Attributes:
        parameter: Shape (n,); a view of the weights.
        gradient: Shape (n,); a view of the means of the gradients, once they have arrived.
        bucket: Index of the bucket.
        ranges: The tensors, by elements of the shard; between them is padding, which is 0. None
            in a shard that stands for no weights.
    """

    parameter: Parameter
    gradient: torch.Tensor
    bucket: int
    ranges: Sequence[TensorRange]


@dataclass(frozen=True, eq=False)
class ShardLayout:
    """Where weights and gradients lie, until buckets are built anew.

    Attributes:
        parameters: By name, those that are trained.
        weights, gradients: Their buckets.
        comm: The ranks.
    """

    parameters: Mapping[str, Parameter]
    weights: WeightBuckets
    gradients: Averager
    comm: Communicator


def cut(layout: ShardLayout, group_of: Mapping[str, int], groups: int,
        kind_of: Callable[[str], Hashable]) -> list[list[Shard]]:
    """Return this rank's shards of all buckets, per group of parameters; in all at least one.

    Args:
        layout: The buckets.
        group_of: By name, the number of a parameter's group.
        groups: How many there are.
        kind_of: Tensors, by name, of different kinds do not share a shard.
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
        own = layout.gradients.own(gradients)
        ranges = ranges_in(bucket.plan, own.start, own.stop)
        for _, alike in itertools.groupby(ranges, lambda part: kind_of(part.name)):
            run = list(alike)
            start, stop = own.start + run[0].start, own.start + run[-1].stop
            shards.append(Shard(
                Parameter(flat(bucket, slice(start, stop))), flat(gradients, slice(start, stop)),
                index, list(ranges_in(bucket.plan, start, stop))))
    return shards


def _placeholder(device: torch.device) -> Shard:
    """Return a shard that stands for no weights: GradScaler wants a gradient to look at."""
    return Shard(Parameter(torch.zeros(1, device=device)), torch.zeros(1, device=device), -1, [])
