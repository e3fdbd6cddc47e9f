"""The updates of tensors by a published method: a value that knows no model and no other ranks."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arguments import refuse_other_state, whole_number
from ..buckets.bucket import TensorSpec
from ..errors import ConfigError
from ..gpu import vectors
from ..memory.arrays import Array
from ..sharding.sliced import Leaves, Sliced, slices_of
from .parts import DIRECTION, Part, add_squares, state_dtypes
from .settings import ADAPTS, Groups, Settings, all_values_at, settings_of
from .update import Update

# Number of a rank among the ranks that have the same parts, and their number.
Share = tuple[int, int]
# Function that adds the sums of all ranks, in place.
Add = Callable[[Array], None]
# Function that yields vectors by name for a range of elements of a part, block by block.
Blocks = Callable[[Part, slice], Iterator[Mapping[str, Any]]]
# Number of updates, names of state vectors, and contents of the vectors of each part.
Content = tuple[int, list[str], list[tuple[Part, dict[str, Array]]]]


@dataclass(frozen=True)
class Layerwise:
    """A factor of each tensor's learning rate, computed from norms of the tensor.

    Attributes:
        ratio: Returns the factor, given a part, the norm of the weights, and the norm of the
            gradient or direction. The factor is 1 if a norm is zero.
        first: Update of all parts before norms are computed.
        direction: Update that writes the direction into `r`; None to use the gradient.
    """

    ratio: Callable[[Part, float, float], float]
    first: Update | None = None
    direction: Update | None = None


@dataclass(frozen=True)
class UpdateRule:
    """The update of one tensor, as a published method defines it.

    Attributes:
        settings: Default settings of all tensors, by name.
        update_of: Returns the update of a tensor, given the tensor's settings.
        numbers: Returns the numbers of the updates, given a part.
        vectors: Names of the state vectors.
        optional: Names of state vectors that the first update that needs them adds.
        layerwise: Dependence of each tensor's learning rate on norms, or None.
        extra: Returns further arguments that must be equal on all ranks, given the settings of all
            tensors. Raises ConfigError if an argument is wrong.
    """

    settings: Settings
    update_of: Callable[[Mapping[str, Any]], Update]
    numbers: Callable[[Part], Mapping[str, float]]
    vectors: Sequence[str] = ()
    optional: Sequence[str] = ()
    layerwise: Layerwise | None = None
    extra: Callable[[Mapping[str, Mapping[str, Any]]], Mapping[str, Any]] = lambda settings: {}


class Method:
    """An update rule with its settings for some tensors, and the number of updates so far.

    Callers pass the parts of the tensors that they have. Parts hold weights, gradients, and the
    vectors of the state.

    Args:
        name: Name of the method in saved states.
        tensors: Complete tensors, by name.
        groups, no_decay: See `settings_of`.

    Attributes:
        settings: Settings of each tensor, by its name.
        vectors: Names of the state vectors so far.
        steps: Number of updates so far.

    Raises:
        ConfigError: A setting is unknown or out of range, or a pattern matches no name.
    """

    def __init__(self, name: str, rule: UpdateRule, tensors: Mapping[str, TensorSpec], *,
                 groups: Groups | None = None, no_decay: Sequence[str] = ()) -> None:
        self.name, self.rule, self.tensors, self.steps = name, rule, tensors, 0
        self.settings = settings_of(tensors, rule.settings, groups, no_decay)
        self.vectors = list(rule.vectors)
        self._add_vectors(self.settings)

    @property
    def current(self) -> dict[str, Settings]:
        """The settings of the next update, by tensor; tensors with equal settings share a dict."""
        return all_values_at(self.settings, self.steps)

    def update(self, buckets: Sequence[Sequence[Part]], settings: Mapping[str, Settings],
               scale: float = 1.0, *, share: Share = (0, 1), add: Add = lambda sums: None,
               done: Callable[[int], None] = lambda index: None, last_first: bool = False) -> None:
        """Update parts once, in place, with their gradients and the settings of their tensors.

        Args:
            buckets: Parts, bucket by bucket.
            scale: Factor of the gradients.
            share, add: See `norms`, which layerwise rules need.
            done: Function that is called with the index of each bucket once it is updated.
            last_first: If true, update the last bucket first.
        """
        self._add_vectors(settings)
        parts = [part for bucket in buckets for part in bucket]
        for part in parts:
            part.begin(settings[part.name], self.steps + 1, scale)
        if self.rule.layerwise is not None:
            self._adapt(parts, self.rule.layerwise, share, add)
        for index in sorted(range(len(buckets)), reverse=last_first):
            for part in buckets[index]:
                part.apply(self.rule.update_of(part.settings), self.rule.numbers(part))
                part.end()
            done(index)
        self.steps += 1

    def _add_vectors(self, settings: Mapping[str, Mapping[str, Any]]) -> None:
        """Add optional state vectors that the update of any tensor needs, given all settings."""
        for vector in self.rule.optional:
            if vector not in self.vectors and any(
                    vector in self.rule.update_of(x).vectors for x in settings.values()):
                self.vectors.append(vector)

    def _adapt(self, parts: Sequence[Part], layerwise: Layerwise, share: Share, add: Add) -> None:
        """Set the factor of each part's rate."""
        if layerwise.first is not None:
            for part in parts:
                part.apply(layerwise.first, self.rule.numbers(part))
        direction = layerwise.direction
        kinds = ["w", "g" if direction is None else DIRECTION]

        def blocks(part: Part, share: slice) -> Iterator[Mapping[str, Any]]:
            for block in part.blocks(kinds if direction is None else direction.vectors, share):
                if direction is not None:
                    direction(block, self.rule.numbers(part))
                yield block

        norms_of = self.norms(parts, kinds, blocks, share, add)
        for part in parts:
            weights, movement = (norms_of[part.name][kind] for kind in kinds)
            if part.settings[ADAPTS] and weights and movement:
                part.ratio = layerwise.ratio(part, weights, movement)

    def norms(self, parts: Sequence[Part], kinds: Sequence[str], blocks: Blocks, share: Share,
              add: Add) -> Mapping[str, Mapping[str, float]]:
        """Return the norms of complete tensors, by tensor and kind; the same bits on all ranks.

        `add` adds sums of squares in float64. If all ranks have all parts, each rank computes its
        share of each part. This saves work, and the result is the same on ranks with different
        processors. `kinds` are the names of the vectors that `blocks` yields.
        """
        sums = vectors.zeros(len(self.tensors) * len(kinds), np.float64,
                             parts[0].device if parts else None)
        rows = {name: i * len(kinds) for i, name in enumerate(self.tensors)}
        rank, size = share
        for part in parts:
            n, row = part.size, rows[part.name]
            for block in blocks(part, slice(rank * n // size, (rank + 1) * n // size)):
                for i, kind in enumerate(kinds, row):
                    add_squares(block[kind], sums[i:i + 1])
        total = vectors.on_host(sums)
        add(total)
        return {name: dict(zip(kinds, map(math.sqrt, total[row:row + len(kinds)].tolist())))
                for name, row in rows.items()}

    def gradient_norm(self, parts: Sequence[Part], share: Share, add: Add) -> float:
        """Return the norm of all gradients together; see `norms`."""
        norms_of = self.norms(parts, ["g"], lambda part, share: part.blocks(["g"], share), share,
                              add)
        return math.sqrt(sum(norms["g"]**2 for norms in norms_of.values()))

    # The state

    def saved(self, parts: Sequence[Part], share: Share = (0, 1)) -> dict[str, Any]:
        """Return a copy of the state of parts, or of a rank's share of it, as `Sliced`."""
        rank, size = share
        dtypes = self._dtypes(self.vectors)
        ranges = [(part, rank * part.size // size, (rank + 1) * part.size // size)
                  for part in parts]
        return {"optimizer": self.name, "steps": self.steps, "tensors": slices_of(
            {name: tensor.shape for name, tensor in self.tensors.items()}, dtypes,
            ((part.name, vector, part.offset + start,
              vectors.on_host(part.vector(vector)[start:stop]))
             for part, start, stop in ranges for vector in dtypes[part.name]))}

    def checked(self, saved: Any, parts: Sequence[Part]) -> Content:
        """Return the content of a complete or sharded state for some parts; change nothing.

        Raises ConfigError if the state is of other tensors or of another method.
        """
        known = list(dict.fromkeys([*self.vectors, *self.rule.optional]))
        steps, leaves = checked(
            saved, self.name, self.tensors, self._dtypes(known), self.rule.optional)
        present = set().union(*leaves.values())
        names = [name for name in known if name in self.vectors or name in present]
        # A state vector that did not exist when the state was saved was zero.
        return steps, names, [(part, {
            vector: leaves[part.name][vector].read(part.offset, part.offset + part.size)
            if vector in present else np.zeros(part.size, part.dtype)
            for vector in state_dtypes(names, part.weights.dtype)}) for part in parts]

    def load(self, content: Content) -> None:
        """Continue from a result of `checked`."""
        self.steps, self.vectors[:], contents = content
        for part, vectors_of_part in contents:
            for vector, x in vectors_of_part.items():
                vectors.copy_to(part.vector(vector), vectors.moved(x, part.device))

    def _dtypes(self, names: Sequence[str]) -> dict[str, dict[str, "np.dtype[Any]"]]:
        """Return the dtypes of each tensor's vectors with these names, and of master copies."""
        return {name: state_dtypes(names, tensor.dtype) for name, tensor in self.tensors.items()}


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
