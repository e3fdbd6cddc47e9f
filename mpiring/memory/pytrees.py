"""Walks pytrees: nested mappings, lists and tuples, with any other objects as leaves."""

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

Path = tuple[Any, ...]


def leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the leaves of a pytree, in order, each with its path (the keys that lead to it)."""
    if isinstance(tree, Mapping):
        for key in list(tree):
            yield from leaves(tree[key], (*path, key))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from leaves(value, (*path, index))
    else:
        yield path, tree


def path_text(path: Path) -> str:
    """Return the keys of a path as in Python: `['a'][0]`."""
    return "".join(f"[{key!r}]" for key in path)


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of a pytree with the same types, and with each leaf changed, in order.

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
            # A namedtuple's constructor needs separate arguments.
            return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
        return parts
    return change(tree)
