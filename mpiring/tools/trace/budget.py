"""Computes how the time of training steps is spent: compute, data, exposed, idle, hidden."""

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from statistics import fmean, median
from typing import Any, NamedTuple

from ...provisional import trace_file
from ..traces import JobTrace, RankTrace

# Steps longer than this multiple of the median contain other work, such as validation.
_MAX_OF_MEDIAN = 2.0

# Name of a communicator, and sequence number of one of its operations.
Key = tuple[str, int]
Span = tuple[float, float]


class LastCall(NamedTuple):
    """The last call of an operation: its time in microseconds, and the rank that called."""

    at: float
    rank: int


class Wait(NamedTuple):
    """An interval, in microseconds, in which the program waits for an operation."""

    began: float
    ended: float
    key: Key


class TracedOperation(NamedTuple):
    """An operation in flight; times are in microseconds.

    Concurrent operations have different lanes, the numbers of trace rows. The bytes are those that
    are reduced or sent.
    """

    began: float
    ended: float
    lane: int
    name: str
    algorithm: str
    nbytes: int
    key: Key


class Step(NamedTuple):
    """A training step, or the complete trace if it has no steps; times are in microseconds.

    The rank processes this number of tokens in it; NaN if unknown.
    """

    number: int
    began: float
    ended: float
    tokens: float = math.nan

    @property
    def length(self) -> float:
        """Length of the step in microseconds."""
        return self.ended - self.began


@dataclass
class Activity:
    """The activity of a rank.

    Attributes:
        waits: Intervals in which the program waits for operations.
        ready: Intervals from the first to the last ready gradient of a step.
        data: Intervals in which the program waits for its next batch.
        models: Descriptions of the models that the rank trains.
    """

    rank: int
    steps: list[Step] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    operations: list[TracedOperation] = field(default_factory=list)
    ready: list[Span] = field(default_factory=list)
    data: list[Span] = field(default_factory=list)
    models: list[Mapping[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class StepBudget:
    """Times that add up to the time of a step, in milliseconds.

    Attributes:
        step: Sum of compute, data, exposed and idle.
        compute: Time in which the program does not wait.
        data: Time in which the program waits for its next batch.
        exposed: Time in which the program waits for communication.
        idle: Time in which the program waits for a rank that has not called the operation yet.
        hidden: Part of `compute` with operations in flight.
        tokens: Number of tokens, as in Step.
    """

    step: float
    compute: float
    data: float
    exposed: float
    idle: float
    hidden: float
    tokens: float = math.nan

    @property
    def hidden_percent(self) -> float:
        """Hidden time as a percentage of the time with operations in flight."""
        in_flight = self.hidden + self.exposed + self.idle
        return 100 * self.hidden / in_flight if in_flight else math.nan


def activity_of(trace: RankTrace) -> Activity:
    """Read the activity of a rank from its trace."""
    activity = Activity(trace.rank)
    operations: dict[Key, TracedOperation] = {}
    for event in trace.events():
        category, args = event.get("cat"), event["args"]
        if category is None:
            if event["name"] == "model":
                activity.models.append(args)
            continue
        span = event["ts"], event["ts"] + event["dur"]
        if category == "step":
            activity.steps.append(Step(args["step"], *span, args.get("tokens", math.nan)))
        elif category in ("ready", "data"):
            getattr(activity, category).append(span)
        elif category == "wait":
            activity.waits.append(Wait(*span, _key(args)))
        elif category == "operation":
            # A trace may contain an operation twice: incomplete, and after its end.
            key = _key(args)
            operations[key] = TracedOperation(
                *span, event["tid"] - trace_file.OPERATIONS, event["name"], args["algorithm"],
                args["bytes"],
                key)
    activity.operations = list(operations.values())
    spans = [*(each[:2] for each in activity.operations), *(wait[:2] for wait in activity.waits)]
    if not activity.steps and spans:
        activity.steps = [Step(0, min(spans)[0], max(ended for _, ended in spans))]
    activity.steps = sorted((step for step in activity.steps if step.length > 0),
                            key=lambda step: step.began)
    return activity


def _key(args: Mapping[str, Any]) -> Key:
    return args["group"], args["sequence"]


def last_calls(job: JobTrace) -> dict[Key, LastCall]:
    """Return the last call of each operation."""
    calls: dict[Key, LastCall] = {}
    for trace in job.ranks:
        for event in trace.spans():
            if event["cat"] == "operation":
                key = _key(event["args"])
                called = float(event["ts"]) - float(event["args"]["queued_us"])
                if key not in calls or called > calls[key].at:
                    calls[key] = LastCall(called, trace.rank)
    return calls


def typical(steps: Sequence[Step]) -> list[Step]:
    """Return the steps except the first one, which is a warm-up, and very long ones."""
    warm = steps[1:] or steps
    limit = _MAX_OF_MEDIAN * median(step.length for step in warm)
    return [step for step in warm if step.length <= limit]


def step_at(steps: Sequence[Step], at: float) -> Step | None:
    """Return the step that contains a time in microseconds; `steps` are in order."""
    i = bisect.bisect(steps, at, key=lambda step: step.began) - 1
    return steps[i] if i >= 0 and at < steps[i].ended else None


def budgets_of(activity: Activity, steps: Sequence[Step], last_called: Mapping[Key, LastCall],
               ) -> dict[int, StepBudget]:
    """Return the budget of each step of a rank, by step number."""
    data = union(activity.data)
    waiting = union(wait[:2] for wait in activity.waits)
    idle = union(idle_part(wait, last_called) for wait in activity.waits)
    in_flight = union(operation[:2] for operation in activity.operations)
    stopped = union([*waiting, *data])
    either = union([*stopped, *in_flight])
    budgets = {}
    for step in steps:
        waiting_ms, idle_ms, stopped_ms, either_ms = (
            _within(spans, step) / 1e3 for spans in (waiting, idle, stopped, either))
        step_ms = step.length / 1e3
        budgets[step.number] = StepBudget(
            step=step_ms, compute=step_ms - stopped_ms, data=stopped_ms - waiting_ms,
            exposed=waiting_ms - idle_ms, idle=idle_ms, hidden=either_ms - stopped_ms,
            tokens=step.tokens)
    return budgets


def idle_part(wait: Wait, last_called: Mapping[Key, LastCall]) -> Span:
    """Return the part of a wait before the last rank called the operation."""
    last = last_called.get(wait.key)
    return wait.began, max(wait.began, min(wait.ended, last.at if last else wait.began))


def mean(budgets: Sequence[StepBudget]) -> StepBudget:
    """Return the mean budget."""
    return StepBudget(*map(fmean, zip(*map(astuple, budgets))))


def union(spans: Iterable[Span]) -> list[Span]:
    """Merge spans that overlap or touch, and return them in order."""
    separate: list[Span] = []
    for began, ended in sorted(spans):
        if separate and began <= separate[-1][1]:
            separate[-1] = separate[-1][0], max(ended, separate[-1][1])
        elif ended > began:
            separate.append((began, ended))
    return separate


def _within(spans: Sequence[Span], step: Step) -> float:
    """Return the time that spans cover within a step; `spans` is a result of `union`."""
    total = 0.0
    first = max(0, bisect.bisect(spans, (step.began,)) - 1)
    for began, ended in spans[first:]:
        if began >= step.ended:
            break
        total += max(0.0, min(ended, step.ended) - max(began, step.began))
    return total
