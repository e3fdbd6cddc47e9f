"""Hooks that keep nothing alive, and hooks that do nothing in copies of a module."""

import functools
import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., object], *args: Any) -> Callable[..., None]:
    """Return a hook that calls a method, with these arguments first, while its object lives.

    Python's garbage collector does not find cycles through the hooks of tensors, and some hooks
    are never removed.
    """
    reference = weakref.WeakMethod(method)

    def hook(*more: Any) -> None:
        living = reference()
        if living is not None:
            living(*args, *more)

    return hook


class Uncopied(functools.partial[None]):
    """A hook of a module that does nothing in copies and pickles of the module."""

    def __reduce__(self) -> Any:
        return functools.partial, (_nothing,)


def _nothing(*_: object) -> None:
    """Do nothing, in the place of a hook."""
