"""Keeps what a Reducer remembers from step to step, until a step is known to count."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..gpu import vectors
from ..gpu.device import Device
from .bucket import Bucket

Wide = NDArray[np.float32]


@dataclass(frozen=True)
class Segment:
    """Where a tensor, or a part of it, lies in a slice of a bucket.

    Attributes:
        name, shape: The tensor's.
        start, stop: In the slice.
        offset: Of the tensor's first element here.
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


class SliceState:
    """What a Reducer remembers of one slice of a bucket.

    Arrays are replaced, not changed: a new one counts when `commit` is called, and `drop`
    leaves everything as it was. Vectors have an element for each of the slice, in the unit of
    gradients.

    Args:
        segments: The tensors in it.
        size: Of the slice.
        device: The GPU on which vectors are to lie; None for host memory.
    """

    def __init__(self, segments: Sequence[Segment], size: int,
                 device: Device | None = None) -> None:
        self.segments = segments
        self.size = size
        self.device = device
        self.vectors: dict[str, Wide] = {}
        self.others: dict[str, NDArray[Any]] = {}
        self._next: dict[str, NDArray[Any]] = {}
        self._spare: dict[str, NDArray[Any]] = {}

    def vector(self, name: str) -> Wide:
        """Return what was remembered under a name; zeros at first. Not to be changed."""
        if name not in self.vectors:
            self.vectors[name] = vectors.zeros(self.size, np.float32, self.device)
        return self.vectors[name]

    def other(self, name: str, first: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """Return an array that was remembered under a name; `first()` at first."""
        if name not in self.others:
            self.others[name] = first()
        return self.others[name]

    def next(self, name: str) -> NDArray[Any]:
        """Return the array that will count in place of the present one; undefined content."""
        if name not in self._next:
            spare = self._spare.pop(name, None)
            if spare is not None:
                self._next[name] = spare
            elif name in self.vectors:
                self._next[name] = vectors.empty(self.size, np.float32, self.device)
            else:
                self._next[name] = np.empty_like(self.others[name])
        return self._next[name]

    def commit(self) -> None:
        """Let the new arrays count."""
        for name, array in self._next.items():
            kind: dict[str, Any] = self.vectors if name in self.vectors else self.others
            self._spare[name], kind[name] = kind[name], array
        self._next.clear()

    def drop(self) -> None:
        """Forget the new arrays."""
        self._spare.update(self._next)
        self._next.clear()


class BucketState:
    """What a Reducer remembers of one bucket: the slices that this rank has, and the steps.

    Args:
        bucket: The bucket.
        bounds: Where it is cut into slices.
        mine: The numbers of this rank's slices.

    Attributes:
        parts: By the number of the slice.
        steps: How many have counted.
    """

    def __init__(self, bucket: Bucket, bounds: Sequence[int], mine: Sequence[int]) -> None:
        self.index, self.label, self.size = bucket.index, bucket.label, bucket.flat.size
        self.names = tuple(bucket.views)
        self.bounds = tuple(bounds)
        self.steps = 0
        self.parts = {
            j: SliceState(segments_of(bucket, bounds[j], bounds[j + 1]), bounds[j + 1] - bounds[j],
                          bucket.device)
            for j in mine}
        self._whole = segments_of(bucket, 0, self.size)

    def settle(self, taken: bool) -> None:
        """End a step; if it was not taken, nothing has happened."""
        for part in self.parts.values():
            if taken:
                part.commit()
            else:
                part.drop()
        self.steps += taken

    def rescale(self, factor: float) -> None:
        """Multiply the vectors, as the unit of gradients changes."""
        for part in self.parts.values():
            for vector in part.vectors.values():
                vectors.multiply(vector, factor)

    def whole(self, name: str) -> Wide:
        """Return a vector over the whole bucket, with zeros where this rank has no slice.

        It is in host memory.
        """
        x = np.zeros(self.size, np.float32)
        for j, part in self.parts.items():
            if name in part.vectors:
                x[self.bounds[j]:self.bounds[j + 1]] = vectors.on_host(part.vectors[name])
        return x

    def by_tensor(self, x: Wide) -> dict[str, Wide]:
        """Cut a vector over the whole bucket into tensors; copies."""
        return {one.name: x[one.start:one.stop].copy() for one in self._whole}

    def fill(self, name: str, tensors: Mapping[str, Wide]) -> None:
        """Remember a vector, given those tensors of it that there are; zeros for others."""
        for part in self.parts.values():
            x = np.zeros(part.size, np.float32)
            for one in part.segments:
                if one.name in tensors:
                    x[one.start:one.stop] = tensors[one.name][one.offset:one.offset + one.size]
            part.vectors[name] = vectors.moved(x, part.device)

    def state(self) -> dict[str, Any]:
        """Return all of it, as copies."""
        return {
            "names": list(self.names), "bounds": list(self.bounds), "steps": self.steps,
            "parts": {str(j): {
                "vectors": {name: vectors.on_host(x) for name, x in part.vectors.items()},
                "others": {name: x.copy() for name, x in part.others.items()},
            } for j, part in self.parts.items()}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Become what `state` has returned on the same rank.

        Raises:
            ConfigError: It was another bucket, or cut otherwise.
        """
        mine = {"names": list(self.names), "bounds": list(self.bounds), "slices": list(self.parts)}
        theirs = {"names": list(state["names"]), "bounds": list(state["bounds"]),
                  "slices": [int(j) for j in state["parts"]]}
        if mine != theirs:
            raise ConfigError(
                f"{self.label} has {mine}, but in the state that was loaded {theirs}; resume with "
                f"the same model, bucket_bytes and ranks per node")
        self.steps = int(state["steps"])
        for j, part in self.parts.items():
            arrays = state["parts"][str(j)]
            part.vectors = {name: vectors.moved(np.array(x, np.float32), part.device)
                            for name, x in arrays["vectors"].items()}
            part.others = {name: np.array(x) for name, x in arrays["others"].items()}


def segments_of(bucket: Bucket, first: int, last: int) -> list[Segment]:
    """Return the tensors in elements `first` to `last` of a bucket, without the padding."""
    found, here = [], 0
    for tensor in bucket.plan.tensors:
        start, stop = max(here, first), min(here + tensor.size, last)
        if start < stop:
            found.append(Segment(tensor.name, tensor.shape, start - first, stop - first,
                                 start - here))
        here += tensor.padded_size
    return found
