"""Prints and plots how each rank spends the time of training steps."""

import math
import textwrap
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from ... import ConfigError
from ...provisional import first_few
from .. import table
from ..output import refuse_unwritable
from ..picture import refuse_undrawable
from ..table import Column, Row
from ..terminal import line_width
from ..units import size_text
from . import picture
from .budget import (
    Activity, Key, LastCall, Step, StepBudget, activity_of, budgets_of, idle_part, last_calls, mean,
    step_at, typical)
from ..traces import open_job
from .lateness import Lateness

_BUDGET = [
    Column("rank", -5), Column("steps", 6), Column("step", 9, 4, "step ms"),
    Column("compute", 11, 4, "compute ms"), Column("data", 8, 3, "data ms"),
    Column("exposed", 11, 3, "exposed ms"),
    Column("idle", 8, 3, "idle ms"), Column("hidden", 10, 3, "hidden ms"),
    Column("hidden_percent", 9, 3, "hidden %"), Column("tokens", 9, 4)]
_OPERATIONS = [
    Column("name", -24, title="operation"), Column("algorithm", -13),
    Column("size", 9), Column("count", 7), Column("took", 9, 3, "took ms"),
    Column("exposed", 11, 3, "exposed ms"), Column("idle", 8, 3, "idle ms")]
# Maximum numbers of ranks and kinds of operations to print.
_MAX_RANKS, _MAX_OPERATIONS = 32, 8
# Maximum number of gradients to name for each set of Reducers.
_MAX_NAMES = 3
# Duration, exposed and idle time in microseconds of each operation, by (name, algorithm, bytes).
_Kinds = dict[tuple[str, str, int], list[tuple[float, float, float]]]


def run(options: Namespace) -> int:
    """Print the time budget of the steps of a job, and plot it if requested; return the status.

    Raises:
        ConfigError: There are no traces, traces of several jobs, or traces without steps.
        MissingDependencyError: A plot is requested, but there is no matplotlib.
    """
    job = open_job(options.folder, options.job)
    if options.plot:
        refuse_unwritable(options.plot)
        refuse_undrawable(options.plot)
    job.warn()
    last_called = last_calls(job)
    lateness = Lateness(last_called)
    budgets: dict[int, StepBudget] = {}
    counts: dict[int, int] = {}
    kinds: _Kinds = {}
    models: list[Mapping[str, Any]] = []
    drawn: list[Activity] = []
    number = -1
    for trace in job.ranks:
        activity = activity_of(trace)
        if not activity.steps:
            raise ConfigError(f"{trace.path}: it has no training steps")
        steps = typical(activity.steps)
        by_step = budgets_of(activity, steps, last_called)
        lateness.add(activity, steps, by_step)
        budgets[trace.rank] = mean(list(by_step.values()))
        counts[trace.rank] = len(steps)
        _add_costs(kinds, activity, steps, last_called)
        models += [model for model in activity.models if model not in models]
        if not drawn:
            number = _step_to_draw(options.step, activity, steps)
        if len(drawn) < picture.MAX_RANKS:
            drawn.append(activity)
    print(f"# {job.caption}")
    for sentence in _reducer_sentences(models):
        print(textwrap.fill(sentence, line_width(), subsequent_indent="#   "))
    _print_budgets(budgets, counts)
    for sentence in lateness.sentences():
        print(textwrap.fill(sentence, line_width(), subsequent_indent="  "))
    _print_operations(kinds, sum(counts.values()))
    if options.plot:
        picture.draw(options.plot, job.caption, budgets, drawn, number, last_called)
    return 0


def _step_to_draw(requested: int | None, activity: Activity, steps: Sequence[Step]) -> int:
    """Return the number of the step to draw; by default, the step of median length."""
    numbers = [step.number for step in activity.steps]
    if requested is None:
        return sorted(steps, key=lambda step: step.length)[len(steps) // 2].number
    if requested not in numbers:
        raise ConfigError(f"--step {requested}: rank {activity.rank} has steps "
                          f"{min(numbers)} to {max(numbers)}")
    return requested


def _add_costs(kinds: _Kinds, activity: Activity, steps: Sequence[Step],
               last_called: Mapping[Key, LastCall]) -> None:
    """Add the times of a rank's operations in these steps."""
    costs: dict[Key, tuple[float, float]] = {}
    for wait in activity.waits:
        began, ended = idle_part(wait, last_called)
        exposed, idle = costs.get(wait.key, (0.0, 0.0))
        costs[wait.key] = exposed + wait.ended - ended + began - wait.began, idle + ended - began
    for operation in activity.operations:
        if step_at(steps, operation.began):
            kind = operation.name, operation.algorithm, operation.nbytes
            kinds.setdefault(kind, []).append(
                (operation.ended - operation.began, *costs.get(operation.key, (0.0, 0.0))))


def _reducer_sentences(models: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence about each set of Reducers; models with the same Reducers share it."""
    # Names of the gradients, as keys, which keep their order.
    gradients: dict[tuple[str, bool], dict[str, None]] = {}
    for model in models:
        key = ", ".join(model.get("reducers", ())), model.get("nodes") == 1
        gradients.setdefault(key, {}).update(dict.fromkeys(name for name, *_ in model["tensors"]))
    for (reducers, is_one_node), names in gradients.items():
        if reducers:
            yield (f"# Reducers of {first_few([*names], _MAX_NAMES)}: {reducers}"
                   + "; on one node, nothing is compressed" * (
                       is_one_node and reducers != "Mean()"))


def _print_budgets(budgets: Mapping[int, StepBudget], counts: Mapping[int, int]) -> None:
    """Print a line for each rank and the mean; of many ranks, only those that compute longest."""
    shown = sorted(budgets, key=lambda rank: budgets[rank].compute)[-_MAX_RANKS:]
    has_tokens = not all(math.isnan(budget.tokens) for budget in budgets.values())
    columns = [column for column in _BUDGET if column.key != "tokens" or has_tokens]

    def line(rank: str, steps: float, budget: StepBudget) -> str:
        return table.line({"rank": rank, "steps": f"{steps:.0f}", **vars(budget),
                           "hidden_percent": budget.hidden_percent}, columns)

    print(table.head(columns))
    for rank in sorted(shown):
        print(line(str(rank), counts[rank], budgets[rank]))
    print(line("mean", fmean(counts.values()), mean(list(budgets.values()))))
    if len(budgets) > len(shown):
        print(f"(the {len(shown)} of {len(budgets)} ranks that compute the longest)")


def _print_operations(kinds: _Kinds, steps: int) -> None:
    """Print a line for each kind of operation, in descending order of the waiting time."""
    rows: list[Row] = [{
        "name": name, "algorithm": algorithm or "-", "size": size_text(nbytes) if nbytes else "-",
        "count": len(costs), "took": median(took for took, _, _ in costs) / 1e3,
        "exposed": sum(exposed for _, exposed, _ in costs) / 1e3 / steps,
        "idle": sum(idle for _, _, idle in costs) / 1e3 / steps}
        for (name, algorithm, nbytes), costs in kinds.items()]
    rows.sort(key=lambda row: float(row["exposed"] + row["idle"]), reverse=True)
    print("\n" + table.head(_OPERATIONS))
    for row in rows[:_MAX_OPERATIONS]:
        print(table.line(row, _OPERATIONS))
    print("exposed and idle: mean over ranks and steps")
