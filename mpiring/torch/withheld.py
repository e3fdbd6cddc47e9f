"""Substitutes for gradients that must be neither read nor written, such as gradients in flight."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..memory.pytrees import mapped
from .private import current_pass, empty_shell, only_reads, version_of, without_subclasses
from .tensors import tensors_in

Refusal = Callable[[str], Exception]

# Functions that do not call `__torch_dispatch__`, or only after they have failed.
_BYPASSING = {"__set__", "numpy", "tolist", "data_ptr", "storage", "untyped_storage", "__array__",
              "__dlpack__", "__dlpack_device__", "__deepcopy__", "__reduce_ex__", "share_memory_"}
_ZEROING = {"zero_", "_foreach_zero_"}


class WithheldGradient(torch.Tensor):
    """Substitute for the gradient of a parameter, with its shape, dtype and device, but no memory.

    Any use of its elements raises an error: in Python, through views such as `.data`, in NumPy, in
    foreach kernels, in GradScaler, and in autograd. A program can only assign another gradient to
    the parameter, which the identity of the substitute shows.

    `refusal` returns the error, given the name of the refused function. If `droppable`, zeroing is
    allowed, as `zero_grad(set_to_none=False)` does. Operations may read, but not view, `source`
    instead of this tensor.
    """

    _refusal: Refusal
    _droppable: bool
    source: torch.Tensor | None
    is_zeroed: bool

    @staticmethod
    def __new__(cls, p: torch.Tensor, refusal: Refusal, *,
                droppable: bool = False) -> "WithheldGradient":
        """Return a substitute."""
        shell = empty_shell(cls, p)
        shell._refusal, shell._droppable = refusal, droppable
        shell.source, shell.is_zeroed = None, False
        return shell

    def __init__(self, p: torch.Tensor, refusal: Refusal, *, droppable: bool = False) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse functions that bypass `__torch_dispatch__`, such as `numpy`."""
        name = getattr(func, "__name__", str(func))
        if name in _BYPASSING:
            raise _substitutes_in((args, kwargs))[0]._refusal(name)
        with without_subclasses():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse operations on elements, except for those that `source` and `droppable` allow."""
        withheld, name = _substitutes_in((args, kwargs)), func.__name__.split(".")[0]
        if only_reads(func) and all(x.source is not None for x in withheld):
            return func(*mapped(args, _readable), **mapped(kwargs or {}, _readable))
        if name not in _ZEROING or not all(x._droppable for x in withheld):
            raise withheld[0]._refusal(name)
        for x in tensors_in(args):
            if isinstance(x, WithheldGradient):
                x.is_zeroed = True
            else:
                x.zero_()
        return args[0] if isinstance(args[0], torch.Tensor) else None

    def __repr__(self, **_: Any) -> str:
        return f"WithheldGradient({self.dtype}, {tuple(self.shape)})"


def _substitutes_in(nest: object) -> list[WithheldGradient]:
    return [x for x in tensors_in(nest) if isinstance(x, WithheldGradient)]


def _readable(x: Any) -> Any:
    return x.source if isinstance(x, WithheldGradient) else x


class WithheldGradients:
    """Gradients that parameters do not have until `release`.

    `refusal` returns the error, given the names of the gradient and of the refused function.
    """

    def __init__(self, refusal: Callable[[str, str], Exception]) -> None:
        self._refusal = refusal
        # For each: its name, its parameter, the gradient, and the version of the gradient.
        self._gradients: list[tuple[str, torch.Tensor, torch.Tensor | None, int]] = []
        # Substitutes are made once, since this takes longer than the rest.
        self._substitutes: dict[str, WithheldGradient] = {}

    @property
    def names(self) -> list[str]:
        """The names of the gradients that are withheld."""
        return [name for name, *_ in self._gradients]

    def withhold(self, name: str, p: torch.Tensor, *, readable: bool) -> None:
        """Replace a gradient by a substitute, which operations may read if `readable`."""
        gradient, substitute = p.grad, self._substitutes.get(name)
        if substitute is None:
            substitute = self._substitutes[name] = WithheldGradient(
                p, functools.partial(self._refusal, name))
        substitute.source = gradient if readable else None
        version = 0 if gradient is None else version_of(gradient)
        self._gradients.append((name, p, gradient, version))
        p.grad = substitute

    def release(self) -> list[str]:
        """Return withheld gradients to their parameters, unless the program has assigned others.

        Return the names of gradients that the program has replaced, or written to by old
        references.
        """
        changed = []
        while self._gradients:
            name, p, gradient, version = self._gradients.pop()
            substitute = self._substitutes[name]
            substitute.source = None
            if p.grad is substitute:
                p.grad = gradient
                if gradient is None or version_of(gradient) == version:
                    continue
            changed.append(name)
        return changed[::-1]


def in_backward() -> bool:
    """Return whether this thread runs a backward pass."""
    return current_pass() >= 0


def substitutes(parameters: Mapping[str, torch.Tensor], refusal: Refusal, *,
                droppable: bool = False) -> dict[str, WithheldGradient]:
    """Return a substitute for the gradient of each parameter."""
    return {name: WithheldGradient(p, refusal, droppable=droppable)
            for name, p in parameters.items()}
