"""Collectives on Python objects: what pickles travels as bytes."""

import pickle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arguments import whole_number
from .engine.group import Group
from .errors import ConfigError
from .operations.agreement import Call
from .transport.base import T


class ObjectCollectives:
    """The part of a Communicator that takes Python objects."""

    rank: int
    size: int
    _group: Group

    def broadcast_object(self, obj: T, *, root: int = 0) -> T:
        """Return the object that rank `root` passed, on every rank.

        Args:
            obj: Anything that pickles; ignored on ranks other than `root`.
            root: The rank whose object is copied.

        Raises:
            ConfigError: It does not pickle; raised on all ranks.

        Collective: yes. Blocking: yes.
        """
        root = self._root(root)
        mine, problem = _pickled(obj) if self.rank == root else (np.empty(0, np.uint8), "")
        payload = self._group.run(Call("broadcast_object", f"from root {root}"),
                                  lambda collectives: collectives.broadcast_bytes(mine, root))
        if self.rank != root:
            obj, problem = pickle.loads(payload.data)
        _refuse_unpickled(root, problem)
        return obj

    def allgather_object(self, obj: T) -> list[T]:
        """Return the objects that all ranks passed, in rank order.

        Args:
            obj: Anything that pickles; types and sizes may differ.

        Raises:
            ConfigError: A rank's does not pickle; raised on all ranks.

        Collective: yes. Blocking: yes.
        """
        mine, _ = _pickled(obj)
        payloads = self._group.run(
            Call("allgather_object"), lambda collectives: collectives.allgather_bytes(mine))
        found = [pickle.loads(payload.data) for payload in payloads]
        for rank, (_, problem) in enumerate(found):
            _refuse_unpickled(rank, problem)
        return [theirs for theirs, _ in found]

    def _root(self, root: int) -> int:
        return whole_number(f"rank {self.rank}: root", root, 0, self.size - 1)


def _pickled(obj: object) -> tuple[NDArray[Any], str]:
    """Return a pair of an object and a problem, "" if it pickles, as bytes; and the problem.

    The other ranks wait for the bytes, and so learn of the problem.
    """
    problem = ""
    try:
        data = pickle.dumps((obj, problem), pickle.HIGHEST_PROTOCOL)
    except Exception as exc:
        problem = f"a {type(obj).__qualname__} does not pickle: {exc}"
        data = pickle.dumps((None, problem))
    return np.frombuffer(data, np.uint8), problem


def _refuse_unpickled(rank: int, problem: str) -> None:
    if problem:
        raise ConfigError(f"rank {rank}: {problem}; send arrays, numbers, texts, or nests of them")
