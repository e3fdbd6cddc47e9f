"""Walks pytrees: mappings, lists and tuples inside each other, with anything else as leaves."""

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

Path = tuple[Any, ...]


def leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the leaves of a pytree, in order, each with its path: the keys that lead to it."""
    if isinstance(tree, Mapping):
        for key in list(tree):
            yield from leaves(tree[key], (*path, key))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from leaves(value, (*path, index))
    else:
        yield path, tree


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of a pytree of the same types, with each leaf changed, in order.

    A mapping that cannot be written to is a leaf.
    """
    if isinstance(tree, MutableMapping):
        copied = copy.copy(tree)
        for key, value in tree.items():
            copied[key] = mapped(value, change)
        return copied
    if isinstance(tree, list | tuple):
        parts = [mapped(value, change) for value in tree]
        if isinstance(tree, tuple):
            # A namedtuple takes them one by one.
            return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
        return parts
    return change(tree)
