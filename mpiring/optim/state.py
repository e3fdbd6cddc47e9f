"""State of an optimizer by tensor, complete or as this rank's ranges, for any number of ranks."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..arguments import refuse_other_state, whole_number
from ..buckets.bucket import TensorSpec
from ..communicator import Communicator
from ..errors import ConfigError
from ..operations.agreement import Call
from ..sharding.sliced import Leaves, Sliced, gather
from .parts import Part, state_dtypes
from .slices import ModelSlices


class StateView(Mapping[str, Mapping[str, Any]]):
    """A view of the named state vectors by tensor and name, up to date at each access."""

    def __init__(self, slices: ModelSlices, names: Sequence[str]) -> None:
        self._slices, self._names = slices, names

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        part = self._parts()[name]
        return {vector: part.vector(vector)
                for vector in state_dtypes(self._names, part.weights.dtype)}

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts())

    def __len__(self) -> int:
        return len(self._parts())

    def _parts(self) -> dict[str, Part]:
        return {part.name: part for part in self._slices.parts}


def checked(state: Any, optimizer: str, tensors: Mapping[str, TensorSpec],
            dtypes: Mapping[str, Mapping[str, "np.dtype[Any]"]],
            optional: Sequence[str] = ()) -> tuple[int, Leaves]:
    """Return the number of updates and the vectors of all tensors, from complete or sharded state.

    Vectors named in `optional` may be missing for all tensors, but not only for some. Raises
    ConfigError, which names the difference, if the state is of another model or optimizer.
    """
    refuse_other_state(state, ("optimizer", "steps", "tensors"), f"of {optimizer}")
    if state["optimizer"] != optimizer:
        raise ConfigError(f"the state is of {state['optimizer']}, not of {optimizer}; build the "
                          f"optimizer that was saved")
    refuse_other_state(state["tensors"], tensors, f"of {optimizer}", only=True)
    for name in dtypes:
        refuse_other_state(state["tensors"][name], (), f"of {optimizer} for {name!r}")
    missing = [vector for vector in optional
               if not any(vector in state["tensors"][name] for name in dtypes)]
    leaves: Leaves = {}
    for name, dtypes_of in dtypes.items():
        wanted = {vector: dtype for vector, dtype in dtypes_of.items() if vector not in missing}
        refuse_other_state(state["tensors"][name], wanted, f"of {optimizer} for {name!r}")
        leaves[name] = {
            vector: leaf_of(state["tensors"][name][vector], f"{vector} of {name!r}",
                            tensors[name].shape, dtype) for vector, dtype in wanted.items()}
    return whole_number("steps", state["steps"], 0), leaves


def leaf_of(x: Any, label: str, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> Sliced:
    """Return an array or Sliced as a Sliced; raise ConfigError if its shape or dtype differs."""
    array = np.asarray(0 if isinstance(x, Sliced) else x)
    leaf: Sliced = x if isinstance(x, Sliced) else Sliced(
        array.shape, {(0, array.size): array.reshape(-1)}, array.dtype)
    if (leaf.shape, leaf.dtype) != (shape, dtype):
        raise ConfigError(f"{label} is {leaf.dtype} {leaf.shape} in the state, but {dtype} {shape} "
                          f"here; build the model that was saved")
    return leaf


def gathered(comm: Communicator, leaves: Leaves) -> Leaves:
    """Return complete tensors from the ranges of all ranks. Collective, blocking."""
    slices = [leaf for by_vector in leaves.values() for leaf in by_vector.values()]
    tensors = iter(comm.run(Call("gather", f"state in {len(slices)} vectors"),
                            functools.partial(gather, slices=slices)))
    return {name: {vector: next(tensors) for vector in by_vector}
            for name, by_vector in leaves.items()}
