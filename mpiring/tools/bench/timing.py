"""Times calls, and summarizes their seconds."""

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

from ...gpu.device import Event
from .world import World

# Calls per case and round, at least and at most.
_MIN_CALLS, MAX_CALLS = 2, 200
_RESAMPLES = 1000
Action = Callable[[], object]
# Returns the seconds that an action takes.
Stopwatch = Callable[[Action], float]
# Seconds, by what was timed.
Readings = dict[str, list[float]]
T = TypeVar("T")


def by_clock(action: Action) -> float:
    """Return the seconds that an action takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def finish(event: Event) -> None:
    """Spin until a GPU has reached an event, so that no pause is timed."""
    while not event.test():
        pass


def timed(world: World, action: Action, calls: int, *,
          prepare: Action = lambda: None, every: int = 1,
          stopwatch: Stopwatch = by_clock) -> list[float]:
    """Return the seconds that each of several calls took on its slowest rank.

    Before each call stands MPI's barrier, which is not timed. Garbage collection is off.

    Args:
        action: The call.
        prepare: Called before the first of every `every` calls, and not timed.
        stopwatch: Returns the seconds that an action takes; a GPU's are between events.

    Collective: yes. Blocking: yes.
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

    Args:
        action: The call.
        barrier: If true, MPI's barrier precedes each call, and is not timed. Otherwise it precedes
            the first of every `every` calls, which follow back to back.
        prepare: Called before the first of every `every` calls, and not timed.

    Collective: yes. Blocking: yes.
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
    """Keep the garbage collector off."""
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

    Yields an empty list after each round but the last, as a benchmark's `measure` does.

    Args:
        options: The number of `rounds`.
        subjects: Functions that measure each subject for a round.

    Collective: yes. Blocking: yes.
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
    """Time each of some actions `options.calls` times, after a call of it."""
    readings = {}
    for kind, action in actions.items():
        action()
        readings[kind] = timed(world, action, options.calls, stopwatch=stopwatch)
    return readings


def calls_within(budget_s: float, call_s: float) -> int:
    """Return how many calls fit into a budget, within limits."""
    return min(MAX_CALLS, max(_MIN_CALLS, int(budget_s / max(call_s, 1e-9))))


def median(values: Sequence[float]) -> float:
    """Return the median; NaN of nothing."""
    return statistics.median(values) if values else math.nan


def p95(values: Sequence[float]) -> float:
    """Return the smallest value that at least 95 % do not exceed; NaN of nothing."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1] if values else math.nan


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Return how many steps were timed, and their median and 95th percentile in milliseconds."""
    return {"steps": len(seconds), "median_ms": median(seconds) * 1e3, "p95_ms": p95(seconds) * 1e3}


class Ratio(NamedTuple):
    """How many times longer one thing takes than another.

    Attributes:
        value: Ratio of the medians.
        low, high: Ends of its 95 % confidence interval; NaN for a single round.
    """

    value: float
    low: float
    high: float

    def of(self, key: str) -> dict[str, float]:
        """Return the entries of a row: the value with a key, and both ends of its interval."""
        return {key: self.value, f"{key}_low": self.low, f"{key}_high": self.high}


def over(rounds: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> Ratio:
    """Return the ratio of the medians of two things that were timed in the same rounds.

    The interval is that of the paired bootstrap: rounds are drawn with replacement, the same ones
    for both, since the readings of a round are close in time.

    Args:
        rounds: Seconds of one thing in each round.
        others: Seconds of the other; a round without readings of one of both is ignored.

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
    """Return seconds by round.

    Args:
        seconds: Seconds of `calls` calls in each round.
        calls: Number of calls in a round.
    """
    return [seconds[start:start + calls] for start in range(0, len(seconds), calls)]


def overlap_percentage(compute_s: float, communication_s: float, total_s: float) -> float:
    """Return how much of the communication was hidden behind the compute, 0 to 100.

    Source: osu_iallreduce of the OSU micro-benchmarks.
    """
    if communication_s <= 0:
        return 100.0
    return min(100.0, max(0.0, 100 * (1 - (total_s - compute_s) / communication_s)))


def wire_seconds(nbytes: int, nodes: int, bytes_per_s: float) -> float:
    """Return how long a node's link is busy, each way, with its part of an allreduce.

    Args:
        nbytes: Length of the array.
        nodes: Number of nodes; a single node has no wire, and needs no time.
        bytes_per_s: Data rate of the link.
    """
    return 2 * (nodes - 1) / nodes * nbytes / bytes_per_s
