"""Lets whoever reads a parameter wait until it is complete, and nobody else."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn import Parameter

from .hooks import Uncopied, weakly
from .private import is_compiled, parameters_of, set_parameters
from .weights import WeightBuckets


class Guarded(dict[str, Any]):
    """The parameters of a module by name, which wait before they are read.

    PyTorch reads them here; see `private.parameters_of`.

    Args:
        parameters: As they were.
        wait: Called each time.
    """

    def __init__(self, parameters: Mapping[str, Any], wait: Callable[[], None]) -> None:
        super().__init__(parameters)
        self._wait = wait

    def __getitem__(self, name: str) -> Any:
        self._wait()
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a parameter, or `default`."""
        self._wait()
        return super().get(name, default)

    def items(self) -> Any:
        """Return names and parameters."""
        self._wait()
        return super().items()

    def values(self) -> Any:
        """Return the parameters."""
        self._wait()
        return super().values()

    def __reduce__(self) -> Any:
        self._wait()
        return dict, (dict(super().items()),)


class Guard:
    """Guards the weights of a module while they are under way.

    Each module in it that has parameters of its own waits for the buckets that hold these: before
    its forward pass, since some keep references to their parameters (LSTM), and when one is looked
    up, since modules use those of others (MultiheadAttention).

    Args:
        module: The module.
        weights: Its weights.
        buckets: By parameter, the index of its bucket.

    Attributes:
        unguarded: The buckets of what nobody would wait for: compiled modules have no such hooks.
    """

    def __init__(self, module: nn.Module, weights: WeightBuckets,
                 buckets: Mapping[Parameter, int]) -> None:
        self.unguarded: set[int] = set()
        self._guarded: list[nn.Module] = []
        self._hooks: list[Any] = []
        compiled = {part for root in module.modules() if is_compiled(root)
                    for part in root.modules()}
        for part in module.modules():
            indices = {buckets[p] for p in part.parameters(recurse=False) if p in buckets}
            if part in compiled:
                self.unguarded |= indices
            elif indices:
                self._add(part, Uncopied(weakly(weights.wait_for, sorted(indices))))
        # Once: others may guard the module afterwards.
        self._end = weakref.finalize(self, _remove, self._hooks, self._guarded)
        self._end.atexit = False

    def _add(self, part: nn.Module, wait: Callable[..., None]) -> None:
        set_parameters(part, Guarded(parameters_of(part), wait))
        self._guarded.append(part)
        self._hooks.append(part.register_forward_pre_hook(wait, prepend=True))

    def remove(self) -> None:
        """Leave the module as it was."""
        self._end()


def _remove(hooks: Sequence[Any], guarded: Sequence[nn.Module]) -> None:
    for hook in hooks:
        hook.remove()
    for part in guarded:
        set_parameters(part, dict(parameters_of(part)))


def without_waiting(module: nn.Module) -> Iterator[tuple[str, Parameter]]:
    """Yield what `named_parameters` does; they may be incomplete, to look at their values."""
    seen = set()
    for prefix, part in module.named_modules():
        parameters = parameters_of(part)
        # Those of TorchScript are no dict.
        items = dict.items if isinstance(parameters, dict) else type(parameters).items
        for name, p in items(parameters):
            if p is not None and p not in seen:
                seen.add(p)
                yield f"{prefix}.{name}" if prefix else name, p
