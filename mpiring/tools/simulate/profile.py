"""Reads the compute times of training steps, without communication, from the trace of a job."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from ... import ConfigError
from ...provisional import buckets, memory
from ..traces import Event, JobTrace, RankTrace, open_job
from .cluster import refuse_large

# Number of steps to skip. Immediately before the first recorded step, memory was touched for the
# first time.
_WARM_UP = 1
# A step that computes this many times as long as the median includes other work, like validation.
_LONG = 2.0
# Categories of spans, and names of phases and of descriptions.
_SPANS, _PHASES, _MODEL = ("step", "ready", "wait"), ("forward", "optimizer"), "model"

_Events = dict[str, list[Event]]


@dataclass(frozen=True)
class StepCompute:
    """Compute times of one rank in one step, in seconds, without waits.

    Attributes:
        update_s: Time of the optimizer's update, at the beginning of the step; 0 if unknown.
        forward_s: Begin and end of the forward pass; both 0 if unknown.
        ready_s: Times at which each tensor's gradient was ready, in the model's order.
        step_s: Duration of the step, including waits.
    """

    update_s: float
    forward_s: tuple[float, float]
    ready_s: tuple[float, ...]
    compute_s: float
    step_s: float


@dataclass(frozen=True)
class Profile:
    """The compute of a job's training steps.

    Attributes:
        tensors: Gradients, in the model's order.
        steps: Steps of all ranks.
        step_s: Median duration of these steps in seconds, including waits.
        overlap: Whether buckets were sent during the backward pass.
    """

    tensors: Sequence[buckets.TensorSpec]
    steps: Sequence[StepCompute]
    step_s: float
    ranks: int
    nodes: int
    overlap: bool
    caption: str

    @property
    def compute_s(self) -> float:
        """Mean seconds of a step without communication."""
        return fmean(step.compute_s for step in self.steps)

    @property
    def nbytes(self) -> int:
        """Total length of all gradients, in bytes."""
        return sum(tensor.size * tensor.dtype.itemsize for tensor in self.tensors)


def read_profile(folder: str, job: str | None) -> Profile:
    """Return the profile of a job, or of the only job, from its traces.

    Raises:
        ConfigError: There is no trace, or it lacks the times when gradients became ready.
    """
    trace = open_job(folder, job)
    trace.warn()
    model: Mapping[str, Any] | None = None
    steps: list[StepCompute] = []
    for rank in trace.ranks:
        recorded = _read(rank)
        for described in (event["args"] for event in recorded[_MODEL]):
            if model is not None and described["tensors"] != model["tensors"]:
                raise ConfigError(f"{rank.path}: several models were trained, or parameters were "
                                  f"frozen, while it was written; record a job that trains one")
            model = described
        steps += (step for step in _steps(recorded) if step.compute_s > 0)
    if model is None or not steps:
        raise ConfigError(
            f"{folder}: job {trace.name} does not say when gradients became ready: it takes three "
            f"steps or more of a DataParallel of this version, with gradients in host memory")
    tensors = _tensors(model, trace)
    if other := [step for step in steps if len(step.ready_s) != len(tensors)]:
        raise ConfigError(f"{folder}: job {trace.name} has a step with times of "
                          f"{len(other[0].ready_s)} gradients, but its model has {len(tensors)}; "
                          f"record the job again")
    limit = _LONG * median(step.compute_s for step in steps)
    usual = [step for step in steps if step.compute_s <= limit]
    return Profile(tensors, usual, median(step.step_s for step in usual),
                   trace.ranks[0].size, len({rank.node for rank in trace.ranks}), model["overlap"],
                   f"{trace.caption.partition(', clocks')[0]}, {len(usual)} steps")


def _read(rank: RankTrace) -> _Events:
    """Return the events of a rank that are needed here."""
    recorded: _Events = {kind: [] for kind in (*_SPANS, *_PHASES, _MODEL)}
    for event in rank.events():
        # Descriptions, such as that of the model, have no category.
        category, name = event.get("cat"), event["name"]
        if category in _SPANS:
            recorded[category].append(event)
        elif category == "phase" and name in _PHASES or category is None and name == _MODEL:
            recorded[name].append(event)
    return recorded


def _steps(recorded: _Events) -> Iterator[StepCompute]:
    """Yield the steps of a rank whose times are all known."""
    ready_at = [event["ts"] for event in recorded["ready"]]
    for step in recorded["step"][_WARM_UP:]:
        began, ended = step["ts"], step["ts"] + step["dur"]
        first = bisect_left(ready_at, began)
        for ready in recorded["ready"][first:first + 1]:
            if ready["ts"] < ended and ready["args"].get("at_us"):
                yield _step(recorded, began, ended, ready)


def _spans(events: Sequence[Event], began: float, ended: float) -> list[tuple[float, float]]:
    """Return the begin and the end of each event that begins within a time."""
    return [(event["ts"], event["ts"] + event["dur"]) for event in events
            if began <= event["ts"] < ended]


def _step(recorded: _Events, began: float, ended: float, ready: Event) -> StepCompute:
    """Return a step from its times, in microseconds, and the event of its gradients."""
    first, last = ready["ts"], ready["ts"] + ready["dur"]
    waits = _spans(recorded["wait"], began, last)

    def computed_s(at: float) -> float:
        """Return the seconds computed from the beginning of the step until a time."""
        waited = sum(max(0.0, min(stop, at) - start) for start, stop in waits)
        return max(0.0, at - began - waited) / 1e6

    # With accumulated gradients, there are several forward passes; this step contains the last.
    forward = _spans(recorded["forward"], began, first)[-1:] or [(began, began)]
    updates = _spans(recorded["optimizer"], began, first)
    return StepCompute(
        sum(stop - start for start, stop in updates) / 1e6,
        (computed_s(forward[0][0]), computed_s(forward[0][1])),
        tuple(computed_s(first + at_us) for at_us in ready["args"]["at_us"]), computed_s(last),
        (ended - began) / 1e6)


def _tensors(model: Mapping[str, Any], trace: JobTrace) -> list[buckets.TensorSpec]:
    # NumPy alone lacks bfloat16; only lengths matter here.
    names = {"bfloat16": "float16"}
    try:
        tensors = [buckets.TensorSpec(name, tuple(shape), memory.dtype_named(
                       names.get(dtype, dtype), (*memory.FLOATING, *memory.COMPLEX)))
                   for name, shape, dtype in model["tensors"]]
        refuse_large(sum(tensor.size * tensor.dtype.itemsize for tensor in tensors))
    except ConfigError as exc:
        raise ConfigError(f"job {trace.name}: its model cannot be read: {exc}") from exc
    return tensors
