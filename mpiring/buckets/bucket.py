"""Flat buckets in which tensors are fused: the plan, a pure function, and the memory."""

import bisect
import collections
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..arguments import whole_number
from ..errors import ConfigError
from ..gpu import vectors
from ..gpu.arrays import vector_of
from ..gpu.device import Device
from ..gpu.interface import Event, await_event
from ..memory.arrays import CACHE_LINE_BYTES, Array, aligned_bounds, is_finite

# The first buckets are short, because more computation remains to hide a transfer that starts
# early. Each of the following buckets may be twice as long as the one before. Measured: between two
# hosts, a step with 52 MB of gradients took 678 ms with two buckets of 25 MiB, and 599 ms with
# growing buckets. The last buckets are also short, because no computation hides their transfer: a
# bucket has at most half of the remaining bytes.
FIRST_BUCKET_BYTES = 1 << 20
# Default length of buckets. On one node no network must be kept busy, and each bucket costs some
# calls. Between nodes nothing is sent until a bucket is full, and returned weights are usable only
# once their bucket is complete. Measured between two hosts at 1 Gbit/s, steps of Sharded with
# overlap took 539, 517, 490 and 503 ms with buckets of 25, 8, 4 and 2 MiB. Steps of DataParallel
# took 574 and 552 ms with 25 and 4. On many nodes, each node's share of a bucket must be large
# enough to justify its messages. In `simulate`, buckets of 4 MiB are about as fast per byte as
# buckets of 25 MiB on up to 32 nodes; buckets of 8 MiB on up to 64.
_LONGEST_BYTES, _SHORTEST_BYTES, _BYTES_PER_NODE = 25 << 20, 4 << 20, 128 << 10
# A tensor is small if the model has more than this number of times its bytes.
_SMALL = 200


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype of a tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def padded_size(self) -> int:
        """Number of elements that the tensor takes up in a bucket.

        Tensors start on cache lines, so that two threads or ranks never write to the same line.
        """
        unit = max(1, CACHE_LINE_BYTES // self.dtype.itemsize)
        return -(-self.size // unit) * unit

    @property
    def padded_bytes(self) -> int:
        """Number of bytes that the tensor takes up in a bucket."""
        return self.padded_size * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} {self.dtype.name} {self.shape}"


def refuse_changed(rank: int, before: Sequence[TensorSpec], now: Sequence[TensorSpec]) -> None:
    """Raise ConfigError, which names the first difference, if a model's tensors have changed."""
    for old, new in itertools.zip_longest(before, now):
        if old != new:
            raise ConfigError(
                f"rank {rank}: the model now has {new or 'nothing'} in the place of "
                f"{old or 'nothing'}; keep names, shapes and dtypes, or wrap the model again after "
                f"such a change")


@dataclass(frozen=True)
class BucketPlan:
    """The tensors of one dtype that share a bucket, in the order of its memory.

    Attributes:
        owners: The rank whose slice has each tensor, in ascending order. Empty if slices are
            equally long, whatever the tensors.
    """

    tensors: tuple[TensorSpec, ...]
    owners: tuple[int, ...] = ()

    @functools.cached_property
    def size(self) -> int:
        """Number of elements of the bucket."""
        return sum(tensor.padded_size for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Number of bytes of the bucket."""
        return self.size * self.dtype.itemsize

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of all its tensors."""
        return self.tensors[0].dtype

    def bounds(self, size: int) -> Sequence[int]:
        """Return the offsets that cut the bucket into one slice for each of `size` ranks.

        Slices start on cache lines. If tensors have no owners, slices are equally long, except that
        the last slices may be shorter, or empty.
        """
        if not self.owners:
            return aligned_bounds(self.size, self.dtype.itemsize, size)
        starts = [0, *itertools.accumulate(tensor.padded_size for tensor in self.tensors)]
        firsts = (bisect.bisect_left(self.owners, rank) for rank in range(size))
        return *(starts[first] for first in firsts), self.size


def backward_order(tensors: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Return tensors in the order in which most backward passes complete them.

    This is the reverse order. Small tensors come last, because a small tensor that is complete late
    would delay a bucket of large tensors. The share of a backward pass that is over when a byte can
    be sent was measured with 8 buckets. For an MLP, a convnet and a GPT, it equals that of the true
    order. It is 0.548 instead of 0.544 for a transformer, and 0.669 instead of 0.586 for an LSTM.
    """
    total = sum(tensor.padded_bytes for tensor in tensors)
    return sorted(reversed(tensors), key=lambda tensor: _SMALL * tensor.padded_bytes < total)


def usual_bytes(nodes: int) -> int:
    """Return the default length of a bucket for a number of nodes that exchange messages."""
    if nodes == 1:
        return _LONGEST_BYTES
    return min(max(_SHORTEST_BYTES, nodes * _BYTES_PER_NODE), _LONGEST_BYTES)


def owners_by_cost(costs: Mapping[str, float], size: int) -> dict[str, int]:
    """Return the rank that owns each tensor, so that the sums of the ranks' costs are similar.

    Each tensor, the most expensive first, goes to the rank with the lowest sum. The highest sum is
    then at most a third above the best (R. Graham 1969). Successive tensors of equal cost have
    different owners.
    """
    sums = [(0.0, rank) for rank in range(size)]
    owners = {}
    for name in sorted(costs, key=lambda name: -costs[name]):
        total, owners[name] = sums[0]
        heapq.heapreplace(sums, (total + costs[name], owners[name]))
    return owners


def plan(tensors: Sequence[TensorSpec], bucket_bytes: int,
         kind_of: Callable[[TensorSpec], Hashable] = lambda tensor: None,
         owners: Mapping[str, int] | None = None) -> tuple[BucketPlan, ...]:
    """Fuse tensors, in the given order, into buckets of one dtype and one kind each.

    The buckets are in the order of their last tensors. A tensor larger than `bucket_bytes` gets a
    separate bucket. For the first buckets, the limit is FIRST_BUCKET_BYTES, then twice as much, and
    so on. For the last buckets, it is half of the remaining bytes, but at least the first limit.
    Tensors with `owners` have separate buckets, in which they are ordered by owner. A bucket is
    longer than the limit until each owner has a tensor in it, or until it has twice as many tensors
    as there are owners. Messages to a single owner would use only one link at a time: 8 simulated
    nodes took 3.4 times as long. Raises ConfigError if `bucket_bytes` is not positive.
    """
    whole_number("bucket_bytes", bucket_bytes, 1)
    owners = owners or {}
    groups: dict[Hashable, list[TensorSpec]] = collections.defaultdict(list)
    for tensor in tensors:
        groups[tensor.dtype, kind_of(tensor), tensor.name in owners].append(tensor)
    position = {tensor.name: i for i, tensor in enumerate(tensors)}
    fused = [bucket for group in groups.values() for bucket in _cut(group, bucket_bytes, owners)]
    fused.sort(key=lambda bucket: position[bucket[-1].name])
    for bucket in fused:
        bucket.sort(key=lambda tensor: owners.get(tensor.name, 0))
    return tuple(BucketPlan(tuple(bucket), tuple(
        owners[tensor.name] for tensor in bucket if tensor.name in owners)) for bucket in fused)


def _cut(tensors: Sequence[TensorSpec], bucket_bytes: int,
         owners: Mapping[str, int]) -> Iterator[list[TensorSpec]]:
    """Yield the tensors of each bucket; see `plan`."""
    left = sum(tensor.padded_bytes for tensor in tensors)
    first = growing = limit = min(FIRST_BUCKET_BYTES, bucket_bytes)
    bucket: list[TensorSpec] = []
    used = 0
    everyone = {owners.get(tensor.name) for tensor in tensors}
    for tensor in tensors:
        if used + tensor.padded_bytes > limit and (
                len(bucket) >= 2 * len(everyone)
                or {owners.get(fused.name) for fused in bucket} == everyone):
            yield bucket
            left -= used
            growing = min(2 * growing, bucket_bytes)
            limit = min(growing, max(left // 2, first))
            bucket, used = [], 0
        bucket.append(tensor)
        used += tensor.padded_bytes
    yield bucket


class Bucket:
    """Contiguous memory with a view for each tensor of a plan.

    Args:
        index: Position in the order in which buckets are reduced.
        empty: Function that allocates the memory, like `Communicator.empty`.
        device: GPU that holds the memory; None for host memory.

    Attributes:
        flat: Array of shape (plan.size,), zeros at first. It is a NumPy array in host memory, and a
            CuPy array or a tensor on a GPU.
        missing: Names of the tensors that are not ready in this step.
        written: Events after which the GPU has written the ready tensors.
        finite: Whether the means that this rank checks are finite; None if not yet known.
        label: Index and names of the tensors, for messages.
    """

    def __init__(self, index: int, plan: BucketPlan,
                 empty: Callable[[int, np.dtype[Any]], Array],
                 device: Device | None = None) -> None:
        self.index = index
        self.plan = plan
        self.device = device
        self.written: list[Event] = []
        self.flat: Any = empty(plan.size, plan.dtype)
        # Padding is reduced with the tensors and must not hold junk.
        self.flat[...] = 0
        self.views: dict[str, Array] = {}
        self._elements: dict[str, slice] = {}
        self._padding: list[slice] = []
        start = 0
        for tensor in plan.tensors:
            elements = self._elements[tensor.name] = slice(start, start + tensor.size)
            self.views[tensor.name] = self.flat[elements].reshape(tensor.shape)
            start += tensor.padded_size
            if elements.stop < start:
                self._padding.append(slice(elements.stop, start))
        self.missing = set(self.views)
        self.finite: bool | None = None
        self.label = f"bucket {index} ({', '.join(self.views)})"

    @functools.cached_property
    def vector(self) -> Any:
        """`flat` in the form that collectives accept: on a GPU, a DeviceVector of `device`."""
        return self.flat if self.device is None else replace(
            vector_of(self.flat), device=self.device, ready=None)

    def bounds(self, size: int) -> Sequence[int]:
        """Return the offsets of the ranks' slices; see BucketPlan."""
        return self.plan.bounds(size)

    def expect_all(self) -> None:
        """Begin a step: no tensor is ready."""
        self.missing = set(self.views)
        self.written = []

    def clear_padding(self) -> None:
        """Write zeros between the tensors, where a lossy Reducer may have left other values."""
        vector = self.vector
        for gap in self._padding:
            vectors.clear(vector[gap])

    def holds_finite(self, x: Array) -> bool:
        """Return whether `flat` or a view is finite, after the GPU has written it."""
        if self.device is None:
            return is_finite(x.reshape(-1))
        for event in self.written:
            await_event(event)
        return self.device.gpu.is_finite(x)

    def nonfinite_names(self, start: int, stop: int) -> list[str]:
        """Return the names of tensors with NaN or Inf in elements from `start` to `stop`.

        Values that a lossy Reducer has left between the tensors do not count.
        """
        if self.holds_finite(self.flat[start:stop]):
            return []
        parts = {name: self.flat[max(start, elements.start):min(stop, elements.stop)]
                 for name, elements in self._elements.items()}
        return [name for name, part in parts.items() if part.size and not self.holds_finite(part)]

    def retire(self) -> None:
        """Fill the tensors with NaN, and make views in host memory read-only."""
        self.poison()
        if self.device is None:
            for view in self.views.values():
                view.flags.writeable = False

    def poison(self) -> None:
        """Fill the tensors with NaN, so that use of their values is noticed."""
        self.flat[...] = np.nan
        # Padding is reduced with the tensors. On a GPU, all writes are in one stream.
        for gap in self._padding:
            self.flat[gap] = 0

    def mark_as_junk(self, but: slice = slice(0, 0)) -> None:
        """Put one NaN into each tensor: like `poison`, but in constant time per tensor.

        A tensor that is completely in the range `but` gets no NaN.
        """
        for elements in self._elements.values():
            for element in (elements.start, elements.stop - 1):
                if elements.start < elements.stop and not but.start <= element < but.stop:
                    self.flat[element:element + 1] = np.nan
                    break
