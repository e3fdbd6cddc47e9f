"""Runs an elementwise PyTorch optimizer class on shards."""

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count
from typing import Any

import torch
from torch.nn import Parameter

from ..arguments import refuse_other_state
from ..errors import ConfigError
from ..memory.pytrees import leaves
from ..memory.tensors import array_of, numpy_dtype
from ..operations.agreement import Call
from ..sharding.sliced import Leaves, Sliced, gather, slices_of
from ..sharding.state import TensorRange
from .checkpoints import whole
from .shards import ParamGroup, Shard, ShardLayout, cut, refuse_ungrouped, settings_of
from .tensors import in_order_of, in_shape_of, tensor_of

# State by parameter and name: a tensor of the parameter's shape, a `Sliced`, or a number.
States = dict[str, dict[str, Any]]


class ShardedState:
    """The state of the parameters in the optimizers of all ranks. Collective, blocking.

    Args:
        state: State of this rank's optimizer, by the shards' parameters.

    Attributes:
        outline: Numbers in the state, by parameter and name, the same on all ranks. For elementwise
            state, which is in slices, it has the dtype.
        elementwise: Names of the state with one element per element of the parameter.
    """

    def __init__(self, shards: Sequence[Shard], state: Mapping[Parameter, Mapping[str, Any]],
                 layout: ShardLayout) -> None:
        self._shards = [(shard, state[shard.parameter]) for shard in shards
                        if shard.ranges and state.get(shard.parameter)]
        self._parameters, self._comm = layout.parameters, layout.comm
        outline = {part.name: {key: _outlined(x, shard) for key, x in values.items()}
                   for shard, values in self._shards for part in shard.ranges}
        self.outline: States = {}
        for rank_outline in self._comm.allgather_object(outline):
            self.outline |= rank_outline
        self.elementwise = {key for values in self.outline.values() for key, x in values.items()
                            if isinstance(x, torch.dtype)}

    def whole(self, *, root: int | None = None) -> States:
        """Return the state of complete parameters; on `root` only, if given.

        Collective, blocking.
        """
        states: States = {name: dict(values) for name, values in self.outline.items()}
        for name, key, x in self._gathered(self._vectors(), keep=root in (None, self._comm.rank)):
            states[name][key] = x.to(self._parameters[name].device)
        return states

    def sliced(self, aside: States) -> States:
        """Return a copy of this rank's slices of the state. Collective, blocking.

        Rank 0 also saves `aside`, the complete state of frozen parameters, the same on all ranks.
        """
        states: States = {name: dict(values) for name, values in self.outline.items()}
        other_orders: Leaves = {}
        for name, slices in self._vectors().items():
            if self._parameters[name].is_contiguous():
                states[name] |= copy.deepcopy(slices)
            else:
                other_orders[name] = slices
        # Slices in other memory orders are not ranges in C order; the first owner saves the tensor.
        for name, key, x in self._gathered(other_orders):
            is_first = any(start == 0 for start, _ in other_orders[name][key].pieces)
            states[name][key] = _sliced(x, is_saved=is_first)
        is_first = self._comm.rank == 0
        return states | {name: {key: _sliced(x, is_saved=is_first) for key, x in values.items()}
                         for name, values in aside.items()}

    def _vectors(self) -> Leaves:
        """Return this rank's ranges of all elementwise state, in the order of memory."""
        dtypes = {name: {key: numpy_dtype(x) for key, x in values.items()
                         if isinstance(x, torch.dtype)} for name, values in self.outline.items()}
        return slices_of(
            {name: self._parameters[name].shape for name in dtypes}, dtypes,
            ((part.name, key, part.offset, array_of(
                in_order_of(shard.parameter, x)[part.elements].cpu()))
             for shard, values in self._shards for part in shard.ranges
             for key, x in values.items() if key in dtypes[part.name]))

    def _gathered(self, vectors: Leaves, *,
                  keep: bool = True) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield parameter, name and complete tensor, joined from the ranges of all ranks."""
        for name, slices in vectors.items():
            gathered = self._comm.run(
                Call("gather", f"{', '.join(map(str, slices))} of {name}"),
                functools.partial(gather, slices=list(slices.values()), keep=keep))
            for key, x in zip(slices, gathered):
                yield name, key, in_shape_of(self._parameters[name], tensor_of(x.reshape(-1)))


def _sliced(x: Any, *, is_saved: bool) -> Any:
    """Return a tensor as a Sliced with all elements if `is_saved`, otherwise none; keep numbers."""
    if is_number(x):
        return x
    x = torch.as_tensor(x, device="cpu")
    return Sliced(x.shape, {(0, x.numel()): array_of(x.clone(
        memory_format=torch.contiguous_format))} if is_saved else {},
                  numpy_dtype(x.dtype))


def _outlined(x: Any, shard: Shard) -> Any:
    if _is_like(x, shard.parameter):
        return x.dtype
    # A clone, because each parameter will have a separate step count.
    return x.detach().cpu().clone() if isinstance(x, torch.Tensor) else x


def numbers_of(state: Mapping[str, Any], elementwise: set[str]) -> tuple[Any, ...]:
    """Return the numbers in a parameter's state, for comparison with other parameters."""
    return tuple((key, x if x is None else "elements" if key in elementwise else float(x))
                 for key, x in sorted(state.items()))


