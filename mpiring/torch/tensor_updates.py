"""Updates this rank's shards with an mpiring optimizer, which identifies tensors by name."""

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.nn import Parameter

from ..errors import ConfigError
from ..optim.optimizer import Optimizer
from ..optim.settings import ADAPTS
from ..optim.slices import ModelSlices
from .shards import ParamGroup, Shard, ShardLayout, cut, settings_of


class TensorUpdates:
    """Updates shards with an optimizer of mpiring.optim, such as LAMB; compare ClassUpdates.

    Settings of groups, such as `lr`, may change between steps. Raises ConfigError if parameters are
    on a GPU or not in C order, or if arguments are wrong.
    """

    def __init__(self, optimizer_class: type[Optimizer], defaults: Mapping[str, Any],
                 groups: Sequence[ParamGroup], trained: Mapping[str, Parameter], *,
                 per_bucket: bool) -> None:
        self._class, self._defaults, self._per_bucket = optimizer_class, defaults, per_bucket
        self._groups = [[name for name in group["params"] if name in trained] for group in groups]
        self._settings = settings_of(groups)
        for settings in self._settings:
            settings.pop("param_names", None)
        for name, p in trained.items():
            if p.device.type != "cpu" or not p.is_contiguous():
                raise ConfigError(
                    f"{optimizer_class.__name__} in a Sharded optimizer updates parameters in host "
                    f"memory, in C order; {name} is on {p.device}, with strides {p.stride()}")

    def begin(self, layout: ShardLayout) -> None:
        """Create the optimizer; see ClassUpdates."""
        self._layout = layout
        self._slices = ModelSlices(layout.gradients, layout.comm, _vectors_of(layout))
        self._method: Any = self._class(
            self._slices, **self._defaults, sharded=True,
            groups={name: settings for settings, names in zip(self._settings, self._groups)
                    for name in names})
        groups = [self._method.settings[names[0]] if names else settings
                  for settings, names in zip(self._settings, self._groups)]
        self.optimizer: Any = torch.optim.Optimizer(
            [{"params": [], **{key: x for key, x in group.items() if key != ADAPTS}}
             for group in groups], {})
        self._cut()

    def _cut(self) -> None:
        group_of = {name: i for i, names in enumerate(self._groups) for name in names}
        groups = cut(self._layout, group_of, len(self._groups), lambda name: None)
        self.shards: list[Shard] = list(chain.from_iterable(groups))
        for group, shards in zip(self.optimizer.param_groups, groups):
            group["params"] = [shard.parameter for shard in shards]

    def follow(self, layout: ShardLayout) -> None:
        """Continue with other memory of the same weights and gradients. Collective, blocking.

        Raises ConfigError if the set of trained parameters has changed.
        """
        if layout.gradients.tensors != self._layout.gradients.tensors:
            raise ConfigError(
                f"rank {layout.comm.rank}: parameters were frozen, thawed or replaced, which "
                f"{type(self._method).__name__} cannot follow; make another Sharded optimizer "
                f"afterwards (close() this one first), or use one of torch.optim")
        self._layout, self._slices.weights_of = layout, _vectors_of(layout)
        self._method.follow(layout.gradients)
        self._cut()

    def update(self, send: Callable[[int], None]) -> None:
        """Update the shards; see ClassUpdates. Collective, blocking."""
        for names, group in zip(self._groups, self.optimizer.param_groups):
            for name in names:
                settings = self._method.settings[name]
                for key in settings.keys() & group.keys():
                    # Tensors of `no_decay` remain without decay.
                    if settings[ADAPTS] or key != "weight_decay":
                        settings[key] = group[key]
        self._method.update(send, last_first=self._per_bucket)

    # State

    def state_dict(self, root: int | None) -> dict[str, Any]:
        """Return the complete state by name, and the settings of the groups."""
        return self._with_groups(self._method.state_dict())

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return the same state with this rank's slices."""
        return self._with_groups(self._method.sharded_state_dict())

    def _with_groups(self, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "param_groups": [
            {**group, "params": list(names)}
            for group, names in zip(self.optimizer.param_groups, self._groups)]}

    def loader_of(self, state_dict: Mapping[str, Any]) -> Callable[[], None]:
        """Return a function that loads a complete or sharded state; see ClassUpdates."""
        groups = state_dict["param_groups"]
        if [list(group["params"]) for group in groups] != self._groups:
            raise ConfigError(
                f"rank {self._layout.comm.rank}: the state is of other groups of parameters; make "
                f"those that were saved")
        return functools.partial(self._load, state_dict)

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state; change nothing if it belongs to another optimizer. Collective, blocking."""
        self._method.load_state_dict(
            {key: x for key, x in state_dict.items() if key != "param_groups"})
        for group, saved in zip(
                self.optimizer.param_groups, settings_of(state_dict["param_groups"])):
            group.update(saved)


def _vectors_of(layout: ShardLayout) -> Callable[[str], Any]:
    """Return a function that returns a parameter as a vector that shares its memory."""
    views = {name: view for bucket in layout.weights.buckets for name, view in bucket.views.items()}
    return lambda name: views[name].reshape(-1)
