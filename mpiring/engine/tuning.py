"""Measures the algorithms on this cluster, once, and keeps what it found for the next job."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from ..launch.cache import Cache
from ..memory.arrays import Array
from ..operations.model import Curve, Model
from ..operations.operation import Collectives
from ..transport.base import Schedule, T

_log = logging.getLogger("mpiring")

# To be raised when the algorithms change so much that kept models mislead.
_EDITION = 2
SIZES = (64, 4 << 10, 64 << 10, 512 << 10, 2 << 20)
# Of so many calls the fastest counts: whatever disturbs one makes it slower.
_CALLS, _LONG_CALLS = 5, 2
_LONG_S = 1e-3
# No size is begun that would end later than this: half a second is promised.
_BUDGET_S = 0.35
# A kept model is checked at a size that outlasts what a network buffers, if it has one.
_CHECKED_BYTES = 512 << 10
# A model from the disk is not believed if one call takes this many times longer or shorter.
_TOLERANCE = 2.0


class Tuner:
    """Finds the model of one communicator.

    Args:
        empty: Returns a vector of so many float32 in the memory that buckets are in.
        allreduce: Runs a blocking allreduce of an array by an algorithm.
        slowest: Returns the largest of all ranks' numbers.
        broadcast: Returns rank 0's text on all ranks.
        rank: This rank.
        candidates: The algorithms to try.
        cache: Keeps the model of such a cluster for the next job.
    """

    def __init__(self, *, empty: Callable[[int], Array],
                 allreduce: Callable[[Array, str], object], slowest: Callable[[float], float],
                 broadcast: Callable[[str], str], rank: int, candidates: Sequence[str],
                 cache: Cache) -> None:
        self._allreduce, self._slowest, self._broadcast = allreduce, slowest, broadcast
        self._empty = empty
        self._rank = rank
        self._candidates = candidates
        self._cache = cache

    def find(self, *, fresh: bool = False) -> Model:
        """Return the kept model if one call confirms it, else measure and keep a new one.

        Args:
            fresh: Measure in any case.

        Collective: yes. Blocking: yes.
        """
        model = None if fresh else self._kept()
        if model is None or not self._is_right(model):
            model = self.probe()
            self._keep(model)
        return model

    def probe(self) -> Model:
        """Return a model of measured times; the same on all ranks.

        Collective: yes. Blocking: yes.
        """
        x = self._zeros(SIZES[-1])
        points: dict[str, list[tuple[int, float]]] = {name: [] for name in self._candidates}
        began = time.perf_counter()
        for size in SIZES:
            times = {name: found[-1][1] * size / found[-1][0]
                     for name, found in points.items() if found}
            ahead_s = sum(seconds * (1 + _calls(seconds)) for seconds in times.values())
            # With the smallest sizes, latency makes this a gross overestimate.
            if size > SIZES[1] and self._slowest(
                    time.perf_counter() - began) + ahead_s > _BUDGET_S:
                break
            for name in self._candidates:
                seconds = self._time_of(name, x[:size // 4], times.get(name, 0.0))
                points[name].append((size, seconds))
        return Model(tuple((name, Curve(tuple(found))) for name, found in points.items()))

    def _zeros(self, nbytes: int) -> Array:
        x = self._empty(nbytes // 4)
        x[...] = 0
        return x

    def _time_of(self, algorithm: str, x: Array, expected_s: float) -> float:
        self._allreduce(x, algorithm)
        times = []
        for _ in range(_calls(expected_s)):
            # Ranks that come late would be counted as slow communication.
            self._slowest(0.0)
            began = time.perf_counter()
            self._allreduce(x, algorithm)
            times.append(time.perf_counter() - began)
        return self._slowest(min(times))

    def _is_right(self, model: Model) -> bool:
        """Return whether a kept model still fits: links may have changed under the same names."""
        curves = dict(model.curves)
        if tuple(curves) != tuple(self._candidates):
            return False
        name = self._candidates[0]
        size = min(_CHECKED_BYTES, curves[name].points[-1][0])
        expected_s = curves[name].time_s(size)
        ratio = self._time_of(name, self._zeros(size), expected_s) / expected_s
        return 1 / _TOLERANCE < ratio < _TOLERANCE

    def _kept(self) -> Model | None:
        """Return the model that rank 0 finds on its disk."""
        text = self._cache.read("model") if self._rank == 0 else ""
        try:
            text = Model.from_json(text).to_json() if text else ""
        except (ValueError, KeyError, TypeError):
            text = ""
        text = self._broadcast(text)
        return Model.from_json(text) if text else None

    def _keep(self, model: Model) -> None:
        """Write the model on rank 0; a folder that cannot be written to is no reason to fail."""
        if self._rank:
            return
        try:
            self._cache.write("model", model.to_json())
        except OSError as exc:
            _log.warning(
                "what was measured cannot be kept in %s (%s), so each job measures anew; set "
                "MPIRING_TUNING_FOLDER to a folder that rank 0 can write to, or to nothing",
                self._cache.folder, exc.strerror or exc)


class Run(Protocol):
    """Runs an operation of a communicator; see group.Group."""

    def __call__(self, step: str, build: Callable[[Collectives], Schedule[T]]) -> T:
        """Return the result of the schedule that is built.

        Collective: yes. Blocking: yes.
        """


def tuner_over(run: Run, *, rank: int, candidates: Sequence[str], cluster: str,
               folder: str) -> Tuner:
    """Return a Tuner that measures the operations of a communicator.

    Args:
        run: Runs them.
        rank, candidates: As for Tuner.
        cluster: Describes it; models are kept by that.
        folder: The setting `tuning_folder`.
    """
    def slowest(seconds: float) -> float:
        x = np.array([seconds])
        run("compare times", lambda collectives: collectives.allreduce(
            x, op="max", algorithm="ring"))
        return float(x[0])

    def broadcast(text: str) -> str:
        mine = np.frombuffer(text.encode(), np.uint8)
        return bytes(run("read what was kept", lambda collectives: (
            collectives.broadcast_bytes(mine, 0)))).decode()

    return Tuner(
        empty=lambda n: run(f"memory for {n} numbers",
                            lambda collectives: collectives.empty((n,), np.float32)),
        allreduce=lambda x, name: run(f"{name} of {x.nbytes} bytes", lambda collectives: (
            collectives.allreduce(x, algorithm=name))),
        slowest=slowest, broadcast=broadcast, rank=rank, candidates=candidates,
        cache=Cache(folder, "", f"{_EDITION} {cluster}"))


def _calls(expected_s: float) -> int:
    """Return how often to time a call."""
    return _LONG_CALLS if expected_s > _LONG_S else _CALLS
