"""Fuses named reductions into vectors in node-shared memory."""

import itertools
import operator
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import Communicator, Handle
from ..provisional import Array, memory
from .arrays import scale
from .requests import DTYPES, NamedRequest, Terms, combined

_SHORTEST_BYTES = 1 << 20
# While one vector is combined, the other is filled.
_VECTORS = 2
# Number of cached lists of views.
_MAX_VIEWS = 16


@dataclass
class _Run:
    """Consecutive operations of one array package, either all in place or all not.

    `part` is the part of their `tensors` in the vector; `views` are its views in their shapes.
    """

    requests: list[NamedRequest]
    tensors: list[Any]
    part: Array
    views: Sequence[Any]

    def finish(self) -> None:
        """Copy the results from the vector to the operations."""
        results: Sequence[Any] = self.tensors
        first = self.requests[0]
        if first.in_place:
            first.arrays.copy_all(results, self.views)
        else:
            # Views of one copy, because many small allocations take three times as long.
            results = first.arrays.views(self.part.copy(), results)
        start = 0
        for request in self.requests:
            stop = start + len(request.tensors)
            request.results, start = results[start:stop], stop
            request.settle = request.handle = None


class FusedVector:
    """Operations whose arrays are combined as consecutive parts of one vector, `flat`.

    The operations of all runs have the same dtype, op and factors. If `blocking`, the constructor
    returns when the vector is combined. Collective.
    """

    def __init__(self, comm: Communicator, runs: list[_Run], flat: Array, *,
                 blocking: bool) -> None:
        self._runs, self._flat, self._terms = runs, flat, runs[0].requests[0].terms
        self._handle: Handle[Any] | None = None
        self._lock, self._is_settled = threading.Lock(), False
        op, self._divisor = combined(self._terms, comm.size)
        for run in runs:
            run.requests[0].arrays.copy_all(run.views, run.tensors)
        scale(flat, self._terms.factors[0])
        if blocking:
            comm.allreduce(flat, op=op)
        else:
            self._handle = comm.iallreduce(flat, op=op)
        for run in runs:
            for request in run.requests:
                request.handle, request.settle = self._handle, self.settle

    def settle(self) -> None:
        """Wait until the vector is combined, and set the results of the operations."""
        if self._handle is not None:
            self._handle.wait()
        with self._lock:
            if not self._is_settled:
                self._is_settled = True
                scale(self._flat, self._terms.factors[1], self._divisor)
                for run in self._runs:
                    run.finish()


class FusedVectors:
    """The fused vectors of a Matcher, each of at most `max_bytes`."""

    def __init__(self, comm: Communicator, max_bytes: int) -> None:
        self._comm, self._max_bytes = comm, max_bytes
        self._memory = [np.empty(0, np.uint8)] * _VECTORS
        self._used: list[FusedVector | None] = [None] * _VECTORS
        self._views: dict[Any, Sequence[Any]] = {}

    def fuses(self, terms: Terms) -> bool:
        """Return whether an operation will be fused."""
        return terms.fused is not None and terms.nbytes <= self._max_bytes

    def start(self, requests: Sequence[NamedRequest], *, blocking: bool) -> list[NamedRequest]:
        """Start the operations that can be fused, and return the other ones.

        The operations are the same, in the same order, on all ranks. If `blocking`, and one vector
        holds all of them, return when it is combined. If there are more vectors than buffers, wait
        for earlier ones. Collective.
        """
        by_terms, others = defaultdict[Any, list[NamedRequest]](list), list[NamedRequest]()
        terms, group = None, others
        for request in requests:
            if request.terms is not terms:
                terms = request.terms
                group = by_terms[terms.fused] if self.fuses(terms) else others
            group.append(request)
        vectors = [vector for group in by_terms.values() for vector in self._split(group)]
        for number, vector in enumerate(vectors):
            # Each batch starts with the first buffer, which is still in the cache.
            self._combine(number % _VECTORS, vector,
                          blocking=blocking and len(vectors) == 1 and not others)
        return others

    def _split(self, requests: list[NamedRequest]) -> list[list[NamedRequest]]:
        """Return the requests of each vector."""
        if sum([request.terms.nbytes for request in requests]) <= self._max_bytes:
            return [requests]
        vectors: list[list[NamedRequest]] = [[]]
        nbytes = 0
        for request in requests:
            nbytes += request.terms.nbytes
            if nbytes > self._max_bytes and vectors[-1]:
                vectors.append([])
                nbytes = request.terms.nbytes
            vectors[-1].append(request)
        return vectors

    def _combine(self, number: int, requests: list[NamedRequest], *, blocking: bool) -> None:
        nbytes = sum(request.terms.nbytes for request in requests)
        previous = self._used[number]
        if previous is not None:
            previous.settle()
        if self._memory[number].size < nbytes:
            capacity = max(_SHORTEST_BYTES, 1 << (nbytes - 1).bit_length())
            self._memory[number] = self._comm.empty(capacity, np.uint8)
            self._views.clear()
        flat = self._memory[number][:nbytes].view(
            memory.dtype_named(requests[0].terms.dtypes[0], DTYPES))
        self._used[number] = FusedVector(self._comm, self._runs(number, requests, flat), flat,
                                         blocking=blocking)

    def _runs(self, number: int, requests: list[NamedRequest], flat: Array) -> list[_Run]:
        """Return the operations of a vector in runs; their views are cached."""
        runs: list[_Run] = []
        start = 0
        for (arrays, _), group in itertools.groupby(
                requests, operator.attrgetter("arrays", "in_place")):
            row = list(group)
            tensors = [x for request in row for x in request.tensors]
            stop = start + sum([request.terms.nbytes for request in row]) // flat.itemsize
            key = (number, start, arrays, *[request.terms for request in row])
            if key not in self._views:
                if len(self._views) >= _MAX_VIEWS:
                    self._views.clear()
                self._views[key] = arrays.views(flat[start:stop], tensors)
            runs.append(_Run(row, tensors, flat[start:stop], self._views[key]))
            start = stop
        return runs
