"""Makes a table of trainings with several Reducers: what each has saved, and what it has cost."""

import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..files import Environment, Row
from ..table import Column
from . import timing
from .results import Measurement

ALONE = "alone"
DENSE = "dense"

# By default, the loss that the plain mean reaches after this share of its steps is the target,
# rounded up: who is at the same step above it by rounding only shall not have missed it.
_TARGET_SHARE = 0.8
_TARGET_PARTS = 100


@dataclass(frozen=True)
class Curve:
    """A validation loss as training goes on: means over seeds.

    Attributes:
        steps: At which it was looked at.
        seconds: Of training until then.
        bits: Per byte.
    """

    steps: list[int]
    seconds: list[float]
    bits: list[float]

    def at(self, step: int) -> float:
        """Return the loss at one of its steps."""
        return self.bits[self.steps.index(step)]

    def seconds_to(self, target: float) -> float:
        """Return when the loss was first seen at or below a target; NaN if never."""
        return next((seconds for seconds, bits in zip(self.seconds, self.bits) if bits <= target),
                    math.nan)


def curve_of(trainings: Sequence[Measurement]) -> Curve:
    """Return the mean curve of trainings with several seeds, as far as all of them have come."""
    of_seeds = [dict(zip(map(int, one.readings["validated"]), one.readings["bits"]))
                for one in trainings]
    steps = [step for step in of_seeds[0] if all(step in bits for bits in of_seeds)]
    return Curve(
        steps, [_mean([sum(one.readings["step"][:step]) for one in trainings]) for step in steps],
        [_mean([bits[step] for bits in of_seeds]) for step in steps])


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def rows(found: Sequence[Measurement], about: Environment, options: Namespace) -> list[Row]:
    """Return a row for each method, beside the plain mean and the compute alone."""
    trainings: dict[str, list[Measurement]] = {}
    for one in found:
        trainings.setdefault(one.labels["reducer"], []).append(one)
    dense = curve_of(trainings[DENSE]) if DENSE in trainings else Curve([], [], [])
    target = options.target_loss or _default_target(dense)
    return [{
        **{key: value for key, value in mine[0].labels.items() if key != "seed"},
        "seeds": len(mine),
        **_times(mine, trainings, options),
        **_costs(mine, trainings.get(DENSE, [])),
        **_accuracy(mine, dense, target),
    } for mine in trainings.values()]


def _default_target(dense: Curve) -> float:
    late = [bits for step, bits in zip(dense.steps, dense.bits)
            if step >= _TARGET_SHARE * dense.steps[-1]]
    if not late or not math.isfinite(late[0]):
        return math.nan
    return math.ceil(late[0] * _TARGET_PARTS) / _TARGET_PARTS


def _times(mine: Sequence[Measurement], trainings: Mapping[str, Sequence[Measurement]],
           options: Namespace) -> Row:
    """Return how long settled steps are. Ratios are medians over seeds, which lie close in time."""
    def settled(one: Measurement) -> list[float]:
        return one.readings["step"][options.settled:]

    def over(other: str) -> float:
        return timing.median([
            timing.median(settled(one)) / timing.median(settled(reference))
            for one, reference in zip(mine, trainings.get(other, []))
            if settled(one) and settled(reference)])

    seconds = [value for one in mine for value in settled(one)]
    return {
        "steps": min(len(one.readings["step"]) for one in mine),
        "training_s": _mean([sum(one.readings["step"]) for one in mine]),
        "median_ms": timing.median(seconds) * 1e3, "p95_ms": timing.p95(seconds) * 1e3,
        "over_dense": over(DENSE), "over_alone": over(ALONE)}


def _costs(mine: Sequence[Measurement], dense: Sequence[Measurement]) -> Row:
    """Return the bytes and seconds of a settled step."""
    def mean(trainings: Sequence[Measurement], name: str) -> float:
        values = [one.readings[name][0] for one in trainings if name in one.readings]
        return _mean(values) if values else math.nan

    def ratio(more: float, less: float) -> float:
        return more / less if less else math.nan

    on_wire = mean(mine, "host_bytes")
    return {
        "compression_ratio": ratio(mean(mine, "dense_bytes"), mean(mine, "sent_bytes")),
        "wire_ratio": ratio(mean(dense, "host_bytes"), on_wire),
        "wire_MiB": on_wire / 2 ** 20,
        **{f"{name}_ms": mean(mine, f"{name}_s") * 1e3 for name in ("encode", "wire", "decode")}}


def _accuracy(mine: Sequence[Measurement], dense: Curve, target: float) -> Row:
    """Return how good the model became, and how soon; compared after equally many steps."""
    curve = curve_of(mine)
    ends = [one.readings["bits"][-1] for one in mine if one.readings["bits"]]
    seconds = curve.seconds_to(target)
    return {
        "bits_per_byte": curve.bits[-1] if curve.bits else math.nan,
        "bits_over_dense": _difference(curve, dense),
        "spread_of_seeds": max(ends) - min(ends) if len(ends) > 1 else math.nan,
        "target_bits": target,
        "seconds_to_target": seconds,
        "times_faster": dense.seconds_to(target) / seconds,
        "curve_steps": curve.steps, "curve_s": curve.seconds, "curve_bits": curve.bits}


def _difference(curve: Curve, dense: Curve) -> float:
    """Return by how much a loss is above dense's, at the last step that both have seen."""
    both = [step for step in curve.steps if step in dense.steps]
    # Less than a ten thousandth of a bit means nothing; -0.0 + 0.0 is 0.0.
    return round(curve.at(both[-1]) - dense.at(both[-1]), 4) + 0.0 if both else math.nan


def columns(several_levels: bool) -> list[Column]:
    """Return the columns of the table."""
    return [
        Column("reducer", "reducer", -9), Column("steps", "steps", 5, 1),
        Column("median_ms", "median ms", 9, 4), Column("p95_ms", "p95 ms", 7, 4),
        Column("over_dense", "/dense", 6, 3), Column("over_alone", "/alone", 6, 3),
        Column("compression_ratio", "compressed", 10, 3), Column("wire_ratio", "on wire", 7, 3),
        Column("encode_ms", "encode ms", 9, 3), Column("wire_ms", "wire ms", 7, 3),
        Column("decode_ms", "decode ms", 9, 3),
        Column("bits_per_byte", "bits/byte", 9, 4), Column("bits_over_dense", "- dense", 8, 2),
        Column("spread_of_seeds", "spread", 6, 2), Column("target_bits", "target", 6, 4),
        Column("seconds_to_target", "reached s", 9, 4), Column("times_faster", "faster", 6, 3),
    ]
