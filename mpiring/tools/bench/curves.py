"""Makes curves and rows of trainings: times, bytes and losses beside those of plain means."""

import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..files import Row
from . import timing
from .results import Measurement

ALONE = "alone"
DENSE = "dense"
# By default, the loss that the plain mean reaches after this share of its steps is the target,
# rounded up, so that no method misses it by a rounding error.
_TARGET_SHARE = 0.8
_TARGET_PARTS = 100


@dataclass(frozen=True)
class Curve:
    """A validation loss as training goes on: means over seeds.

    Attributes:
        steps: Those after which it was computed.
        seconds: Of training until then.
        bits: Per byte.
        sent: Bytes that all ranks together have sent until then.
    """

    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    bits: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)

    def at(self, step: int) -> float:
        """Return the loss after one of `steps`."""
        return self.bits[self.steps.index(step)]

    def seconds_to(self, target: float) -> float:
        """Return when the loss was first seen at or below a target; NaN if never."""
        return next((seconds for seconds, bits in zip(self.seconds, self.bits) if bits <= target),
                    math.nan)


def curve_of(trainings: Sequence[Measurement]) -> Curve:
    """Return the mean curve of trainings with several seeds, as far as all of them have come."""
    def by_step(name: str) -> list[dict[int, float]]:
        return [dict(zip(map(int, training.readings["validated"]), training.readings[name]))
                for training in trainings]

    bits, sent = by_step("bits"), by_step("sent")
    steps = [step for step in bits[0] if all(step in its for its in bits)]
    return Curve(
        steps,
        [mean([sum(training.readings["step"][:step]) for training in trainings])
         for step in steps],
        [mean([its[step] for its in bits]) for step in steps],
        [mean([its[step] for its in sent]) for step in steps])


def mean(values: Sequence[float]) -> float:
    """Return the mean."""
    return math.fsum(values) / len(values)


def default_target(dense: Curve) -> float:
    """Return the loss that dense reaches after a share of its steps, rounded up; NaN of nothing."""
    late = [bits for step, bits in zip(dense.steps, dense.bits)
            if step >= _TARGET_SHARE * dense.steps[-1]]
    if not late or not math.isfinite(late[0]):
        return math.nan
    return math.ceil(late[0] * _TARGET_PARTS) / _TARGET_PARTS


def times(mine: Sequence[Measurement], trainings: Mapping[str, Sequence[Measurement]],
          options: Namespace) -> Row:
    """Return the times of settled steps. Ratios are medians over seeds, which are close in time."""
    def settled(training: Measurement) -> list[float]:
        return training.readings["step"][options.settled:]

    def over(other: str) -> float:
        return timing.median([
            timing.median(settled(training)) / timing.median(settled(reference))
            for training, reference in zip(mine, trainings.get(other, []))
            if settled(training) and settled(reference)])

    seconds = [value for training in mine for value in settled(training)]
    return {
        "steps": min(len(training.readings["step"]) for training in mine),
        "training_s": mean([sum(training.readings["step"]) for training in mine]),
        "median_ms": timing.median(seconds) * 1e3, "p95_ms": timing.p95(seconds) * 1e3,
        "over_dense": over(DENSE), "over_alone": over(ALONE)}


def reading(trainings: Sequence[Measurement], name: str) -> float:
    """Return the mean of a reading over trainings; NaN where none has it."""
    values = [training.readings[name][0] for training in trainings if name in training.readings]
    return mean(values) if values else math.nan


def ratio(more: float, less: float) -> float:
    """Return a ratio; NaN over nothing."""
    return more / less if less else math.nan


def mean_costs(mine: Sequence[Measurement], dense: Sequence[Measurement]) -> Row:
    """Return the bytes and seconds of a settled step."""
    on_wire = reading(mine, "host_bytes")
    return {
        "compression_ratio": ratio(reading(mine, "dense_bytes"), reading(mine, "sent_bytes")),
        "wire_ratio": ratio(reading(dense, "host_bytes"), on_wire),
        "wire_MiB": on_wire / 2 ** 20,
        **{f"{name}_ms": reading(mine, f"{name}_s") * 1e3
           for name in ("encode", "wire", "decode")}}


def accuracy(mine: Sequence[Measurement], dense: Curve, target: float) -> Row:
    """Return the loss, and the time until the target; compared after equally many steps."""
    curve = curve_of(mine)
    ends = [training.readings["bits"][-1] for training in mine if training.readings["bits"]]
    seconds = curve.seconds_to(target)
    return {
        "bits_per_byte": curve.bits[-1] if curve.bits else math.nan,
        "bits_over_dense": _difference(curve, dense),
        "spread_of_seeds": max(ends) - min(ends) if len(ends) > 1 else math.nan,
        "target_bits": target,
        "seconds_to_target": seconds,
        "times_faster": dense.seconds_to(target) / seconds,
        "curve_steps": curve.steps, "curve_s": curve.seconds, "curve_bits": curve.bits,
        "curve_bytes": curve.sent}


def _difference(curve: Curve, dense: Curve) -> float:
    """Return the loss minus dense's, at the last step that both have."""
    both = [step for step in curve.steps if step in dense.steps]
    # Less than a ten thousandth of a bit means nothing; -0.0 + 0.0 is 0.0.
    return round(curve.at(both[-1]) - dense.at(both[-1]), 4) + 0.0 if both else math.nan
