"""State per slice of a bucket: named vectors, saved by tensor and range.

Examples are residuals of Reducers and momenta of optimizers: data about slices that a rank keeps
from step to step.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..buckets.bucket import Bucket, BucketPlan
from ..errors import ConfigError
from ..gpu import vectors
from ..gpu.device import Device
from ..memory.arrays import Array
from ..transport.base import Schedule
from .sliced import Range

Wide = NDArray[np.float32]
# Function that returns the dtype of each vector that follows its tensors, by name; the same on all
# ranks.
Vectors = Callable[[BucketPlan], Mapping[str, DTypeLike]]
# Function that copies the slices of other ranks into a vector over a bucket, given the bounds.
Gather = Callable[[Array, Sequence[int]], Schedule[None]]


@dataclass(frozen=True)
class TensorRange:
    """A tensor, or a range of it, in a slice of a bucket.

    `start` and `stop` are elements of the slice; `offset` is the first element of the flattened
    tensor that is in the slice.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def elements(self) -> slice:
        """The elements of the slice."""
        return slice(self.start, self.stop)

    @property
    def ends(self) -> Range:
        """The elements of the flattened tensor: start and stop."""
        return self.offset, self.offset + self.size


@dataclass
class TensorState:
    """State of a tensor outside of buckets, after a number of applied steps.

    `pieces` are vectors by name, for ranges of elements of the flattened tensor, which may include
    the padding after the tensor.
    """

    steps: int
    pieces: dict[Range, dict[str, Array]] = field(default_factory=dict)
    arrays: dict[str, Array] = field(default_factory=dict)


class SliceState:
    """State of one slice of a bucket: arrays, and vectors with the length of the slice.

    It is double-buffered. Data written to a result of `next` takes effect with `commit`; `drop`
    discards the data.

    `first` and `last` are its range in the bucket. `ranges` omit padding, `size` includes it.
    """

    def __init__(self, plan: BucketPlan, first: int, last: int, device: Device | None) -> None:
        self.ranges = list(ranges_in(plan, first, last))
        self.size = last - first
        self._padded = list(ranges_in(plan, first, last, padded=True))
        self._device = device
        # By name and tensor; a vector has the tensor "".
        self._now: dict[tuple[str, str], Any] = {}
        self._next: dict[tuple[str, str], Any] = {}
        self._spare: dict[tuple[str, str], Any] = {}

    def vector(self, name: str, dtype: DTypeLike = np.float32) -> Any:
        """Return a vector, zeros at first. Changes in place take effect at once."""
        key = name, ""
        if key not in self._now:
            self._now[key] = vectors.zeros(self.size, dtype, self._device)
        return self._now[key]

    def array(self, name: str, tensor: str, first: Callable[[], Array]) -> Array:
        """Return an array of any shape, in host memory, that belongs to a tensor.

        `first` creates it, also again when the tensor is in another bucket.
        """
        key = name, tensor
        if key not in self._now:
            self._now[key] = first()
        array: Array = self._now[key]
        return array

    def next(self, name: str, tensor: str = "") -> Any:
        """Return the memory, of undefined content, that `commit` uses for a vector or array."""
        key = name, tensor
        if key not in self._next:
            now, spare = self._now[key], self._spare.pop(key, None)
            if spare is None:
                spare = (np.empty_like(now) if tensor else
                         vectors.empty(self.size, now.dtype, self._device))
            self._next[key] = spare
        return self._next[key]

    def commit(self) -> None:
        """Replace vectors and arrays by the results of `next`."""
        for key, array in self._next.items():
            self._spare[key], self._now[key] = self._now[key], array
        self._next.clear()

    def drop(self) -> None:
        """Discard the results of `next`."""
        self._spare.update(self._next)
        self._next.clear()

    def vectors(self) -> dict[str, Any]:
        """Return the vectors by name."""
        return {name: x for (name, tensor), x in self._now.items() if not tensor}

    def save(self, tensors: Mapping[str, TensorState]) -> None:
        """Add copies of everything to the state of its tensors."""
        hosts = {name: vectors.on_host(x) for name, x in self.vectors().items()}
        for part in self._padded:
            tensors[part.name].pieces[part.ends] = {
                name: x[part.elements].copy() for name, x in hosts.items()}
        for (name, tensor), x in self._now.items():
            if tensor:
                tensors[tensor].arrays[name] = x.copy()

    def load(self, tensors: Mapping[str, TensorState]) -> None:
        """Copy the state of its tensors, if they have any.

        Raises ConfigError if a part of a tensor's state that belongs to this slice is missing.
        """
        loaded: dict[str, Array] = {}
        is_loaded = np.zeros(self.size, bool)
        for part in self._padded:
            origin = part.start - part.offset
            pieces = tensors[part.name].pieces if part.name in tensors else {}
            for (start, stop), piece in pieces.items():
                first, last = max(start, part.offset), min(stop, part.ends[1])
                if first < last:
                    elements = slice(origin + first, origin + last)
                    is_loaded[elements] = True
                    for name, x in piece.items():
                        vector = loaded.setdefault(name, np.zeros(self.size, x.dtype))
                        vector[elements] = x[first - start:last - start]
        for part in self.ranges:
            if part.name in tensors and not is_loaded[part.elements].all():
                raise ConfigError(
                    f"the state that was loaded lacks some of the elements {part.offset} to "
                    f"{part.offset + part.size - 1} of {part.name}; resume with the same "
                    f"model, bucket_bytes and ranks per node")
        self._now = {(name, ""): vectors.moved(x, self._device) for name, x in loaded.items()}
        for part in self.ranges:
            if part.name in tensors:
                for name, x in tensors[part.name].arrays.items():
                    self._now[name, part.name] = x.copy()


