"""Walks nests: mappings, lists and tuples inside each other, with anything else as leaves."""

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

Path = tuple[Any, ...]


def leaves(nest: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the leaves of a nest, in order, each with its path: the keys that lead to it."""
    if isinstance(nest, Mapping):
        for key in list(nest):
            yield from leaves(nest[key], (*path, key))
    elif isinstance(nest, list | tuple):
        for index, value in enumerate(nest):
            yield from leaves(value, (*path, index))
    else:
        yield path, nest


def mapped(nest: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of a nest of the same types, with each leaf changed, in order.

    A mapping that cannot be written to is a leaf.
    """
    if isinstance(nest, MutableMapping):
        copied = copy.copy(nest)
        for key, value in nest.items():
            copied[key] = mapped(value, change)
        return copied
    if isinstance(nest, list | tuple):
        parts = [mapped(value, change) for value in nest]
        if isinstance(nest, tuple):
            # A namedtuple takes them one by one.
            return type(nest)(*parts) if hasattr(nest, "_fields") else type(nest)(parts)
        return parts
    return change(nest)