def state_of(shard: Shard, states: States, parameters: Mapping[str, Parameter],
             elementwise: set[str]) -> dict[str, Any]:
    """Return the state of a shard, if the state of its parameters is known; otherwise nothing.

    All parameters of a shard have equal numbers. Raises ConfigError if the state belongs to another
    model.
    """
    first = states.get(shard.ranges[0].name, {}) if shard.ranges else {}
    state: dict[str, Any] = {}
    for key, x in first.items():
        if key not in elementwise or x is None:
            state[key] = x.clone() if isinstance(x, torch.Tensor) else x
            continue
        pieces = [(part, _piece(states[part.name][key], parameters[part.name], part))
                  for part in shard.ranges]
        vector = torch.zeros(shard.parameter.numel(), dtype=pieces[0][1].dtype, device="cpu")
        for part, piece in pieces:
            vector[part.elements] = piece
        state[key] = in_shape_of(shard.parameter, vector)
    return state


def _piece(x: Any, p: Parameter, part: TensorRange) -> torch.Tensor:
    """Return the elements of a parameter's state that are in a range, on the CPU."""
    if tuple(getattr(x, "shape", ())) != tuple(p.shape) or is_number(x) and p.dim():
        raise ConfigError(
            f"the state of {part.name} is {getattr(x, 'shape', x)!r:.100}, but the parameter "
            f"is of shape {tuple(p.shape)}; load what an optimizer of the same model has returned")
    if isinstance(x, Sliced) and p.is_contiguous():
        return tensor_of(x.read(*part.ends))
    x = torch.as_tensor(
        tensor_of(x.whole()) if isinstance(x, Sliced) else x, device="cpu").detach()
    # Slices of the parameter are also in the order of its memory.
    return in_order_of(p, x)[slice(*part.ends)]


