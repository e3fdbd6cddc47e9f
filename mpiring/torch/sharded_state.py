"""The state of an optimizer of slices as that of whole parameters, and back."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter

from ..sharding.state import TensorRange
from ..errors import ConfigError
from ..sharding.sliced import Leaves, Sliced, gather, slices_of
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
        self._parameters, self._comm = layout.parameters, layout.comm
        outline = {part.name: {key: _outlined(x, shard) for key, x in its.items()}
                   for shard, its in self._shards for part in shard.ranges}
        self.outline: States = {}
        for of_rank in self._comm.allgather_object(outline):
            self.outline.update(of_rank)
        self.elementwise = {key for its in self.outline.values() for key, x in its.items()
                            if isinstance(x, Elements)}

    def whole(self, *, root: int | None = None) -> States:
        """Return the state of whole parameters, on their device; only on rank `root`, if any.

        Collective: yes. Blocking: yes.
        """
        keep = root is None or self._comm.rank == root
        found: States = {name: dict(its) for name, its in self.outline.items()} if keep else {}
        for name, key, x in self._gathered(self._vectors(), keep=keep):
            found[name][key] = x.to(self._parameters[name].device)
        return found

    def sliced(self, aside: States) -> States:
        """Return a copy of this rank's slices of the state.

        Args:
            aside: Whole state of others, the same on all ranks; rank 0 has all of it.

        Collective: yes. Blocking: yes.
        """
        found: States = {name: dict(its) for name, its in self.outline.items()}
        other_orders: Leaves = {}
        for name, its in self._vectors().items():
            p = self._parameters[name]
            if p.is_contiguous():
                found[name] |= {key: Sliced(p.shape, {ends: piece.copy() for ends, piece
                                                      in x.pieces.items()}, x.dtype)
                                for key, x in its.items()}
            else:
                other_orders[name] = its
        # Their slices are no ranges in C order: they are saved whole, by those with the first.
        for name, key, x in self._gathered(other_orders):
            is_first = any(start == 0 for start, _ in other_orders[name][key].pieces)
            found[name][key] = _sliced(x, is_saved=is_first)
        is_first = self._comm.rank == 0
        return found | {name: {key: _sliced(x, is_saved=is_first) for key, x in its.items()}
                        for name, its in aside.items()}

    def _vectors(self) -> Leaves:
        """Return this rank's ranges of all state, each as a vector in the order of memory."""
        dtypes = {name: {key: numpy_dtype(x.dtype) for key, x in its.items()
                         if isinstance(x, Elements)} for name, its in self.outline.items()}
        return slices_of(
            {name: (self._parameters[name].numel(),) for name in dtypes}, dtypes,
            ((part.name, key, part.offset, array_of(x[part.elements].cpu()))
             for shard, its in self._shards for part in shard.ranges
             for key, x in its.items() if key in dtypes[part.name]))

    def _gathered(self, vectors: Leaves, *,
                  keep: bool = True) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield parameter, name and tensors of its shape, made of the ranges of all ranks."""
        for name, its in vectors.items():
            gathered = self._comm.run(
                Call("gather", f"{', '.join(map(str, its))} of {name}"),
                functools.partial(gather, slices=list(its.values()), keep=keep))
            for key, x in zip(its, gathered):
                yield name, key, in_shape_of(self._parameters[name], tensor_of(x))


def _sliced(x: Any, *, is_saved: bool) -> Any:
    """Return a tensor as one that this rank saves whole, or not at all; numbers as they are."""
    if is_number(x):
        return x
    x = torch.as_tensor(x).cpu()
    return Sliced(x.shape, {(0, x.numel()): array_of(x.clone(
        memory_format=torch.contiguous_format))} if is_saved else {},
                  numpy_dtype(x.dtype))


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
            found[key][part.elements] = piece
    return found


def _piece(x: Any, p: Parameter, part: TensorRange) -> torch.Tensor:
    """Return the elements of a parameter's state that are in a part, on the CPU."""
    if tuple(getattr(x, "shape", ())) != tuple(p.shape) or is_number(x) and p.dim():
        raise ConfigError(
            f"the state of {part.name} is {getattr(x, 'shape', x)!r:.100}, but the parameter "
            f"is of shape {tuple(p.shape)}; load what an optimizer of the same model has returned")
    if isinstance(x, Sliced):
        if p.is_contiguous():
            return tensor_of(x.read(*part.ends))
        x = tensor_of(x.whole())
    x = torch.as_tensor(x).detach().cpu()
    if not p.is_contiguous():
        x = in_shape_of(p, torch.empty(p.numel(), dtype=x.dtype, device="cpu")).copy_(x)
        return x.as_strided((p.numel(),), (1,))[slice(*part.ends)]
    return x.reshape(-1)[slice(*part.ends)]
