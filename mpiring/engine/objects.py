"""Sends Python objects between ranks as bytes; most fit into one short message."""

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..operations.agreement import Call
from ..transport.base import T
from .group import Group
from .prepared import Pattern, Prepared

# Sizes of the first message, which holds most objects, and of the length field at its start.
_HEAD_BYTES, _LENGTH_BYTES = 1024, 8
# Label of a program's own call; labels of other calls say what is compared.
UNLABELED = "allgather_object"


def broadcast(group: Group, obj: T, root: int) -> T:
    """Return the object that rank `root` passed; see Communicator.broadcast_object."""
    pickled, problem = _pickle(obj) if group.rank == root else (np.empty(0, np.uint8), "")
    head = _head(pickled)
    _run_short(group, Call("broadcast_object", f"from root {root}"), "broadcast", head, root)
    nbytes = _length(head)
    payload = head[_LENGTH_BYTES:_LENGTH_BYTES + nbytes]
    if nbytes > payload.size:
        payload = pickled if group.rank == root else np.empty(nbytes, np.uint8)
        group.run(Call("broadcast_object", f"of {nbytes} bytes from root {root}"),
                  lambda collectives: collectives.broadcast(payload, root))
    if group.rank != root:
        obj, problem = pickle.loads(payload.data)
    _refuse_unpickled(root, problem)
    return obj


def allgather(group: Group, obj: T, label: str) -> list[T]:
    """Return the objects that all ranks passed; see Communicator.allgather_object."""
    pickled, _ = _pickle(obj)
    heads = np.empty((group.size, _HEAD_BYTES), np.uint8)
    heads[group.rank] = _head(pickled)
    call = Call(label, prepares=label != UNLABELED)
    _run_short(group, call, "allgather", heads.reshape(-1), None)
    lengths = [_length(head) for head in heads]
    payloads = [head[_LENGTH_BYTES:_LENGTH_BYTES + nbytes]
                for head, nbytes in zip(heads, lengths)]
    if max(lengths) > _HEAD_BYTES - _LENGTH_BYTES:
        payloads = [np.empty(nbytes, np.uint8) for nbytes in lengths]
        payloads[group.rank] = pickled
        group.run(replace(call, detail=f"of up to {max(lengths)} bytes"),
                  lambda collectives: collectives.allgather_chunks(payloads))
    unpickled = [pickle.loads(payload.data) for payload in payloads]
    for rank, (_, problem) in enumerate(unpickled):
        _refuse_unpickled(rank, problem)
    return [loaded for loaded, _ in unpickled]


def _run_short(group: Group, call: Call, kind: str, x: NDArray[Any],
               root: int | None) -> None:
    """Run a collective on a short vector, whose length is the same in all calls."""
    prepared = group.prepared.get(call)
    if prepared is None:
        prepared = Prepared(group, call, Pattern(kind, root, x.dtype, x.size))
        group.keep(call, prepared)
    prepared.run(x)


def _head(data: NDArray[Any]) -> NDArray[Any]:
    """Return the first message: the length of the data, and as much of the data as fits."""
    head = np.empty(_HEAD_BYTES, np.uint8)
    head[:_LENGTH_BYTES].view(np.int64)[0] = data.size
    first = data[:_HEAD_BYTES - _LENGTH_BYTES]
    head[_LENGTH_BYTES:_LENGTH_BYTES + first.size] = first
    return head


def _length(head: NDArray[Any]) -> int:
    return int(head[:_LENGTH_BYTES].view(np.int64)[0])


def _pickle(obj: object) -> tuple[NDArray[Any], str]:
    """Return the pickled pair (object, problem), and the problem; "" if the object pickles.

    The other ranks wait for these bytes, so the problem is sent before it is raised.
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
        raise ConfigError(f"rank {rank}: {problem}; send arrays, numbers, strings or lists of them")