class ClassUpdates:
    """Updates with an elementwise PyTorch optimizer class; raises ConfigError for other classes.

    If `per_bucket`, buckets are updated one after the other. `shards` are this rank's, after
    `begin`. `follow` and loading a state replace `optimizer`, but its groups remain the same dicts.
    """

    def __init__(self, optimizer_class: Any, defaults: Mapping[str, Any],
                 groups: Sequence[ParamGroup], trained: Mapping[str, Parameter], *,
                 per_bucket: bool) -> None:
        self._class, self._defaults, self._per_bucket = optimizer_class, defaults, per_bucket
        self._names = [group["params"] for group in groups]
        self._group_of = {name: i for i, names in enumerate(self._names) for name in names}
        self._settings = settings_of(groups)
        self._elementwise = self._elementwise_names(self._settings, trained)
        self.optimizer: Any = None

    def _elementwise_names(self, settings: Sequence[Mapping[str, Any]],
                           parameters: Mapping[str, Parameter]) -> set[str]:
        """Return the names of the elementwise state with these settings of groups."""
        names = set()
        for group, group_settings in zip(self._names, settings):
            like = next(parameters[name] for name in [*group, *parameters] if name in parameters)
            names |= elementwise_state(
                self._class, self._defaults, group_settings, like, per_bucket=self._per_bucket,
                cut=_cut if self._cuts(group_settings) else lambda x: [x])
        return names

    def _cuts(self, settings: Mapping[str, Any]) -> bool:
        """Return whether the parameters of a group with these settings are cut into slices."""
        return True

    def begin(self, layout: ShardLayout) -> None:
        """Create the optimizer of this rank's shards."""
        self._prepare(layout, {}, self._settings, self._elementwise)()

    def follow(self, layout: ShardLayout) -> None:
        """Continue with other memory of weights and gradients. Collective, blocking.

        Raises ConfigError if a trained parameter is in no group.
        """
        refuse_ungrouped(layout.parameters, set(self._group_of))
        state = self._state()
        # A setting that was raised from 0 may have added elementwise state.
        elementwise = self._elementwise | state.elementwise
        self._prepare(layout, state.whole() | self._aside,
                      settings_of(self.optimizer.param_groups), elementwise)()

    def _prepare(self, layout: ShardLayout, states: States, settings: Sequence[Mapping[str, Any]],
                 elementwise: set[str]) -> Callable[[], None]:
        """Cut new shards, create their optimizer and state, and return a function to use them."""
        parameters = layout.parameters
        # State that is cut into shards is not kept complete.
        aside = whole({name: x for name, x in states.items() if name not in parameters})
        groups = cut(layout, self._group_of, len(self._names),
                     lambda name: numbers_of(states.get(name, {}), elementwise))
        optimizer = self._class([{**saved, "params": [shard.parameter for shard in group]}
                                 for group, saved in zip(groups, settings)], **self._defaults)
        shards = list(chain.from_iterable(groups))
        # Some classes make state when they are constructed, such as Adagrad.
        shard_states = [state_of(shard, states, parameters, elementwise)
                        or optimizer.state.get(shard.parameter) for shard in shards]
        optimizer.load_state_dict({
            "state": {i: state for i, state in enumerate(shard_states) if state},
            "param_groups": _numbered([{**group, **saved} for group, saved in zip(
                optimizer.param_groups, settings)], groups)})
        return functools.partial(self._use, layout, shards, optimizer, aside, elementwise)

    def _use(self, layout: ShardLayout, shards: list[Shard], optimizer: Any, aside: States,
             elementwise: set[str]) -> None:
        if self.optimizer is not None:
            # Copy plain attributes, such as a step count; others belong to the old parameters.
            plain, _ = attributes(self.optimizer)
            vars(optimizer).update(plain)
            for old, new in zip(self.optimizer.param_groups, optimizer.param_groups):
                old.clear()
                old.update(new)
            optimizer.param_groups[:] = self.optimizer.param_groups
        self._layout, self.shards, self.optimizer = layout, shards, optimizer
        # State of parameters that are currently frozen.
        self._aside, self._elementwise = aside, elementwise

    def update(self, send: Callable[[int], None]) -> None:
        """Update the shards; call `send` with the index of each updated bucket. Collective."""
        buckets = range(len(self._layout.weights.buckets))
        if not self._per_bucket:
            self.optimizer.step()
            for index in buckets:
                send(index)
            return
        gradients = {shard: shard.parameter.grad for shard in self.shards}
        for shard in self.shards:
            shard.parameter.grad = None
        # The forward pass needs buckets in the reverse order of their gradients.
        for index in reversed(buckets):
            updated = [shard for shard in self.shards if shard.bucket == index]
            for shard in updated:
                shard.parameter.grad = gradients[shard]
            if updated:
                self.optimizer.step()
            for shard in updated:
                shard.parameter.grad = None
            send(index)

    # State

    def _state(self) -> ShardedState:
        return ShardedState(self.shards, self.optimizer.state, self._layout)

    def state_dict(self, root: int | None) -> dict[str, Any]:
        """Return the state of complete parameters as the class does; only on `root`, if given."""
        return self._packed(self._state().whole(root=root) | self._aside)

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return the same state with this rank's slices."""
        return self._packed(self._state().sliced(self._aside))

    def _packed(self, states: States) -> dict[str, Any]:
        """Return state by the consecutive numbers of parameters in their groups."""
        names = chain.from_iterable(self._names)
        return {"state": {i: states[name] for i, name in enumerate(names) if name in states},
                "param_groups": _numbered(self.optimizer.param_groups, self._names)}

    def loader_of(self, state_dict: Mapping[str, Any]) -> Callable[[], None]:
        """Return a function that loads a complete or sharded state; this call changes nothing.

        Raises ConfigError if the state has other groups or parameters, or slices are missing.
        """
        groups = state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != list(map(len, self._names)):
            raise ConfigError(
                f"rank {self._layout.comm.rank}: the state is of groups with "
                f"{[len(group['params']) for group in groups]} parameters, but this optimizer's "
                f"have {list(map(len, self._names))}; make the same groups")
        refuse_other_state(state_dict, ["state"], f"of {self._class.__name__}")
        numbers = list(chain.from_iterable(group["params"] for group in groups))
        states = {name: state_dict["state"][number]
                  for name, number in zip(chain.from_iterable(self._names), numbers)
                  if number in state_dict["state"]}
        settings, elementwise = settings_of(groups), self._elementwise
        if any(_unknown(states, elementwise)):
            elementwise = elementwise | self._elementwise_names(settings, self._layout.parameters)
        for name, key in _unknown(states, elementwise):
            raise ConfigError(
                f"rank {self._layout.comm.rank}: the state of {name} has {key!r}, which "
                f"{self._class.__name__} with these settings has not; load what an optimizer of "
                f"this class has returned")
        return self._prepare(self._layout, states, settings, elementwise)


