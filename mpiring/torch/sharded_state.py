"""The state of an optimizer of slices as that of whole parameters, and back."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import Parameter

from ..buckets.bucket import Bucket
from ..sharding.state import TensorRange
from ..errors import ConfigError
from ..memory.arrays import Array
from ..sharding.sliced import Sliced
from ..memory.tensors import array_of, numpy_dtype
from ..operations.agreement import Call
from .averaging import in_shape_of
from .elementwise import is_number
from .shards import Layout, Shard
from .tensors import tensor_of

# By parameter and name: a tensor of the parameter's shape, a `Sliced` one, or a number.
States = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Elements:
    """State with an element for each of a parameter's, of this dtype; somewhere in slices."""

    dtype: torch.dtype


class ShardedState:
    """What the ranks' optimizers know about the parameters, together.

    Args:
        shards: Of this rank.
        state: Of this rank's optimizer, by the shards' parameters.
        layout: Which the shards are of.

    Attributes:
        outline: By parameter and name of its state: `Elements`, or a number. The same on all ranks.
        elementwise: The names of the state that has `Elements`.

    Collective: yes. Blocking: yes.
    """

    def __init__(self, shards: Sequence[Shard], state: Mapping[Parameter, Mapping[str, Any]],
                 layout: Layout) -> None:
        self._shards = [(shard, state[shard.parameter]) for shard in shards
                        if shard.ranges and state.get(shard.parameter)]
        self._buckets = layout.weights.buckets
        self._parameters, self._comm = layout.parameters, layout.comm
        mine = {part.name: {key: _outlined(x, shard) for key, x in its.items()}
                for shard, its in self._shards for part in shard.ranges}
        self.outline: States = {}
        for theirs in self._comm.allgather_object(mine):
            self.outline.update(theirs)
        self.elementwise = {key for its in self.outline.values() for key, x in its.items()
                            if isinstance(x, Elements)}

    def whole(self, *, root: int | None = None) -> States:
        """Return the state of whole parameters, on their device; only on rank `root`, if any.

        Collective: yes. Blocking: yes.
        """
        keep = root is None or self._comm.rank == root
        found: States = {name: dict(its) for name, its in self.outline.items()} if keep else {}
        for bucket in self._buckets:
            for key, names, vector in self._gathered(bucket):
                for name in names if keep else ():
                    p = self._parameters[name]
                    found[name][key] = _at(bucket, name, vector, p).to(p.device, copy=True)
        return found

    def sliced(self, aside: States) -> States:
        """Return a copy of this rank's slices of the state.

        Args:
            aside: Whole state of others, the same on all ranks; rank 0 has all of it.

        Collective: yes. Blocking: yes.
        """
        found: States = {
            name: {key: Sliced(self._parameters[name].shape, {}, numpy_dtype(x.dtype))
                   if isinstance(x, Elements) else x for key, x in its.items()}
            for name, its in self.outline.items()}
        for name, key, part, x in self._pieces():
            if self._parameters[name].is_contiguous():
                here = part.offset, part.offset + part.size
                found[name][key] = found[name][key].merged(
                    [Sliced(part.shape, {here: array_of(x.to("cpu", copy=True))})])
        self._add_other_orders(found)
        mine = self._comm.rank == 0
        return found | {name: {key: _sliced(x, mine=mine) for key, x in its.items()}
                        for name, its in aside.items()}

    def _add_other_orders(self, found: States) -> None:
        """Give tensors whose slices are no ranges in C order, whole, to those with the first."""
        for index, bucket in enumerate(self._buckets):
            others = [name for name in bucket.views
                      if not self._parameters[name].is_contiguous()]
            if not others:
                continue
            first = {name for name, _, part, _ in self._pieces() if part.offset == 0}
            for key, names, vector in self._gathered(bucket):
                for name in first.intersection(names, others):
                    x = _at(bucket, name, vector, self._parameters[name])
                    found[name][key] = _sliced(x, mine=True)

    def _pieces(self) -> Iterator[tuple[str, str, TensorRange, torch.Tensor]]:
        """Yield parameter, name, range and elements of all that is here."""
        for shard, its in self._shards:
            for part in shard.ranges:
                for key, x in its.items():
                    if isinstance(self.outline[part.name][key], Elements):
                        yield part.name, key, part, x[part.start:part.stop]

    def _gathered(self, bucket: Bucket) -> Iterator[tuple[str, list[str], Array]]:
        """Yield, by name of state, all ranks' elements of it: a vector over a bucket."""
        kinds = {(key, x.dtype): None for name in bucket.views
                 for key, x in self.outline.get(name, {}).items() if isinstance(x, Elements)}
        bounds = bucket.bounds(self._comm.size)
        for key, dtype in kinds:
            names = [name for name in bucket.views
                     if self.outline.get(name, {}).get(key) == Elements(dtype)]
            vector = np.zeros(bucket.plan.size, numpy_dtype(dtype))
            mine = vector[slice(*bounds[self._comm.rank:self._comm.rank + 2])]
            for shard, its in self._shards:
                if shard.bucket == bucket.index and key in its and its[key].dtype is dtype:
                    mine[shard.start:shard.start + its[key].numel()] = array_of(its[key].cpu())
            self._comm.submit(
                Call("state", f"{key} {dtype}", bucket.label, vector.nbytes),
                _allgather(vector, bounds)).wait()
            yield key, names, vector


