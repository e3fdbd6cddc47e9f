"""Cuts this rank's slices of weights and gradients into what an optimizer takes as parameters."""

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import Parameter

from ..buckets.bucket import Bucket
from ..buckets.state import Segment, segments_in
from .weights import WeightBuckets, flat


@dataclass(frozen=True, eq=False)
class Shard:
    """Consecutive tensors, or ranges of them, that this rank updates: a parameter of an optimizer.

    Attributes:
        parameter: Shape (n,); a view of the weights.
        gradient: Shape (n,); a view of the means of the gradients, once they have arrived.
        bucket: Index of the bucket.
        start: First element of this rank's slice of it.
        segments: The tensors, by elements of the shard; between them is padding, which is 0. None
            in a shard that stands for no weights.
    """

    parameter: Parameter
    gradient: torch.Tensor
    bucket: int
    start: int
    segments: Sequence[Segment]


def cut(weights: WeightBuckets, gradients: Sequence[Bucket],
        kind_of: Callable[[str], Hashable]) -> list[Shard]:
    """Return this rank's shards of all buckets.

    Args:
        weights, gradients: Their buckets.
        kind_of: Tensors, by name, of different kinds do not share a shard.
    """
    shards = []
    for index, bucket in enumerate(weights.buckets):
        own = weights.own(index)
        segments = segments_in(bucket.plan, own.start, own.stop)
        for _, alike in itertools.groupby(segments, lambda segment: kind_of(segment.name)):
            run = list(alike)
            first = run[0].start
            here = slice(own.start + first, own.start + run[-1].stop)
            shards.append(Shard(
                Parameter(flat(bucket, here)), flat(gradients[index], here), index, first,
                [Segment(s.name, s.shape, s.start - first, s.stop - first, s.offset)
                 for s in run]))
    return shards


def placeholder(device: torch.device) -> Shard:
    """Return a shard that stands for no weights.

    On a rank that has none of its own: GradScaler wants a gradient to look at.
    """
    return Shard(Parameter(torch.zeros(1, device=device)), torch.zeros(1, device=device), -1, 0, [])
