"""Finds where the time of training steps goes: compute, data, exposed, idle, hidden."""

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from statistics import fmean, median
from typing import Any, NamedTuple

from ...record.trace_file import OPERATIONS
from .files import JobTrace, RankTrace

# A step of so many times the median length contains something else, as a validation.
_LONG = 2.0

# A communicator's name, and the number of an operation there.
Key = tuple[str, int]
Span = tuple[float, float]


class LastCall(NamedTuple):
    """When the last rank called an operation, in microseconds, and which it was."""

    at: float
    rank: int


@dataclass(frozen=True)
class Wait:
    """A time in which the program waits for an operation."""

    began: float
    ended: float
    key: Key


@dataclass(frozen=True)
class Operation:
    """An operation under way.

    Attributes:
        began, ended: In microseconds.
        lane: Operations that are under way at once have different lanes.
    """

    began: float
    ended: float
    lane: int
    name: str
    algorithm: str
    nbytes: int
    key: Key


@dataclass(frozen=True)
class Step:
    """A training step, or all of a trace that has none.

    Attributes:
        began, ended: In microseconds.
        tokens: How many the rank had in it; NaN if that is unknown.
    """

    number: int
    began: float
    ended: float
    tokens: float = math.nan

    @property
    def length(self) -> float:
        """Its microseconds."""
        return self.ended - self.began


@dataclass
class Activity:
    """The activity of a rank.

    Attributes:
        ready: Times from the first to the last ready gradient of a step.
        data: Times in which the program waits for its next batch.
    """

    rank: int
    steps: list[Step] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    ready: list[Span] = field(default_factory=list)
    data: list[Span] = field(default_factory=list)


@dataclass(frozen=True)
class Budget:
    """Where the time of a step goes, in milliseconds.

    Attributes:
        step: All of it: compute, data, exposed and idle.
        compute: The program does not wait.
        data: It waits for its next batch.
        exposed: It waits for communication.
        idle: It waits for a rank that has not called the operation yet.
        hidden: The part of compute with operations under way.
        tokens: How many the rank has in a step; NaN if that is unknown.
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
        """The part of the time with operations under way in which the program computes."""
        under_way = self.hidden + self.exposed + self.idle
        return 100 * self.hidden / under_way if under_way else float("nan")


def activity_of(trace: RankTrace) -> Activity:
    """Read what a rank did."""
    found = Activity(trace.rank)
    seen: set[Key] = set()
    for event in trace.events():
        category, args = event.get("cat"), event.get("args", {})
        began = event.get("ts", 0.0)
        ended = began + event.get("dur", 0.0)
        if category == "step":
            found.steps.append(Step(args["step"], began, ended, args.get("tokens", math.nan)))
        elif category == "ready":
            found.ready.append((began, ended))
        elif category == "data":
            found.data.append((began, ended))
        elif category == "wait":
            found.waits.append(Wait(began, ended, _key(args)))
        elif category == "operation":
            # An operation that was reported while incomplete may be reported again at its end.
            if _key(args) in seen:
                found.operations = [operation for operation in found.operations
                                    if operation.key != _key(args)]
            seen |= set() if args["complete"] else {_key(args)}
            found.operations.append(Operation(
                began, ended, event["tid"] - OPERATIONS, event["name"], args["algorithm"],
                args["bytes"], _key(args)))
    if not found.steps and (found.operations or found.waits):
        times: list[Operation | Wait] = [*found.operations, *found.waits]
        found.steps = [Step(0, min(span.began for span in times),
                            max(span.ended for span in times))]
    return found


def _key(args: Mapping[str, Any]) -> Key:
    return args["group"], args["sequence"]


def last_calls(job: JobTrace) -> dict[Key, LastCall]:
    """Return which rank was the last to call each operation, and when."""
    found: dict[Key, LastCall] = {}
    for trace in job.ranks:
        for event in trace.events():
            if event.get("cat") == "operation":
                key = _key(event["args"])
                called = float(event["ts"]) - float(event["args"]["queued_us"])
                if key not in found or called > found[key].at:
                    found[key] = LastCall(called, trace.rank)
    return found


def typical(steps: Sequence[Step]) -> list[Step]:
    """Return the steps without the first one, which warms up, and without very long ones."""
    warm = steps[1:] or steps
    limit = _LONG * median(step.length for step in warm)
    return [step for step in warm if step.length <= limit]


def step_at(steps: Sequence[Step], at: float) -> Step | None:
    """Return the step, of these that are in order, in which a time in microseconds is."""
    i = bisect.bisect(steps, at, key=lambda step: step.began) - 1
    return steps[i] if i >= 0 and at < steps[i].ended else None


def budgets_of(activity: Activity, steps: Sequence[Step], last_called: Mapping[Key, LastCall],
               ) -> dict[int, Budget]:
    """Return the budget of each of these steps of a rank, by the step's number."""
    data = union(activity.data)
    waiting = union((wait.began, wait.ended) for wait in activity.waits)
    idle = union(idle_part(wait, last_called) for wait in activity.waits)
    under_way = union((operation.began, operation.ended) for operation in activity.operations)
    stopped = union([*waiting, *data])
    either = union([*stopped, *under_way])
    found = {}
    for step in steps:
        waited, idled, stood, all_ = (
            _within(spans, step) / 1e3 for spans in (waiting, idle, stopped, either))
        length = step.length / 1e3
        found[step.number] = Budget(length, length - stood, stood - waited, waited - idled, idled,
                                    all_ - stood, step.tokens)
    return found


def idle_part(wait: Wait, last_called: Mapping[Key, LastCall]) -> Span:
    """Return the beginning of a wait, until the last rank has called the operation."""
    last = last_called.get(wait.key)
    return wait.began, max(wait.began, min(wait.ended, last.at if last else wait.began))


def mean(budgets: Sequence[Budget]) -> Budget:
    """Return the mean budget."""
    return Budget(*map(fmean, zip(*map(astuple, budgets))))


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the same times, as spans in order that do not touch."""
    found: list[Span] = []
    for began, ended in sorted(spans):
        if found and began <= found[-1][1]:
            found[-1] = found[-1][0], max(ended, found[-1][1])
        elif ended > began:
            found.append((began, ended))
    return found


def _within(spans: Sequence[Span], step: Step) -> float:
    """Return how much of a step is in spans that do not overlap."""
    total = 0.0
    first = max(0, bisect.bisect(spans, (step.began,)) - 1)
    for began, ended in spans[first:]:
        if began >= step.ended:
            break
        total += max(0.0, min(ended, step.ended) - max(began, step.began))
    return total
