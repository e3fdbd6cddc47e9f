"""Measures the algorithms on this cluster, once, and saves the result for the next job."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..launch.cache import Cache
from ..memory.arrays import Array
from ..operations.model import Curve, Model
from ..operations.collectives import Collectives
from ..transport.base import Schedule

_log = logging.getLogger("mpiring")

# Increase it after changes to the algorithms that make saved models misleading.
_EDITION = 2
SIZES = (64, 4 << 10, 64 << 10, 512 << 10, 2 << 20)
# The fastest of this many calls counts, because disturbances only make calls slower.
_CALLS, _LONG_CALLS = 5, 2
_LONG_S = 1e-3
# Measuring stops before it would take longer than this; the documentation promises half a second.
_BUDGET_S = 0.35
# A saved model is checked at this size, which exceeds the buffers of networks, or at its largest
# size.
_CHECKED_BYTES = 512 << 10
# A saved model is wrong if a call is slower or faster by this factor.
_TOLERANCE = 2.0


# Function of a text for reports and a function that builds a schedule; it runs the schedule, and
# returns the result.
Run = Callable[[str, Callable[[Collectives], Schedule[Any]]], Any]


class Tuner:
    """Determines the cost model of a communicator.

    The function `run` runs an operation of all ranks to its end. A model is saved by the
    description of the cluster, in the folder of the setting `tuning_folder`.
    """

    def __init__(self, run: Run, *, rank: int, candidates: Sequence[str], cluster: str,
                 folder: str) -> None:
        self._run = run
        self._rank = rank
        self._candidates = candidates
        self._cache = Cache(folder, "", f"{_EDITION} {cluster}")

    def find(self, *, fresh: bool = False) -> Model:
        """Return the saved model if one call confirms it; otherwise measure and save a new one.

        If `fresh`, measure in any case. Collective and blocking.
        """
        model = None if fresh else self._load()
        if model is None or not self._is_valid(model):
            model = self.probe()
            if self._rank == 0:
                self._save(model)
        return model

    def probe(self) -> Model:
        """Return a model of measured times, the same on all ranks; collective and blocking."""
        x = self._zeros(SIZES[-1])
        points: dict[str, list[tuple[int, float]]] = {name: [] for name in self._candidates}
        began_s = time.perf_counter()
        for size in SIZES:
            times = {name: measured[-1][1] * size / measured[-1][0]
                     for name, measured in points.items() if measured}
            needed_s = sum(seconds * (1 + _call_count(seconds)) for seconds in times.values())
            # For the smallest sizes, latency makes this a gross overestimate.
            if size > SIZES[1] and self._slowest(
                    time.perf_counter() - began_s) + needed_s > _BUDGET_S:
                break
            for name in self._candidates:
                seconds = self._measure(name, x[:size // 4], times.get(name, 0.0))
                points[name].append((size, seconds))
        return Model(tuple((name, Curve(tuple(measured))) for name, measured in points.items()))

    def _zeros(self, nbytes: int) -> Array:
        """Return a float32 vector of zeros, in memory like that of buckets."""
        x: Array = self._run(f"memory for {nbytes} bytes",
                             lambda collectives: collectives.empty((nbytes // 4,), np.float32))
        x[...] = 0
        return x

    def _measure(self, algorithm: str, x: Array, expected_s: float) -> float:
        """Return the duration of an allreduce on the slowest rank, in seconds."""
        def allreduce() -> None:
            self._run(f"{algorithm} of {x.nbytes} bytes",
                      lambda collectives: collectives.allreduce(x, algorithm=algorithm))

        allreduce()
        times = []
        for _ in range(_call_count(expected_s)):
            # Synchronize first: late ranks would count as slow communication.
            self._slowest(0.0)
            began_s = time.perf_counter()
            allreduce()
            times.append(time.perf_counter() - began_s)
        return self._slowest(min(times))

    def _slowest(self, seconds: float) -> float:
        """Return the maximum of all ranks' numbers."""
        x = np.array([seconds])
        self._run("compare times", lambda collectives: collectives.allreduce(
            x, op="max", algorithm="ring"))
        return float(x[0])

    def _is_valid(self, model: Model) -> bool:
        """Return whether a saved model still fits; links may have changed under the same names."""
        curves = dict(model.curves)
        if tuple(curves) != tuple(self._candidates):
            return False
        name = self._candidates[0]
        size = min(_CHECKED_BYTES, curves[name].points[-1][0])
        expected_s = curves[name].time_s(size)
        ratio = self._measure(name, self._zeros(size), expected_s) / expected_s
        return 1 / _TOLERANCE < ratio < _TOLERANCE

    def _load(self) -> Model | None:
        """Return the model that rank 0 has on disk."""
        text = self._cache.read("model") if self._rank == 0 else ""
        try:
            text = Model.from_json(text).to_json() if text else ""
        except (ValueError, KeyError, TypeError):
            text = ""
        content = np.frombuffer(text.encode(), np.uint8)
        text = bytes(self._run("read the saved model", lambda collectives: (
            collectives.broadcast_bytes(content, 0)))).decode()
        return Model.from_json(text) if text else None

    def _save(self, model: Model) -> None:
        """Save the model if the folder is writable; otherwise warn."""
        try:
            self._cache.write("model", model.to_json())
        except OSError as exc:
            _log.warning(
                "the measurements cannot be saved in %s (%s), so each job measures again; set "
                "MPIRING_TUNING_FOLDER to a folder that rank 0 can write to, or to nothing",
                self._cache.folder, exc.strerror or exc)


def _call_count(expected_s: float) -> int:
    """Return how many calls to time."""
    return _LONG_CALLS if expected_s > _LONG_S else _CALLS
