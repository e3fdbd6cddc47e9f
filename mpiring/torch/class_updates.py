"""Runs an optimizer class of PyTorch's on this rank's shards, with state by parameter."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from ..arguments import refuse_other_state
from ..errors import ConfigError
from ..memory.sliced import Sliced
from .elementwise import elementwise_state
from .param_groups import ParamGroup, refuse_ungrouped
from .sharded_state import ShardedState, States, numbers_of, state_of
from .shards import Layout, Shard, cut
from .tensors import tensor_of


class ClassUpdates:
    """Updates by an optimizer class of PyTorch's, which treats each element for itself.

    Args:
        optimizer_class, defaults: The class, and its arguments.
        groups: Of parameters.
        layout: Where they lie at first.
        apart: Whether buckets are updated one after the other.

    Attributes:
        shards: Of this rank.
        optimizer: Of these. Another one after each `follow` and `load_state_dict`, but its groups
            stay the same dicts.

    Raises:
        ConfigError: The class looks at whole tensors; or a trained parameter is in no group.
    """

    def __init__(self, optimizer_class: Any, defaults: Mapping[str, Any],
                 groups: Sequence[ParamGroup], layout: Layout, *, apart: bool) -> None:
        self._class, self._defaults, self._apart = optimizer_class, defaults, apart
        self._names = [list(group.names) for group in groups]
        self._group_of = {name: i for i, names in enumerate(self._names) for name in names}
        self._elementwise: set[str] = set()
        for group in groups:
            trained = [p for name, p in layout.parameters.items() if name in group.names]
            first = next(iter(trained or layout.parameters.values()))
            self._elementwise |= elementwise_state(
                optimizer_class, defaults, group.settings, first, apart=apart)
        # State of parameters that are frozen at present.
        self._aside: States = {}
        self.shards: list[Shard] = []
        self.optimizer: Any = None
        self._layout = layout
        self._cut({}, [group.settings for group in groups])

    def follow(self, layout: Layout) -> None:
        """Go on where weights and gradients lie now.

        Collective: yes. Blocking: yes.
        """
        refuse_ungrouped(layout.parameters, set(self._group_of))
        states = self._state().whole() | self._aside
        self._layout = layout
        self._cut(states, _settings(self.optimizer.param_groups))

    def _cut(self, states: States, settings: Sequence[Mapping[str, Any]]) -> None:
        """Cut new shards, and make their optimizer; with the state of all that is known."""
        parameters = self._layout.parameters
        # What is cut now need not be kept whole.
        self._aside = {
            name: {key: tensor_of(x.whole()) if isinstance(x, Sliced) else x
                   for key, x in state.items()}
            for name, state in states.items() if name not in parameters}
        groups = cut(self._layout, self._group_of, len(self._names),
                     lambda name: numbers_of(states.get(name, {}), self._elementwise))
        optimizer = self._class([{**its, "params": [shard.parameter for shard in group]}
                                 for group, its in zip(groups, settings)], **self._defaults)
        self.shards = list(chain.from_iterable(groups))
        found = {i: state_of(shard, states, parameters, self._elementwise)
                 for i, shard in enumerate(self.shards)}
        numbers = iter(range(len(self.shards)))
        optimizer.load_state_dict({
            "state": {i: state for i, state in found.items() if state},
            "param_groups": [{**group, **its, "params": [next(numbers) for _ in group["params"]]}
                             for group, its in zip(optimizer.param_groups, settings)]})
        if self.optimizer is not None:
            for old, new in zip(self.optimizer.param_groups, optimizer.param_groups):
                old.clear()
                old.update(new)
            optimizer.param_groups[:] = self.optimizer.param_groups
        self.optimizer = optimizer

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

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from either kind of state.

        Raises:
            ConfigError: It is of other groups or parameters, or slices are missing.
        """
        groups = state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != list(map(len, self._names)):
            raise ConfigError(
                f"rank {self._layout.comm.rank}: the state is of groups with "
                f"{[len(group['params']) for group in groups]} parameters, but this optimizer's "
                f"have {list(map(len, self._names))}; make the same groups")
        refuse_other_state(state_dict, ["state"], f"of {self._class.__name__}")
        numbers = chain.from_iterable(group["params"] for group in groups)
        states = {name: state_dict["state"][number]
                  for name, number in zip(chain.from_iterable(self._names), numbers)
                  if number in state_dict["state"]}
        self._refuse_unknown(states)
        self._cut(states, _settings(groups))

    def _refuse_unknown(self, states: States) -> None:
        """Raise ConfigError for state with elements of which the class knows nothing."""
        for name, its in states.items():
            for key, x in its.items():
                if key not in self._elementwise and getattr(x, "shape", None):
                    raise ConfigError(
                        f"rank {self._layout.comm.rank}: the state of {name} has {key!r}, which "
                        f"{self._class.__name__} with these settings has not; load what an "
                        f"optimizer of this class has returned")


def _settings(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{key: x for key, x in group.items() if key != "params"} for group in groups]
