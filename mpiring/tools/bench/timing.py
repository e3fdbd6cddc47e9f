"""Times calls, and summarises their seconds."""

import contextlib
import gc
import math
import random
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Protocol

from ...gpu.device import Event

# Calls per case and round, at least and at most.
_FEWEST, MOST_CALLS = 2, 200
Action = Callable[[], object]
# Returns the seconds that an action takes.
Stopwatch = Callable[[Action], float]
# Seconds, by what was timed.
Readings = dict[str, list[float]]


class Ranks(Protocol):
    """The ranks that measure together."""

    def barrier(self) -> None:
        """Return after every rank has called."""

    def slowest(self, values: list[float]) -> list[float]:
        """Return the largest of the ranks' values, element by element."""


def by_clock(action: Action) -> float:
    """Return the seconds that an action takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def finish(event: Event) -> None:
    """Spin until a GPU has reached an event, so that no pause is timed."""
    while not event.test():
        pass


def timed(ranks: Ranks, action: Action, calls: int, *,
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
    with _no_collector():
        for call in range(calls):
            if call % every == 0:
                prepare()
            ranks.barrier()
            seconds.append(stopwatch(action))
    return ranks.slowest(seconds)


def mean_seconds(ranks: Ranks, action: Action, calls: int, *, barrier: bool,
                 prepare: Action = lambda: None, every: int) -> float:
    """Return the mean seconds of several calls on this rank.

    Args:
        action: The call.
        barrier: Before each call stands MPI's barrier, which is not timed; else only before the
            first of every `every` calls, which follow back to back.
        prepare: Called before the first of every `every` calls, and not timed.

    Collective: yes. Blocking: yes.
    """
    seconds = 0.0
    with _no_collector():
        for start in range(0, calls, every):
            prepare()
            these = range(min(every, calls - start))
            if barrier:
                for _ in these:
                    ranks.barrier()
                    seconds += by_clock(action)
                continue
            ranks.barrier()
            began = time.perf_counter()
            for _ in these:
                action()
            seconds += time.perf_counter() - began
    return seconds / calls


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """Keep the garbage collector off."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def in_turns(ranks: Ranks, options: Namespace, subjects: Mapping[str, Mapping[str, Action]],
             stopwatch: Stopwatch = by_clock,
             ) -> Generator[list[Any], None, dict[str, Readings]]:
    """Time what each subject does, in rounds of random order; return the readings.

    Yields an empty list between rounds, as a benchmark's `measure` does.

    Args:
        options: `rounds`, `calls` in each, and the `seed` of the orders.
        subjects: Their actions, by name; each is called once in a round before it is timed.
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
                    ranks, action, options.calls, stopwatch=stopwatch)
    return readings


def calls_within(budget_s: float, call_s: float) -> int:
    """Return how many calls fit into a budget, within limits."""
    return min(MOST_CALLS, max(_FEWEST, int(budget_s / max(call_s, 1e-9))))


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
        mine, theirs: Seconds of `calls` calls in each round; those of a round are close in time.
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
        nodes: Their number; a single node has no wire, and needs no time.
        bytes_per_s: Data rate of the link.
    """
    return 2 * (nodes - 1) / nodes * nbytes / bytes_per_s