def _unknown(states: States, elementwise: set[str]) -> Iterator[tuple[str, str]]:
    """Yield parameter and name of array state that the class does not have."""
    for name, values in states.items():
        for key, x in values.items():
            if key not in elementwise and getattr(x, "shape", None):
                yield name, key


def _numbered(groups: Iterable[Mapping[str, Any]],
              members: Iterable[Sequence[Any]]) -> list[dict[str, Any]]:
    """Return groups with numbers for parameters, as in the `state_dict` of an optimizer."""
    numbers = count()
    return [{**group, "params": [next(numbers) for _ in params]}
            for group, params in zip(groups, members)]


_REASONS = {
    "LBFGS": "it takes the gradients of all parameters as one vector",
    "Adafactor": "it keeps sums over rows and columns of complete matrices",
    "Muon": "it makes complete matrices orthogonal, and is not torch.optim.Muon",
    "SparseAdam": "it takes sparse gradients, which are in no buckets",
}
_SHAPE, _CUT, _STEPS = (5, 7), 9, 3
# Vectorization may change the arithmetic; 16-bit weights are rounded once per step.
_TOLERANCE = {torch.bfloat16: 2 ** -5, torch.float16: 2 ** -8}


def refuse_whole_tensors(optimizer_class: Any) -> None:
    """Raise ConfigError unless this is a class that is not known to need complete tensors."""
    if not (isinstance(optimizer_class, type)
            and issubclass(optimizer_class, torch.optim.Optimizer)):
        given = (f"an optimizer, {type(optimizer_class).__name__}(...)"
                 if isinstance(optimizer_class, torch.optim.Optimizer) else
                 f"{optimizer_class!r:.100}")
        raise ConfigError(
            f"optimizer_class is {given}; pass a class and its settings, as in "
            f"Sharded(torch.optim.AdamW, model, lr=1e-3)")
    for base in optimizer_class.__mro__:
        if base.__name__ in _REASONS:
            raise ConfigError(
                f"{optimizer_class.__name__} cannot be sharded: {_REASONS[base.__name__]}; use it "
                f"with DataParallel alone")


