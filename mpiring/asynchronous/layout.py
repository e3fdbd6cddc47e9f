"""Lays a model out as flat vectors by dtype, each cut into one slice per rank."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..buckets.bucket import Bucket, BucketPlan, TensorSpec
from ..buckets.state import Segment, segments_in
from ..communicator import Communicator
from ..errors import ConfigError
from ..memory.arrays import COMPLEX, FLOATING, Array, aligned_bounds, cut, dtype_name
from ..memory.tensors import array_of, is_tensor
from ..training.views import Views


class Layout:
    """Where tensors lie in flat vectors, and which slices of these belong to which rank.

    Args:
        tensors: In order.
        size: Number of ranks.

    Attributes:
        tensors: By name.
        plans: Of the vectors, one for each dtype.
        bounds: The offsets that cut each vector into slices, which start on cache lines.
    """

    def __init__(self, tensors: Sequence[TensorSpec], size: int) -> None:
        self.tensors = {tensor.name: tensor for tensor in tensors}
        dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
        self.plans = [BucketPlan(tuple(tensor for tensor in tensors if tensor.dtype == dtype))
                      for dtype in dtypes]
        self.bounds = [aligned_bounds(plan.size, plan.dtype.itemsize, size) for plan in self.plans]
        self._size = size

    def segments(self, rank: int) -> dict[str, Segment]:
        """Return the ranges of tensors that are in a rank's slices, by name."""
        return {segment.name: segment for plan, bounds in zip(self.plans, self.bounds)
                for segment in segments_in(plan, bounds[rank], bounds[rank + 1])}

    def part(self, rank: int) -> list[BucketPlan]:
        """Return the plans of a rank's slices: of the same tensors, each cut, perhaps to nothing.

        A slice has the same elements at the same offsets as such a vector.
        """
        segments = self.segments(rank)
        return [BucketPlan(tuple(
            TensorSpec(name, (segments[name].size if name in segments else 0,), plan.dtype)
            for name in (tensor.name for tensor in plan.tensors))) for plan in self.plans]


class Vectors:
    """Memory for all vectors of a layout.

    Attributes:
        flats: The vectors, zeros at first.
        views: The tensors in them, by name.
        slices: Of all vectors, by rank.
    """

    def __init__(self, layout: Layout, holder: str) -> None:
        buckets = memory(layout.plans)
        self.flats = [bucket.flat for bucket in buckets]
        self.views = Views({name: view for bucket in buckets
                            for name, view in bucket.views.items()}, holder)
        self.slices = list(zip(*(cut(flat, bounds)
                                 for flat, bounds in zip(self.flats, layout.bounds))))


def memory(plans: Sequence[BucketPlan]) -> list[Bucket]:
    """Return buckets in this process's own memory."""
    return [Bucket(i, plan, np.empty) for i, plan in enumerate(plans)]


def tensors_of(model: Any) -> Any:
    """Return the tensors of a PyTorch module that are averaged, by name; a mapping as it is.

    Buffers that are not saved are constants, as masks of -Inf, which have no differences.
    """
    if not hasattr(model, "named_parameters"):
        return model
    saved = model.state_dict()
    buffers = {name: x for name, x in model.named_buffers()
               if name in saved and x.is_floating_point()}
    return dict(model.named_parameters()) | buffers


def arrays_of(params: Any, comm: Communicator) -> dict[str, Array]:
    """Return a model's tensors as arrays of the same memory.

    Args:
        params: NumPy arrays or PyTorch's tensors in host memory, by name.

    Raises:
        ConfigError: They are none of that, or have no gradient.
    """
    if not isinstance(params, Mapping) or not params:
        raise ConfigError(
            f"rank {comm.rank}: params is {params!r:.80}; pass a dict of the model's arrays, for a "
            f"PyTorch module dict(module.named_parameters())")
    found = {}
    for name, x in params.items():
        if not isinstance(name, str):
            raise ConfigError(f"parameter {name!r}: names must be strings, as str({name!r})")
        try:
            array = array_of(x).reshape(tuple(x.shape)) if is_tensor(x) else x
            if not isinstance(array, np.ndarray) or not array.flags.writeable:
                raise ConfigError(f"it is {type(x).__name__}; expected a NumPy array or a PyTorch "
                                  f"tensor in host memory, writeable")
            if dtype_name(array.dtype) not in (*FLOATING, *COMPLEX):
                raise ConfigError(f"it is {array.dtype}, which has no gradient; leave it out")
        except ConfigError as exc:
            raise ConfigError(f"rank {comm.rank}: parameter {name!r}: {exc}") from exc
        found[name] = array
    return found


def specs_of(arrays: Mapping[str, Array]) -> list[TensorSpec]:
    """Return what tensors are like, in order."""
    return [TensorSpec(name, array.shape, array.dtype) for name, array in arrays.items()]