def ranges_in(plan: BucketPlan, first: int, last: int, *,
              padded: bool = False) -> Iterator[TensorRange]:
    """Yield the tensors in elements `first` to `last` of a bucket, with padding if `padded`."""
    origin = 0
    for tensor in plan.tensors:
        size = tensor.padded_size if padded else tensor.size
        start, stop = max(origin, first), min(origin + size, last)
        if start < stop:
            yield TensorRange(
                tensor.name, tensor.shape, start - first, stop - first, start - origin)
        origin += tensor.padded_size


class BucketState:
    """State of this rank's slices of one bucket, by number, after a number of applied steps.

    `bounds` are the offsets at which the bucket is cut into slices, from 0 to its size.
    """

    def __init__(self, bucket: Bucket, bounds: Sequence[int], slice_numbers: Iterable[int]) -> None:
        self.plan = bucket.plan
        self.bounds = tuple(bounds)
        self.steps = 0
        self.slices = {j: SliceState(bucket.plan, bounds[j], bounds[j + 1], bucket.device)
                       for j in slice_numbers}

    def commit_step(self, applied: bool) -> None:
        """End a step; a step that was not applied changes nothing."""
        for state in self.slices.values():
            if applied:
                state.commit()
            else:
                state.drop()
        self.steps += applied

    def gathered(self, vectors_of: Vectors, gather: Gather) -> Schedule[dict[str, TensorState]]:
        """Return the schedule that returns the complete state of all its tensors, without arrays.

        The arguments are those of BucketStates.rebuild.
        """
        tensors = {tensor.name: TensorState(self.steps, {(0, tensor.size): {}})
                   for tensor in self.plan.tensors}
        for name, dtype in vectors_of(self.plan).items():
            x = np.zeros(self.plan.size, dtype)
            for j, state in self.slices.items():
                x[self.bounds[j]:self.bounds[j + 1]] = vectors.on_host(state.vector(name, dtype))
            yield from gather(x, self.bounds)
            for part in ranges_in(self.plan, 0, self.plan.size):
                tensors[part.name].pieces[0, part.size][name] = x[part.elements].copy()
        return tensors


