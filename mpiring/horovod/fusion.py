"""Fuses what ranks combine into vectors in the memory of their node."""

import itertools
import math
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..communicator import Communicator
from ..engine.handle import Handle
from ..memory.arrays import Array, dtype_named
from .arrays import scale
from .requests import DTYPES, Arrays, Request, combined

_SHORTEST_BYTES = 1 << 20
# One is filled while the other one is combined.
_VECTORS = 2


# Views of a vector, by what lies in it.
_MOST_VIEWS = 16


class FusedVector:
    """Operations whose arrays lie one behind the other in a vector, which is combined.

    Args:
        requests: Of one dtype, op and pair of factors.
        flat: Their vector.
        views: Of it, like their arrays.
    """

    def __init__(self, requests: Sequence[Request], flat: Array, views: Sequence[Any]) -> None:
        self._requests, self._flat, self._views = requests, flat, views
        self._terms = requests[0].terms
        self._handle: Handle[Any] | None = None
        self._divisor = 1
        self._lock, self._is_settled = threading.Lock(), False

    def combine(self, comm: Communicator, *, blocking: bool) -> None:
        """Begin to combine the vector, or combine it.

        Collective: yes. Blocking: if so.
        """
        op, self._divisor = combined(self._terms, comm.size)
        for arrays, views, _, group in self._alike():
            arrays.copy_all(views, [x for request in group for x in request.tensors])
        scale(self._flat, self._terms.factors[0])
        if blocking:
            comm.allreduce(self._flat, op=op)
        else:
            self._handle = comm.iallreduce(self._flat, op=op)
        for request in self._requests:
            request.handle, request.settle = self._handle, self.settle

    def settle(self) -> None:
        """Give the requests their results, when the vector is combined."""
        if self._handle is not None:
            self._handle.wait()
        with self._lock:
            if self._is_settled:
                return
            self._is_settled = True
            scale(self._flat, self._terms.factors[1], self._divisor)
            for arrays, views, part, group in self._alike():
                results: Sequence[Any] = [x for request in group for x in request.tensors]
                if group[0].in_place:
                    arrays.copy_all(results, views)
                else:
                    # Views of one copy: as many small pieces of memory take three times as long.
                    results = arrays.views(self._flat[part].copy(), results)
                start = 0
                for request in group:
                    stop = start + len(request.tensors)
                    request.results, start = results[start:stop], stop

    def _alike(self) -> Iterator[tuple[Arrays, Sequence[Any], slice, list[Request]]]:
        """Yield requests in a row of one package, and in place or not; their views, and where."""
        first = start = 0
        for (arrays, _), requests in itertools.groupby(
                self._requests, lambda each: (each.arrays, each.in_place)):
            group = list(requests)
            last = first + sum([len(request.tensors) for request in group])
            stop = start + sum([request.terms.nbytes for request in group]) // self._flat.itemsize
            yield arrays, self._views[first:last], slice(start, stop), group
            first, start = last, stop


class Fusion:
    """The vectors of a matcher.

    Args:
        comm: The ranks.
        most_bytes: Longest vector.
    """

    def __init__(self, comm: Communicator, most_bytes: int) -> None:
        self._comm, self._most_bytes = comm, most_bytes
        self._memory = [np.empty(0, np.uint8)] * _VECTORS
        self._used: list[FusedVector | None] = [None] * _VECTORS
        self._views: dict[Any, Sequence[Any]] = {}
        self._next = 0

    def start(self, requests: Sequence[Request], *, blocking: bool) -> list[Request]:
        """Begin operations that can be fused, the same in the same order on all ranks.

        Args:
            blocking: Where all are one vector, return when it is combined.

        Returns:
            The others.

        Collective: yes. Blocking: yes, where more vectors are needed than there are; or if asked.
        """
        alike, others = defaultdict[Any, list[Request]](list), []
        for request in requests:
            terms = request.terms
            if terms.fused is None or terms.nbytes > self._most_bytes:
                others.append(request)
            else:
                alike[terms.fused].append(request)
        vectors = [vector for group in alike.values() for vector in self._cut(group)]
        for vector in vectors:
            self._combine(vector, blocking=blocking and len(vectors) == 1 and not others)
        return others

    def _cut(self, requests: list[Request]) -> list[list[Request]]:
        """Return the requests of each vector."""
        if sum([request.terms.nbytes for request in requests]) <= self._most_bytes:
            return [requests]
        vectors: list[list[Request]] = [[]]
        nbytes = 0
        for request in requests:
            nbytes += request.terms.nbytes
            if nbytes > self._most_bytes and vectors[-1]:
                vectors.append([])
                nbytes = request.terms.nbytes
            vectors[-1].append(request)
        return vectors

    def _combine(self, requests: list[Request], *, blocking: bool) -> None:
        nbytes = sum(request.terms.nbytes for request in requests)
        number = self._next = (self._next + 1) % _VECTORS
        before = self._used[number]
        if before is not None:
            before.settle()
        if self._memory[number].size < nbytes:
            capacity = max(_SHORTEST_BYTES, 1 << (nbytes - 1).bit_length())
            self._memory[number] = self._comm.empty(capacity, np.uint8)
            self._views.clear()
        dtype = dtype_named(requests[0].terms.dtypes[0], DTYPES)
        flat = self._memory[number][:nbytes].view(dtype)
        vector = FusedVector(requests, flat, self._views_of(number, flat, requests))
        self._used[number] = vector
        vector.combine(self._comm, blocking=blocking)

    def _views_of(self, number: int, flat: Array, requests: Sequence[Request]) -> Sequence[Any]:
        """Return views like the arrays of requests; from a cache, since programs repeat."""
        key = (number, *[(request.arrays, request.terms) for request in requests])
        views = self._views.get(key)
        if views is None:
            views, start = [], 0
            for arrays, group in itertools.groupby(requests, lambda each: each.arrays):
                tensors = [x for request in group for x in request.tensors]
                stop = start + sum(math.prod(x.shape) for x in tensors)
                views += arrays.views(flat[start:stop], tensors)
                start = stop
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            self._views[key] = views
        return views
