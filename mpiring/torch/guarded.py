"""Lets whoever reads a parameter wait until it is complete, and nobody else."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn import Parameter

from .hooks import Uncopied, weakly
from .private import is_compiled, parameters_of, set_parameters
from .weights import WeightBuckets


def _waiting(read: Callable[..., Any]) -> Any:
    """Return a method of `dict` for `Guarded`, which waits first."""
    def read_complete(parameters: "Guarded", *args: Any) -> Any:
        parameters.wait()
        return read(parameters, *args)

    return read_complete


class Guarded(dict[str, Any]):
    """The parameters of a module by name, which wait before they are read.

    PyTorch reads them here; see `private.parameters_of`.

    Args:
        parameters: As they were.
        wait: Called each time.
    """

    def __init__(self, parameters: Mapping[str, Any], wait: Callable[[], None]) -> None:
        super().__init__(parameters)
        self.wait = wait

    __getitem__ = _waiting(dict.__getitem__)
    get = _waiting(dict.get)
    items = _waiting(dict.items)
    values = _waiting(dict.values)

    def __reduce__(self) -> Any:
        self.wait()
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
        remove: Leaves the module as it was.
    """

    def __init__(self, module: nn.Module, weights: WeightBuckets,
                 buckets: Mapping[Parameter, int]) -> None:
        self.unguarded: set[int] = set()
        restored = contextlib.ExitStack()
        compiled = {part for root in module.modules() if is_compiled(root)
                    for part in root.modules()}
        for part in module.modules():
            indices = {buckets[p] for p in part.parameters(recurse=False) if p in buckets}
            if part in compiled:
                self.unguarded |= indices
            elif indices:
                wait = Uncopied(weakly(weights.wait_for, sorted(indices)))
                set_parameters(part, Guarded(parameters_of(part), wait))
                restored.callback(_unguard, part)
                restored.enter_context(part.register_forward_pre_hook(wait, prepend=True))
        # Once: others may guard the module afterwards.
        self.remove = weakref.finalize(self, restored.close)
        self.remove.atexit = False


def _unguard(part: nn.Module) -> None:
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
