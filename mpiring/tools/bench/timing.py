"""Times calls, and summarises their seconds."""

import gc
import math
import random
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol

from ...gpu.base import Event

# So many calls per case and round are measured at least, and at most.
_FEWEST, _MOST = 2, 200
Action = Callable[[], object]
# Returns the seconds that an action takes.
Stopwatch = Callable[[Action], float]
# Seconds, by what was timed.
Readings = dict[str, list[float]]


class Ranks(Protocol):
    """What timing needs of the ranks that measure together."""

    def barrier(self) -> None:
        """Return after every rank has called."""

    def slowest(self, values: list[float]) -> list[float]:
        """Return for each place the largest of the ranks' values."""


def by_clock(action: Action) -> float:
    """Return the seconds that an action takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def finish(event: Event) -> None:
    """Return as soon as a GPU has come to an event: no pause is timed along with it."""
    while not event.test():
        pass


def timed(ranks: Ranks, action: Action, calls: int, *,
          prepare: Action = lambda: None, every: int = 1,
          stopwatch: Stopwatch = by_clock) -> list[float]:
    """Return the seconds that each of several calls took on its slowest rank.

    Before each call stands MPI's barrier, which is not timed. Garbage collection is off.

    Args:
        action: What is timed.
        calls: How many times.
        prepare: Is called before the first of every `every` calls, and not timed.
        stopwatch: Returns the seconds that an action takes; a GPU's are between events.

    Collective: yes. Blocking: yes.
    """
    seconds = []
    collects = gc.isenabled()
    gc.disable()
    try:
        for call in range(calls):
            if call % every == 0:
                prepare()
            ranks.barrier()
            seconds.append(stopwatch(action))
    finally:
        if collects:
            gc.enable()
    return ranks.slowest(seconds)


def in_turns(ranks: Ranks, options: Namespace, subjects: Mapping[str, Mapping[str, Action]],
             prepare: Action = lambda: None, stopwatch: Stopwatch = by_clock,
             ) -> Generator[list[Any], None, dict[str, Readings]]:
    """Time what each subject does, in rounds of random order; return the readings.

    Yields an empty list between rounds, as a benchmark's `measure` does.

    Args:
        options: `rounds`, `calls` in each, and the `seed` of the orders.
        subjects: Their actions, by name; each is called once in a round before it is timed.
        prepare: Called before each timed call.
        stopwatch: See `timed`.

    Collective: yes. Blocking: yes.
    """
    readings: dict[str, Readings] = {
        name: {kind: [] for kind in actions} for name, actions in subjects.items()}
    dice = random.Random(options.seed)
    for count in range(options.rounds):
        if count:
            yield []
        for name in dice.sample(list(subjects), len(subjects)):
            for kind, action in subjects[name].items():
                action()
                readings[name][kind] += timed(
                    ranks, action, options.calls, prepare=prepare, stopwatch=stopwatch)
    return readings


def calls_within(budget_s: float, call_s: float) -> int:
    """Return how many calls of a length are worth making within a budget."""
    return min(_MOST, max(_FEWEST, int(budget_s / max(call_s, 1e-9))))


def median(values: Sequence[float]) -> float:
    """Return the median; NaN of nothing."""
    return statistics.median(values) if values else math.nan


def p95(values: Sequence[float]) -> float:
    """Return the smallest value that at least 95 % do not exceed; NaN of nothing."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1] if values else math.nan


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Return how many steps were timed, and their median and 95th percentile in milliseconds."""
    return {"steps": len(seconds), "median_ms": median(seconds) * 1e3, "p95_ms": p95(seconds) * 1e3}


def over(mine: Sequence[float], theirs: Sequence[float], calls: int) -> float:
    """Return how many times longer one thing takes than another: the median of rounds.

    Args:
        mine, theirs: Of as many rounds, `calls` in each; those of a round lie close in time.
    """
    return median([median(mine[start:start + calls]) / median(theirs[start:start + calls])
                   for start in range(0, len(mine), calls)])


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
        nbytes: Of the array.
        nodes: Between which it travels; on one there is no wire, and no time.
        bytes_per_s: What the link carries of data.
    """
    return 2 * (nodes - 1) / nodes * nbytes / bytes_per_s