class BucketStates:
    """State of this rank's slices of all buckets; `rebuild` moves it to other buckets."""

    def __init__(self) -> None:
        self._buckets: dict[BucketPlan, BucketState] = {}
        # State of tensors that are not in a bucket.
        self._unplaced: dict[str, TensorState] = {}

    @property
    def steps(self) -> int:
        """Number of applied steps."""
        return max((bucket.steps for bucket in self._buckets.values()), default=0)

    def of(self, bucket: Bucket) -> BucketState | None:
        """Return the state of a bucket; None unless it was passed to `rebuild`."""
        return self._buckets.get(bucket.plan)

    def rebuild(self, buckets: Sequence[Bucket], vectors_of: Vectors,
                bounds: Callable[[Bucket], Sequence[int]], slice_numbers: Sequence[int],
                gather: Gather) -> Schedule[None]:
        """Return the schedule that moves the state, or the loaded state, to other buckets.

        The state of a tensor outside of these buckets is kept until a later call includes the
        tensor. Arrays are not moved. Raises ConfigError if the loaded state lacks a part that
        belongs to this rank's slices.

        Args:
            buckets: All buckets from now on.
            vectors_of: Function that returns the dtypes of the vectors of a bucket, given its plan.
            bounds: Function that returns the offsets at which a bucket is cut into slices.
            slice_numbers: Numbers of this rank's slices.
            gather: Function that returns a schedule, given a vector over a bucket and the bounds.
                The schedule copies the slices of other ranks into the vector.
        """
        for before in self._buckets.values():
            if before.steps:
                self._unplaced.update((yield from before.gathered(vectors_of, gather)))
        self._buckets = {}
        for bucket in buckets:
            new = self._buckets[bucket.plan] = BucketState(bucket, bounds(bucket), slice_numbers)
            loaded = [self._unplaced[name] for name in bucket.views if name in self._unplaced]
            new.steps = max((tensor.steps for tensor in loaded), default=0)
            for state in new.slices.values():
                state.load(self._unplaced)
            for name in bucket.views:
                self._unplaced.pop(name, None)

    def commit_step(self, applied: bool) -> None:
        """End a step; a step that was not applied changes nothing."""
        for bucket in self._buckets.values():
            bucket.commit_step(applied)

    def multiply(self, factor: float) -> None:
        """Multiply all vectors."""
        slices = [state for bucket in self._buckets.values() for state in bucket.slices.values()]
        pieces = [piece for tensor in self._unplaced.values() for piece in tensor.pieces.values()]
        for named in [*(state.vectors() for state in slices), *pieces]:
            for x in named.values():
                vectors.multiply(x, factor)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of this rank's state, by tensor: numbers and arrays."""
        tensors = copy.deepcopy(self._unplaced)
        for bucket in self._buckets.values():
            tensors |= {tensor.name: TensorState(bucket.steps) for tensor in bucket.plan.tensors}
            for state in bucket.slices.values():
                state.save(tensors)
        return {name: {"steps": tensor.steps, "arrays": tensor.arrays, "pieces": [
            {"start": start, "stop": stop, "vectors": piece}
            for (start, stop), piece in tensor.pieces.items()]}
            for name, tensor in tensors.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of `state_dict`, from the next `rebuild` on.

        The pieces of each tensor from several ranks' states may be joined in one list. Any number
        of ranks can then continue from it.
        """
        self._buckets = {}
        self._unplaced = {name: TensorState(
            int(tensor["steps"]),
            {(int(piece["start"]), int(piece["stop"])): _arrays(piece["vectors"])
             for piece in tensor["pieces"]}, _arrays(tensor["arrays"]))
            for name, tensor in state.items()}


def _arrays(named: Mapping[str, Any]) -> dict[str, Array]:
    return {name: np.array(x) for name, x in named.items()}
