"""Prints where the time of training steps goes, rank by rank, and has it drawn."""

import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from ...errors import ConfigError
from .. import table
from ..files import Row, refuse_unwritable
from ..picture import refuse_undrawable
from ..table import Column
from ..units import size_text
from . import picture
from .budget import (
    Activity, Budget, Key, Operation, Step, Wait, activity_of, budget_of, idle_part, last_calls,
    is_in, mean, typical,
)
from .files import JobTrace, open_job

_BUDGET = [
    Column("rank", -5), Column("steps", 6), Column("step", 9, 4, "step ms"),
    Column("compute", 11, 4, "compute ms"), Column("exposed", 11, 3, "exposed ms"),
    Column("idle", 8, 3, "idle ms"), Column("hidden", 10, 3, "hidden ms"),
    Column("hidden_percent", 9, 3, "hidden %")]
_OPERATIONS = [
    Column("name", -24, title="operation"), Column("algorithm", -13),
    Column("size", 9), Column("count", 7), Column("took", 9, 3, "took ms"),
    Column("exposed", 11, 3, "exposed ms"), Column("idle", 8, 3, "idle ms")]
# More ranks, and more kinds of operations, are not printed one by one.
_MOST_RANKS, _MOST_OPERATIONS = 32, 8


def run(options: Namespace) -> int:
    """Print the budget of a job's steps, and draw it if asked to; return the exit status.

    Args:
        options: As `options.declare` has declared them.

    Raises:
        ConfigError: There are no traces, or of several jobs, or nothing happened in them.
    """
    job = open_job(options.folder, options.job)
    if options.plot:
        refuse_unwritable(options.plot)
        refuse_undrawable(options.plot)
    warn(job)
    last_called = last_calls(job)
    kept = _Kept(options.step)
    rows: list[_Row] = []
    for trace in job.ranks:
        activity = activity_of(trace)
        if not activity.steps:
            raise ConfigError(f"{trace.path}: nothing has happened in it")
        steps = typical(activity.steps)
        rows.append(_Row(trace.rank, steps, budget_of(activity, steps, last_called)))
        kept.add(activity, steps, last_called)
    _print(job, rows, kept)
    if options.plot:
        picture.draw(options.plot, job.caption, {row.rank: row.budget for row in rows},
                     kept.activities, kept.step, last_called)
    return 0


def warn(job: JobTrace) -> None:
    """Say on standard error what is missing of a job's traces."""
    for warning in job.warnings:
        print(f"mpiring: {warning}", file=sys.stderr)


class _Row:
    """A rank's line."""

    def __init__(self, rank: int, steps: Sequence[Step], budget: Budget) -> None:
        self.rank, self.steps, self.budget = rank, steps, budget


class _Kept:
    """What is kept of all ranks: one step of the first few, and sums over operations.

    Args:
        wanted: The number of the step; None for the first rank's median one.
    """

    def __init__(self, wanted: int | None) -> None:
        self.activities: list[Activity] = []
        self.step: int = -1
        self._wanted = wanted
        self._kinds: dict[tuple[str, str, int], list[tuple[float, float, float]]] = {}
        self._steps = 0

    def add(self, activity: Activity, steps: Sequence[Step], last_called: Mapping[Key, float],
            ) -> None:
        """Keep what is needed of a rank."""
        if self.step < 0:
            self.step = self._chosen(activity, steps)
        self._steps += len(steps)
        if len(self.activities) < picture.MOST_RANKS:
            self.activities.append(activity)
        waits: dict[Key, list[Wait]] = {}
        for wait in activity.waits:
            waits.setdefault(wait.key, []).append(wait)
        for one in activity.operations:
            if is_in(steps, one.began):
                self._kinds.setdefault((one.name, one.algorithm, one.nbytes), []).append(
                    _costs(one, waits.get(one.key, []), last_called))

    def _chosen(self, activity: Activity, steps: Sequence[Step]) -> int:
        numbers = [step.number for step in activity.steps]
        if self._wanted is None:
            return sorted(steps, key=lambda step: step.length)[len(steps) // 2].number
        if self._wanted not in numbers:
            raise ConfigError(f"--step {self._wanted}: rank {activity.rank} has steps "
                              f"{min(numbers)} to {max(numbers)}")
        return self._wanted

    def rows(self) -> list[Row]:
        """Return a row for each kind of operation, the most waited for first; means per step."""
        rows = [{"name": name, "algorithm": algorithm or "-", "size": _size(nbytes),
                 "count": len(costs), "took": median(took for took, _, _ in costs) / 1e3,
                 "exposed": sum(exposed for _, exposed, _ in costs) / 1e3 / self._steps,
                 "idle": sum(idle for _, _, idle in costs) / 1e3 / self._steps}
                for (name, algorithm, nbytes), costs in self._kinds.items()]
        return sorted(rows, key=_waited_for, reverse=True)


def _waited_for(row: Mapping[str, Any]) -> float:
    return float(row["exposed"] + row["idle"])


def _size(nbytes: int) -> str:
    return size_text(nbytes) if nbytes else "-"


def _costs(one: Operation, waits: Iterable[Wait], last_called: Mapping[Key, float],
           ) -> tuple[float, float, float]:
    """Return how long an operation took, was exposed, and was waited for in idleness."""
    idle = waited = 0.0
    for wait in waits:
        began, ended = idle_part(wait, last_called)
        idle += ended - began
        waited += wait.ended - wait.began
    return one.ended - one.began, waited - idle, idle


def _print(job: JobTrace, rows: Sequence[_Row], kept: _Kept) -> None:
    print(f"# {job.caption}")
    print(table.head(_BUDGET))
    shown = sorted(rows, key=lambda row: row.budget.compute)[-_MOST_RANKS:]
    for row in sorted(shown, key=lambda row: row.rank):
        print(table.line({"rank": str(row.rank), "steps": str(len(row.steps)),
                          **_cells(row.budget)}, _BUDGET))
    print(table.line({"rank": "mean", "steps": f"{fmean(len(row.steps) for row in rows):.0f}",
                      **_cells(mean([row.budget for row in rows]))}, _BUDGET))
    if len(rows) > len(shown):
        print(f"(the {len(shown)} of {len(rows)} ranks that compute the longest)")
    print()
    print(table.head(_OPERATIONS))
    for cells in kept.rows()[:_MOST_OPERATIONS]:
        print(table.line(cells, _OPERATIONS))
    print("exposed and idle: the mean of ranks and steps")


def _cells(budget: Budget) -> Row:
    return {**vars(budget), "hidden_percent": budget.hidden_percent}
