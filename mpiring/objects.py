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


# What most objects fit into travels with the length, in one message.
_HEAD_BYTES, _LENGTH_BYTES = 1024, 8


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
        pickled, problem = _pickled(obj) if self.rank == root else (np.empty(0, np.uint8), "")
        head = _head(pickled)
        self._run_short(Call("broadcast_object", f"from root {root}"), "broadcast", head, root)
        nbytes = _length(head)
        payload = head[_LENGTH_BYTES:_LENGTH_BYTES + nbytes]
        if nbytes > payload.size:
            payload = pickled if self.rank == root else np.empty(nbytes, np.uint8)
            self._group.run(Call("broadcast_object", f"of {nbytes} bytes from root {root}"),
                            lambda collectives: collectives.broadcast(payload, root))
        if self.rank != root:
            obj, problem = pickle.loads(payload.data)
        _refuse_unpickled(root, problem)
        return obj

    def allgather_object(self, obj: T, *, label: str = "allgather_object") -> list[T]:
        """Return the objects that all ranks passed, in rank order.

        Args:
            obj: Anything that pickles; types and sizes may differ.
            label: Name of the call in comparisons between ranks and in reports.

        Raises:
            ConfigError: A rank's does not pickle; raised on all ranks.

        Collective: yes. Blocking: yes.
        """
        pickled, _ = _pickled(obj)
        heads = np.empty((self.size, _HEAD_BYTES), np.uint8)
        heads[self.rank] = _head(pickled)
        self._run_short(Call(label), "allgather", heads.reshape(-1), None)
        lengths = [_length(head) for head in heads]
        payloads = [head[_LENGTH_BYTES:_LENGTH_BYTES + nbytes]
                    for head, nbytes in zip(heads, lengths)]
        if max(lengths) > _HEAD_BYTES - _LENGTH_BYTES:
            payloads = [np.empty(nbytes, np.uint8) for nbytes in lengths]
            payloads[self.rank] = pickled
            self._group.run(Call(label, f"of up to {max(lengths)} bytes"),
                            lambda collectives: collectives.allgather_chunks(payloads))
        unpickled = [pickle.loads(payload.data) for payload in payloads]
        for rank, (_, problem) in enumerate(unpickled):
            _refuse_unpickled(rank, problem)
        return [loaded for loaded, _ in unpickled]

    def _run_short(self, call: Call, kind: str, x: NDArray[Any], root: int | None) -> None:
        """Run a copy of a short vector; from the second time on, a fast call where that may be."""
        # A label may be the name of another collective.
        fast_calls, name = self._group.fast_calls, f"object: {call.kind}"
        if not fast_calls.again(name, x, root):
            self._group.run(call, lambda collectives: collectives.allgather(x) if root is None else
                            collectives.broadcast(x, root))
            fast_calls.note(name, call, x, root, kind)

    def _root(self, root: int) -> int:
        return whole_number(f"rank {self.rank}: root", root, 0, self.size - 1)


def _head(data: NDArray[Any]) -> NDArray[Any]:
    """Return a vector of the length of some bytes, and the first of them: what travels at once."""
    head = np.empty(_HEAD_BYTES, np.uint8)
    head[:_LENGTH_BYTES].view(np.int64)[0] = data.size
    first = data[:_HEAD_BYTES - _LENGTH_BYTES]
    head[_LENGTH_BYTES:_LENGTH_BYTES + first.size] = first
    return head


def _length(head: NDArray[Any]) -> int:
    return int(head[:_LENGTH_BYTES].view(np.int64)[0])


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
