"""Runs an optimizer class of PyTorch's on this rank's shards, with state by parameter."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch.nn import Parameter

from ..arguments import refuse_other_state
from ..errors import ConfigError
from ..sharding.sliced import Sliced
from .elementwise import attributes, elementwise_state
from .param_groups import ParamGroup, refuse_ungrouped
from .sharded_state import ShardedState, States, numbers_of, state_of
from .shards import Layout, Shard, cut
from .tensors import tensor_of


@dataclass(frozen=True)
class Plan:
    """An optimizer of this rank's shards, with all that is known of their state.

    Attributes:
        layout: Which the shards are of.
        shards: Of this rank.
        optimizer: Of these.
        aside: State of parameters that are frozen at present.
        elementwise: The names of state with an element for each of a parameter's.
    """

    layout: Layout
    shards: list[Shard]
    optimizer: Any
    aside: States
    elementwise: set[str]


class ClassUpdates:
    """Updates by an optimizer class of PyTorch's, which treats each element for itself.

    Args:
        optimizer_class, defaults: The class, and its arguments.
        groups: Of parameters.
        trained: Those that are trained, by name.
        apart: Whether buckets are updated one after the other.

    Attributes:
        shards: Of this rank, once it has begun.
        optimizer: Of these. Another one after each `follow` and `use`, but its groups stay the
            same dicts.

    Raises:
        ConfigError: The class looks at whole tensors.

    Collective: no.
    """

    def __init__(self, optimizer_class: Any, defaults: Mapping[str, Any],
                 groups: Sequence[ParamGroup], trained: Mapping[str, Parameter], *,
                 apart: bool) -> None:
        self._class, self._defaults, self._apart = optimizer_class, defaults, apart
        self._names = [list(group.names) for group in groups]
        self._group_of = {name: i for i, names in enumerate(self._names) for name in names}
        self._settings = [group.settings for group in groups]
        self._elementwise = self._tried(self._settings, trained)
        self.optimizer: Any = None

    def _tried(self, settings: Sequence[Mapping[str, Any]],
               parameters: Mapping[str, Parameter]) -> set[str]:
        """Return the names of the state that has elements with these settings of groups."""
        names = set()
        for group, its in zip(self._names, settings):
            trained = [parameters[name] for name in group if name in parameters]
            for like in [*trained, *parameters.values()][:1]:
                names |= elementwise_state(
                    self._class, self._defaults, its, like, apart=self._apart)
        return names

    def begin(self, layout: Layout) -> None:
        """Make the optimizer of this rank's shards.

        Collective: no.
        """
        self.use(self._cut(layout, {}, self._settings, self._elementwise))

    def follow(self, layout: Layout) -> None:
        """Go on where weights and gradients lie now.

        Raises:
            ConfigError: A trained parameter is in no group.

        Collective: yes. Blocking: yes.
        """
        refuse_ungrouped(layout.parameters, set(self._group_of))
        state = self._state()
        # Others than at first, where a setting was raised from 0 since.
        elementwise = self._elementwise | state.elementwise
        self.use(self._cut(layout, state.whole() | self._aside,
                           _settings(self.optimizer.param_groups), elementwise))

    def _cut(self, layout: Layout, states: States, settings: Sequence[Mapping[str, Any]],
             elementwise: set[str]) -> Plan:
        """Cut new shards, and make their optimizer; with the state of all that is known."""
        parameters = layout.parameters
        # What is cut now need not be kept whole.
        aside = {name: {key: tensor_of(x.whole()) if isinstance(x, Sliced) else x
                        for key, x in state.items()}
                 for name, state in states.items() if name not in parameters}
        groups = cut(layout, self._group_of, len(self._names),
                     lambda name: numbers_of(states.get(name, {}), elementwise))
        optimizer = self._class([{**its, "params": [shard.parameter for shard in group]}
                                 for group, its in zip(groups, settings)], **self._defaults)
        shards = list(chain.from_iterable(groups))
        found = {i: state_of(shard, states, parameters, elementwise)
                 for i, shard in enumerate(shards)}
        numbers = iter(range(len(shards)))
        optimizer.load_state_dict({
            "state": {i: state for i, state in found.items() if state},
            "param_groups": [{**group, **its, "params": [next(numbers) for _ in group["params"]]}
                             for group, its in zip(optimizer.param_groups, settings)]})
        return Plan(layout, shards, optimizer, aside, elementwise)

    def use(self, plan: Plan) -> None:
        """Go on with a planned optimizer.

        Collective: no.
        """
        if self.optimizer is not None:
            # Such as a count of steps; others belong to the parameters of before.
            plain, _ = attributes(self.optimizer)
            vars(plan.optimizer).update(plain)
            for old, new in zip(self.optimizer.param_groups, plan.optimizer.param_groups):
                old.clear()
                old.update(new)
            plan.optimizer.param_groups[:] = self.optimizer.param_groups
        self._layout, self.shards, self.optimizer = plan.layout, plan.shards, plan.optimizer
        self._aside, self._elementwise = plan.aside, plan.elementwise

    def update(self, send: Callable[[int], None]) -> None:
        """Update the shards.

        Args:
            send: Called with the index of each bucket when it is updated.

        Collective: yes. Blocking: no.
        """
        buckets = range(len(self._layout.weights.buckets))
        if not self._apart:
            self.optimizer.step()
            for index in buckets:
                send(index)
            return
        gradients = [shard.parameter.grad for shard in self.shards]
        for shard in self.shards:
            shard.parameter.grad = None
        # Forward needs them in the reverse of the order in which their gradients came.
        for index in reversed(buckets):
            mine = [(shard.parameter, gradient) for shard, gradient in zip(self.shards, gradients)
                    if shard.bucket == index]
            for p, gradient in mine:
                p.grad = gradient
            if mine:
                self.optimizer.step()
            for p, _ in mine:
                p.grad = None
            send(index)

    # State

    def _state(self) -> ShardedState:
        return ShardedState(self.shards, self.optimizer.state, self._layout)

    def state_dict(self, root: int | None) -> dict[str, Any] | None:
        """Return what the class's own would be, of whole parameters; see Sharded."""
        states = self._state().whole(root=root)
        return self._packed(states | self._aside) if root in (None, self._layout.comm.rank) else (
            None)

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return the same with this rank's slices."""
        return self._packed(self._state().sliced(self._aside))

    def _packed(self, states: States) -> dict[str, Any]:
        """Return state by the numbers that parameters have in their groups, one after the other."""
        names = list(chain.from_iterable(self._names))
        numbers = iter(range(len(names)))
        groups = [{**group, "params": [next(numbers) for _ in its]}
                  for group, its in zip(self.optimizer.param_groups, self._names)]
        return {"state": {i: states[name] for i, name in enumerate(names) if name in states},
                "param_groups": groups}

    def planned(self, state_dict: Mapping[str, Any]) -> Plan:
        """Return what `use` needs to go on from either kind of state; nothing changes.

        Raises:
            ConfigError: It is of other groups or parameters, or slices are missing.

        Collective: no.
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
        settings, elementwise = _settings(groups), self._elementwise
        if any(_unknown(states, elementwise)):
            elementwise = elementwise | self._tried(settings, self._layout.parameters)
        for name, key in _unknown(states, elementwise):
            raise ConfigError(
                f"rank {self._layout.comm.rank}: the state of {name} has {key!r}, which "
                f"{self._class.__name__} with these settings has not; load what an optimizer of "
                f"this class has returned")
        return self._cut(self._layout, states, settings, elementwise)


def _unknown(states: States, elementwise: set[str]) -> Iterator[tuple[str, str]]:
    """Yield state with elements of which the class knows nothing: parameter, and name."""
    for name, its in states.items():
        for key, x in its.items():
            if key not in elementwise and getattr(x, "shape", None):
                yield name, key


def _settings(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{key: x for key, x in group.items() if key != "params"} for group in groups]
