"""Times calls, and summarizes the times."""

import contextlib
import gc
import itertools
import math
import random
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from .world import World

# Smallest and largest number of calls per case and round.
_MIN_CALLS, MAX_CALLS = 2, 200
_RESAMPLES = 1000
Action = Callable[[], object]
# Returns the seconds that an action takes.
Stopwatch = Callable[[Action], float]
# Times in seconds, by kind.
Readings = dict[str, list[float]]
T = TypeVar("T")


def by_clock(action: Action) -> float:
    """Return the seconds that an action takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def finish(event: Any) -> None:
    """Spin until a GPU has reached an event; a sleep would lengthen the measured time."""
    while not event.test():
        pass


def timed(world: World, action: Action, calls: int, *,
          prepare: Action = lambda: None, every: int = 1,
          stopwatch: Stopwatch = by_clock) -> list[float]:
    """Return the seconds of each of several calls on its slowest rank.

    An MPI barrier, which is not timed, precedes each call. Garbage collection is off.

    Args:
        prepare: Function that is called before the first of every `every` calls, and not timed.
        stopwatch: Function that returns the seconds of an action; on a GPU, between two events.
    """
    seconds = []
    with _gc_disabled():
        for call in range(calls):
            if call % every == 0:
                prepare()
            world.barrier()
            seconds.append(stopwatch(action))
    return world.slowest(seconds)


def mean_seconds(world: World, action: Action, calls: int, *, barrier: bool,
                 prepare: Action, every: int) -> float:
    """Return the mean seconds of several calls on this rank.

    With `barrier`, an MPI barrier precedes each call, and is not timed. Otherwise, it precedes only
    the first of every `every` calls, which run back to back. See `timed` for the other arguments.
    """
    burst, seconds = 1 if barrier else every, 0.0
    with _gc_disabled():
        for start in range(0, calls, burst):
            if start % every == 0:
                prepare()
            repeats = range(min(burst, calls - start))
            world.barrier()
            began = time.perf_counter()
            for _ in repeats:
                action()
            seconds += time.perf_counter() - began
    return seconds / calls


@contextlib.contextmanager
def _gc_disabled() -> Iterator[None]:
    """Disable the garbage collector."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def in_turns(options: Namespace, rng: random.Random, subjects: Mapping[T, Callable[[], Readings]],
             ) -> Generator[list[Any], None, dict[T, Readings]]:
    """Measure subjects in rounds, each in a random order; return their readings.

    Yields an empty list after each round but the last, as a benchmark's `measure` does. Each
    function measures one round of a subject. All ranks call this together.
    """
    readings: dict[T, Readings] = {name: {} for name in subjects}
    for count in range(options.rounds):
        if count:
            yield []
        for name in rng.sample(list(subjects), len(subjects)):
            for kind, values in subjects[name]().items():
                readings[name].setdefault(kind, []).extend(values)
    return readings


def timed_steps(world: World, options: Namespace, actions: Mapping[str, Action],
                stopwatch: Stopwatch = by_clock) -> Readings:
    """Time each action `options.calls` times, after one call that is not timed."""
    readings = {}
    for kind, action in actions.items():
        action()
        readings[kind] = timed(world, action, options.calls, stopwatch=stopwatch)
    return readings


def calls_within(budget_s: float, call_s: float) -> int:
    """Return the number of calls that fit into a time budget, within fixed limits."""
    return min(MAX_CALLS, max(_MIN_CALLS, int(budget_s / max(call_s, 1e-9))))


def median(values: Sequence[float]) -> float:
    """Return the median; NaN if there are no values."""
    return statistics.median(values) if values else math.nan


def p95(values: Sequence[float]) -> float:
    """Return the smallest value that at least 95 % of all do not exceed; NaN if there are none."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1] if values else math.nan


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Return the number of timed steps, and their median and 95th percentile in milliseconds."""
    return {"steps": len(seconds), "median_ms": median(seconds) * 1e3, "p95_ms": p95(seconds) * 1e3}


class Ratio(NamedTuple):
    """Ratio of two median times, with its 95 % confidence interval; NaN for a single round."""

    value: float
    low: float
    high: float

    def of(self, key: str) -> dict[str, float]:
        """Return the ratio under a key, and the ends of its interval, as entries of a row."""
        return {key: self.value, f"{key}_low": self.low, f"{key}_high": self.high}


def over(rounds: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> Ratio:
    """Return the ratio of the medians of two actions that were timed in the same rounds.

    The interval is computed by a paired bootstrap. It draws rounds with replacement, and the same
    rounds for both actions, because the readings of a round are close in time. Rounds without
    readings of both are ignored.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13.
    """
    pairs = [(a, b) for a, b in zip(rounds, others) if a and b]
    value = _median_ratio(pairs) if pairs else math.nan
    if len(pairs) < 2:
        return Ratio(value, math.nan, math.nan)
    rng = random.Random(0)
    ratios = sorted(_median_ratio(rng.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLES))
    tail = _RESAMPLES // 40
    return Ratio(value, ratios[tail], ratios[-1 - tail])


def _median_ratio(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
    seconds, others = (list(itertools.chain.from_iterable(side)) for side in zip(*pairs))
    return median(seconds) / median(others)


def in_rounds(seconds: Sequence[float], calls: int) -> list[Sequence[float]]:
    """Split the seconds of all calls by round; a round has this number of calls."""
    return [seconds[start:start + calls] for start in range(0, len(seconds), calls)]


def overlap_percentage(compute_s: float, communication_s: float, total_s: float) -> float:
    """Return the percentage of communication that was hidden behind compute, 0 to 100.

    Source: osu_iallreduce of the OSU micro-benchmarks.
    """
    if communication_s <= 0:
        return 100.0
    return min(100.0, max(0.0, 100 * (1 - (total_s - compute_s) / communication_s)))


def wire_seconds(nbytes: int, nodes: int, bytes_per_s: float) -> float:
    """Return the seconds that an allreduce occupies a node's link, each way; 0 for one node."""
    return 2 * (nodes - 1) / nodes * nbytes / bytes_per_s
