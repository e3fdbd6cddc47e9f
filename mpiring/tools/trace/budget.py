"""Finds where the time of training steps goes: compute, exposed, idle, hidden."""

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from statistics import fmean, median
from typing import Any

from ...record.trace_file import OPERATIONS
from .files import JobTrace, RankTrace

# A step of so many times the median length contains something else, as a validation.
_LONG = 2.0

# A communicator's name, and the number of an operation there.
Key = tuple[str, int]
Span = tuple[float, float]


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
    """

    number: int
    began: float
    ended: float

    @property
    def length(self) -> float:
        """Its microseconds."""
        return self.ended - self.began


@dataclass
class Activity:
    """The activity of a rank.

    Attributes:
        ready: Times from the first to the last ready gradient of a step.
    """

    rank: int
    steps: list[Step] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    ready: list[Span] = field(default_factory=list)


@dataclass(frozen=True)
class Budget:
    """Where the time of a step goes, in milliseconds.

    Attributes:
        step: All of it: compute, exposed and idle.
        compute: The program does not wait.
        exposed: It waits for communication.
        idle: It waits for a rank that has not called the operation yet.
        hidden: The part of compute with operations under way.
    """

    step: float
    compute: float
    exposed: float
    idle: float
    hidden: float

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
            found.steps.append(Step(args["step"], began, ended))
        elif category == "ready":
            found.ready.append((began, ended))
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


def last_calls(job: JobTrace) -> dict[Key, float]:
    """Return when the last rank called each operation, in microseconds."""
    found: dict[Key, float] = {}
    for trace in job.ranks:
        for event in trace.events():
            if event.get("cat") == "operation":
                key = _key(event["args"])
                called = float(event["ts"]) - float(event["args"]["queued_us"])
                found[key] = max(called, found.get(key, called))
    return found


def typical(steps: Sequence[Step]) -> list[Step]:
    """Return the steps without the first one, which warms up, and without very long ones."""
    warm = steps[1:] or steps
    limit = _LONG * median(step.length for step in warm)
    return [step for step in warm if step.length <= limit]


def is_in(steps: Sequence[Step], at: float) -> bool:
    """Return whether a time, in microseconds, is within any of these steps, which are in order."""
    i = bisect.bisect(steps, at, key=lambda step: step.began) - 1
    return i >= 0 and at < steps[i].ended


def budget_of(activity: Activity, steps: Sequence[Step], last_called: Mapping[Key, float],
              ) -> Budget:
    """Return the mean budget of these steps of a rank."""
    waiting = union((wait.began, wait.ended) for wait in activity.waits)
    idle = union(idle_part(wait, last_called) for wait in activity.waits)
    under_way = union((operation.began, operation.ended) for operation in activity.operations)
    either = union([*waiting, *under_way])
    parts = []
    for step in steps:
        waited, idled, busy, all_ = (
            _within(spans, step) for spans in (waiting, idle, under_way, either))
        parts.append((step.length, step.length - waited, waited - idled, idled, all_ - waited))
    return Budget(*(fmean(values) / 1e3 for values in zip(*parts)))


def idle_part(wait: Wait, last_called: Mapping[Key, float]) -> Span:
    """Return the beginning of a wait, until the last rank has called the operation."""
    return wait.began, max(wait.began, min(wait.ended, last_called.get(wait.key, wait.began)))


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
