"""Walks pytrees: nested mappings, lists and tuples, with any other objects as leaves."""

import copy
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

Path = tuple[Any, ...]


def leaves(tree: Any, path: Path = (), *,
           leaf: Callable[[Any], Any] = lambda x: x) -> Iterator[tuple[Path, Any]]:
    """Yield the leaves of a pytree, in order, each with its path (the keys that lead to it).

    `leaf` may return a pytree, which is walked in place of an object that is no container.
    """
    if isinstance(tree, Mapping):
        for key in list(tree):
            yield from leaves(tree[key], (*path, key), leaf=leaf)
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from leaves(value, (*path, index), leaf=leaf)
    elif (parts := leaf(tree)) is tree:
        yield path, tree
    else:
        yield from leaves(parts, path, leaf=leaf)


def at(tree: Any, path: Path) -> Any:
    """Return the part of a pytree to which a path leads."""
    return functools.reduce(operator.getitem, path, tree)


def path_text(path: Path) -> str:
    """Return the keys of a path as in Python: `['a'][0]`."""
    return "".join(f"[{key!r}]" for key in path)


def mapped(tree: Any, change: Callable[[Any], Any], into: Any = None) -> Any:
    """Return a copy of a pytree with the same types, and with each leaf changed, in order.

    A mapping that cannot be written to is a leaf. Dicts and lists of `into`, another pytree, are
    overwritten and returned at places where it has the same types and lengths.
    """
    reuses = type(into) is type(tree)
    if isinstance(tree, MutableMapping):
        items = [(key, mapped(value, change, into.get(key) if reuses else None))
                 for key, value in tree.items()]
        copied = into if reuses else copy.copy(tree)
        if reuses:
            copied.clear()
        for key, value in items:
            copied[key] = value
        return copied
    if isinstance(tree, list | tuple):
        reuses = reuses and len(into) == len(tree)
        parts = [mapped(value, change, into[index] if reuses else None)
                 for index, value in enumerate(tree)]
        if isinstance(tree, tuple):
            # A namedtuple's constructor needs separate arguments.
            return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
        if not reuses:
            return parts
        into[:] = parts
        return into
    return change(tree)
