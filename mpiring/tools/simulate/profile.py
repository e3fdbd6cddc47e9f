"""Reads from the trace of a job what a training step computes, without its communication."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from ...buckets.bucket import TensorSpec
from ...errors import ConfigError
from ...memory.arrays import COMPLEX, FLOATING, dtype_named
from ..traces import Event, JobTrace, RankTrace, open_job

# The first recorded step follows that in which memory was touched and buckets were built again.
_WARM_UP = 1
# A step that computes so many times the median contains other work, such as a validation.
_LONG = 2.0


@dataclass(frozen=True)
class StepCompute:
    """The computing of one rank in one step, in seconds, without waits.

    Attributes:
        update_s: The optimizer's update, at the beginning of the step; 0 if that is unknown.
        forward_s: Begin and end of the forward pass; both 0 if that is unknown.
        ready_s: Times at which each tensor's gradient was ready, in the model's order.
        compute_s: All of the step.
        step_s: The step with its waits.
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
        tensors: In the model's order.
        steps: Of all ranks.
        step_s: Median seconds of these steps, with all that they waited.
        ranks, nodes: Of the job.
        overlap: Buckets left during the backward pass.
        caption: Says what was recorded.
    """

    tensors: Sequence[TensorSpec]
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
        """Bytes of all gradients."""
        return sum(tensor.size * tensor.dtype.itemsize for tensor in self.tensors)

    @property
    def order(self) -> list[int]:
        """The numbers of the tensors, in the order in which gradients become ready."""
        mean_s = [fmean(times) for times in zip(*(step.ready_s for step in self.steps))]
        return sorted(range(len(mean_s)), key=lambda tensor: mean_s[tensor])


@dataclass
class _Recorded:
    """The events of one rank that matter here."""

    models: list[Mapping[str, Any]] = field(default_factory=list)
    steps: list[Event] = field(default_factory=list)
    ready: list[Event] = field(default_factory=list)
    spans: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def within(self, kind: str, began: float, ended: float) -> Iterator[tuple[float, float]]:
        """Yield the spans of a kind that begin within a time."""
        return (span for span in self.spans.get(kind, ()) if began <= span[0] < ended)


def read_profile(folder: str, job: str | None) -> Profile:
    """Return what the ranks of a job have computed.

    Args:
        folder: Holds the traces.
        job: The beginning of the job's name; None for the only job.

    Raises:
        ConfigError: There is no trace, or it does not say when gradients became ready.
    """
    trace = open_job(folder, job)
    trace.warn()
    model: Mapping[str, Any] | None = None
    steps: list[StepCompute] = []
    for rank in trace.ranks:
        recorded = _read(rank)
        for described in recorded.models:
            if model is not None and described["tensors"] != model["tensors"]:
                raise ConfigError(f"{rank.path}: several models were trained, or parameters were "
                                  f"frozen, while it was written; record a job that trains one")
            model = described
        steps += _steps(recorded)
    if model is None or not steps:
        raise ConfigError(
            f"{folder}: job {trace.name} does not say when gradients became ready: it takes three "
            f"steps or more of a DataParallel of this version, with gradients in host memory")
    limit = _LONG * median(step.compute_s for step in steps)
    usual = [step for step in steps if step.compute_s <= limit]
    return Profile(_tensors(model, trace), usual, median(step.step_s for step in usual),
                   trace.ranks[0].size, len({rank.node for rank in trace.ranks}),
                   bool(model["overlap"]),
                   f"{trace.caption.partition(', clocks')[0]}, {len(usual)} steps")


def _read(rank: RankTrace) -> _Recorded:
    recorded = _Recorded()
    for event in rank.events():
        category, began = event.get("cat"), event.get("ts", 0.0)
        if event["name"] == "model" and event.get("ph") == "M":
            recorded.models.append(event["args"])
        elif category == "step":
            recorded.steps.append(event)
        elif category == "ready":
            recorded.ready.append(event)
        elif category in ("wait", "phase"):
            kind = category if category == "wait" else event["name"]
            recorded.spans.setdefault(kind, []).append((began, began + event["dur"]))
    return recorded


def _steps(recorded: _Recorded) -> Iterator[StepCompute]:
    """Yield the steps of a rank of which all is known."""
    number = 0
    for step in recorded.steps[_WARM_UP:]:
        began, ended = step["ts"], step["ts"] + step["dur"]
        while number < len(recorded.ready) and recorded.ready[number]["ts"] < began:
            number += 1
        ready = recorded.ready[number] if number < len(recorded.ready) else None
        if ready is None or ready["ts"] >= ended or not ready["args"].get("at_us"):
            continue
        yield _step(recorded, began, ended, ready)


def _step(recorded: _Recorded, began: float, ended: float, ready: Event) -> StepCompute:
    """Return a step from its times, in microseconds, and the event of its gradients."""
    first, last = ready["ts"], ready["ts"] + ready["dur"]
    waits = list(recorded.within("wait", began, last))

    def computed_s(at: float) -> float:
        """Return the seconds computed from the beginning of the step until a time."""
        waited = sum(max(0.0, min(stop, at) - start) for start, stop in waits)
        return max(0.0, at - began - waited) / 1e6

    # Of several forward passes, for gradients that accumulate, the last one goes with the rest.
    forward = [*recorded.within("forward", began, first)][-1:] or [(began, began)]
    updates = recorded.within("optimizer", began, first)
    return StepCompute(
        sum(stop - start for start, stop in updates) / 1e6,
        (computed_s(forward[0][0]), computed_s(forward[0][1])),
        tuple(computed_s(first + at_us) for at_us in ready["args"]["at_us"]), computed_s(last),
        (ended - began) / 1e6)


def _tensors(model: Mapping[str, Any], trace: JobTrace) -> list[TensorSpec]:
    # NumPy alone lacks bfloat16; only lengths matter here.
    names = {"bfloat16": "float16"}
    try:
        return [TensorSpec(name, tuple(shape), dtype_named(
                    names.get(dtype, dtype), (*FLOATING, *COMPLEX)))
                for name, shape, dtype in model["tensors"]]
    except (ConfigError, TypeError, ValueError) as exc:
        raise ConfigError(f"job {trace.name}: its model cannot be read: {exc}") from exc