def elementwise_state(optimizer_class: Any, defaults: Mapping[str, Any],
                      group: Mapping[str, Any], like: torch.Tensor, *, per_bucket: bool,
                      cut: Callable[[torch.Tensor], list[torch.Tensor]]) -> set[str]:
    """Return the names of an optimizer's state with one element per element of the parameter.

    `like` is a parameter of the group. If `per_bucket`, each step updates one parameter only.
    Raises ConfigError if a small tensor, or its state, changes in another way if it is `cut`.
    It also raises ConfigError if an attribute of the class holds data that a new cut of slices
    would lose.
    """
    generator = torch.Generator("cpu").manual_seed(1)
    first, *gradients = (torch.randn(_SHAPE, generator=generator, device="cpu").to(like)
                         for _ in range(1 + _STEPS))
    stepped = functools.partial(_stepped, optimizer_class, defaults, group, per_bucket=per_bucket)
    (p, state), = stepped([first], [[gradient] for gradient in gradients])
    parts = stepped(cut(first), list(map(cut, gradients)))
    name = optimizer_class.__name__
    joined = torch.cat([p.detach().reshape(-1) for p, _ in parts])
    tolerance = _TOLERANCE.get(like.dtype, 2 ** -16)
    if not torch.allclose(joined, p.detach().reshape(-1), rtol=tolerance, atol=tolerance):
        raise ConfigError(
            f"{name} cannot be sharded: a tensor became another one when it was cut in two; only "
            f"optimizers that treat each element for itself can")
    elementwise = {key for key, x in state.items() if _is_like(x, p)}
    for q, q_state in parts:
        if q_state.keys() != state.keys() or any(
                _is_like(x, q) != (key in elementwise) or not (key in elementwise or is_number(x))
                for key, x in q_state.items()):
            raise ConfigError(
                f"{name} cannot be sharded: its state {sorted(map(str, state))} has neither an "
                f"element for each of a parameter's nor is it a number")
    return elementwise


def attributes(optimizer: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Return an optimizer's attributes: pytrees of numbers and strings, and others as strings.

    A list of parameters always has the same string, independent of their values.
    """
    plain, others = {}, {}
    for name, x in vars(optimizer).items():
        if name not in ("defaults", "state", "param_groups"):
            values = [leaf for _, leaf in leaves(x)]
            if all(isinstance(leaf, int | float | complex | str | None) for leaf in values):
                plain[name] = x
            else:
                others[name] = repr([leaf for leaf in values if not isinstance(leaf, Parameter)])
    return plain, others


def is_number(x: Any) -> bool:
    """Return whether state is a number, or a tensor with one number."""
    return x.dim() == 0 if isinstance(x, torch.Tensor) else isinstance(x, int | float | None)


def _is_like(x: Any, p: torch.Tensor) -> bool:
    return isinstance(x, torch.Tensor) and x.shape == p.shape


def _cut(x: torch.Tensor) -> list[torch.Tensor]:
    return list(x.reshape(-1).tensor_split([_CUT]))


def _stepped(optimizer_class: Any, defaults: Mapping[str, Any], group: Mapping[str, Any],
             weights: Sequence[torch.Tensor], gradients: Sequence[Sequence[torch.Tensor]], *,
             per_bucket: bool) -> list[tuple[Parameter, Mapping[str, Any]]]:
    """Return parameters and their state after some steps."""
    parts = [Parameter(x.clone()) for x in weights]
    optimizer = optimizer_class([{"params": parts, **group}], **defaults)
    _, before = attributes(optimizer)
    for step in gradients:
        for p, gradient in zip(parts, step):
            p.grad = gradient.clone()
            if per_bucket:
                optimizer.step()
                p.grad = None
        if not per_bucket:
            optimizer.step()
    for name, text in attributes(optimizer)[1].items():
        if text != before.get(name):
            raise ConfigError(
                f"{optimizer_class.__name__} cannot be sharded: its steps change its attribute "
                f"{name}={text:.100}, which is lost when slices are cut again; keep numbers there, "
                f"and tensors in self.state[p]")
    return [(p, dict(optimizer.state[p])) for p in parts]