def _allgather(vector: Array, bounds: Sequence[int]) -> Callable[[Any], Any]:
    return lambda collectives: collectives.allgather(vector, bounds=bounds)


def _sliced(x: Any, *, mine: bool) -> Any:
    """Return a tensor as one that is here whole, or not at all; numbers as they are."""
    if is_number(x):
        return x
    x = torch.as_tensor(x).cpu()
    return Sliced(x.shape, {(0, x.numel()): array_of(x.clone(
        memory_format=torch.contiguous_format))} if mine else {},
                  numpy_dtype(x.dtype))


def _at(bucket: Bucket, name: str, vector: Array, p: torch.Tensor) -> torch.Tensor:
    """Return what belongs to a parameter in a vector over a bucket."""
    start = 0
    for tensor in bucket.plan.tensors:
        if tensor.name == name:
            return in_shape_of(p, tensor_of(vector[start:start + tensor.size]))
        start += tensor.padded_size
    raise KeyError(name)


def _outlined(x: Any, shard: Shard) -> Any:
    if isinstance(x, torch.Tensor) and x.shape == shard.parameter.shape:
        return Elements(x.dtype)
    # Not shared by parameters: each will count its own steps.
    return x.detach().cpu().clone() if isinstance(x, torch.Tensor) else x


def numbers_of(state: Mapping[str, Any], elementwise: set[str]) -> tuple[Any, ...]:
    """Return the numbers in a parameter's state, to be compared with another one's."""
    return tuple((key, x if x is None else "elements" if key in elementwise else float(x))
                 for key, x in sorted(state.items()))


def state_of(shard: Shard, states: States, parameters: Mapping[str, Parameter],
             elementwise: set[str]) -> dict[str, Any]:
    """Return the state of a shard, as far as that of its parameters is known.

    Args:
        states: All of a shard's have equal numbers.
        elementwise: The names of what has an element for each of a parameter's.

    Raises:
        ConfigError: The state is of another model.
    """
    first = states.get(shard.ranges[0].name, {}) if shard.ranges else {}
    found: dict[str, Any] = {}
    for key, x in first.items():
        if key not in elementwise or x is None:
            found[key] = x.clone() if isinstance(x, torch.Tensor) else x
            continue
        pieces = [(part, _piece(states[part.name][key], parameters[part.name], part))
                  for part in shard.ranges]
        found[key] = torch.zeros(
            shard.parameter.shape, dtype=pieces[0][1].dtype, device="cpu")
        for part, piece in pieces:
            found[key][part.start:part.stop] = piece
    return found


def _piece(x: Any, p: Parameter, part: TensorRange) -> torch.Tensor:
    """Return the elements of a parameter's state that are in a part, on the CPU."""
    if tuple(getattr(x, "shape", ())) != tuple(p.shape) or is_number(x) and p.dim():
        raise ConfigError(
            f"the state of {part.name} is {getattr(x, 'shape', x)!r:.100}, but the parameter "
            f"is of shape {tuple(p.shape)}; load what an optimizer of the same model has returned")
    here = slice(part.offset, part.offset + part.size)
    if isinstance(x, Sliced):
        if p.is_contiguous():
            return tensor_of(x.read(here.start, here.stop))
        x = tensor_of(x.whole())
    x = torch.as_tensor(x).detach().cpu()
    if not p.is_contiguous():
        x = in_shape_of(p, torch.empty(p.numel(), dtype=x.dtype, device="cpu")).copy_(x)
        return x.as_strided((p.numel(),), (1,))[here]
    return x.reshape(-1)[here]
