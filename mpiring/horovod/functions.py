"""Broadcasts objects and arrays from one rank, and gathers objects of all ranks."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from .arrays import NumPyArrays
from .process_sets import ProcessSet
from .world import global_process_set


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> Any:
    """Return the object of rank `root_rank`.

    Args:
        obj: Any object that can be pickled; ignored on other ranks.
        root_rank: Global rank that has the object.
        name: Argument for compatibility with Horovod; ignored.
        process_set: Ranks that get the object.

    Raises:
        ConfigError: The object cannot be pickled; raised on all ranks.

    Collective: yes. Blocking: yes.
    """
    root = process_set.root(root_rank)
    return process_set.arrive("broadcast_object").broadcast_object(obj, root=root)


def broadcast_object_fn(root_rank: int = 0, session: Any = None, name: str | None = None,
                        process_set: ProcessSet = global_process_set) -> Callable[[Any], Any]:
    """Return `broadcast_object` as a function of the object only.

    Args:
        root_rank: Global rank that has the object.
        session, name: Arguments for compatibility with Horovod; ignored.
        process_set: Ranks that get the object.
    """
    return lambda obj: broadcast_object(obj, root_rank, name, process_set)


def allgather_object(obj: Any, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks, in rank order.

    Args:
        obj: Any object that can be pickled.
        name: Argument for compatibility with Horovod; ignored.
        process_set: The ranks.

    Raises:
        ConfigError: An object cannot be pickled; raised on all ranks.

    Collective: yes. Blocking: yes.
    """
    return process_set.arrive("allgather_object").allgather_object(obj)


def named(params: Any, kind: type) -> list[tuple[str, Any]]:
    """Return pairs of name and array; the pairs of a mapping are sorted by name.

    Raises ValueError unless `params` is a mapping, or an iterable of arrays or of pairs, and all
    arrays are of the class `kind`.
    """
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, str | kind):
        pairs = [p if isinstance(p, tuple) else (str(i), p) for i, p in enumerate(params)]
    else:
        raise ValueError(f"invalid params of type: {type(params)}; pass model.state_dict(), or a "
                         f"list")
    for name, value in pairs:
        if not isinstance(value, kind):
            raise ValueError(f"params[{name!r}] is a {type(value).__name__}: expected a "
                             f"{kind.__name__}; send it by broadcast_object")
    return pairs


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Copy one rank's arrays to all ranks.

    Args:
        params: A mapping from names to arrays, or a list of arrays; the same on all ranks.
        root_rank: Rank whose arrays are copied.

    Raises:
        ValueError: `params` has another type, or the arrays differ between ranks.

    Collective: yes. Blocking: yes.
    """
    arrays = [NumPyArrays().array(x, written=True) for _, x in named(params, np.ndarray)]
    comm = global_process_set.arrive("broadcast_parameters")
    for array in arrays:
        # Ranks may have different memory orders.
        rows = np.ascontiguousarray(array)
        comm.broadcast(rows, root=root_rank)
        if not array.flags.c_contiguous:
            np.copyto(array, rows)
