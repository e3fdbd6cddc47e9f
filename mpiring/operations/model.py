"""Model of the time of each algorithm on this cluster, from a few measured times.

The model is simple. Between two measured sizes, an algorithm's time is on the line between them in
a plot with logarithmic axes. Beyond the largest size, it grows as between the last two sizes; below
the smallest size, it is constant.
"""

import bisect
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..files import parsed

# A bucket is long enough if latency is at most this share of its time.
_LATENCY_SHARE = 0.1
# Beyond the measured sizes, the algorithm that sends the fewest bytes is used, unless the model
# predicts that another one is clearly faster. Small differences are noise, and MPI may change its
# algorithm. (MPICH between 4 hosts was as fast as a ring at 2 MiB, and half as fast at 16 MiB.)
_UNMEASURED = 1.25
# Beyond this many times the largest measured size, only the number of bytes counts. (On a link of
# 100 Mbit/s, there was time to measure only up to 64 KiB. For buckets of 1 MiB, the curves then
# predicted that MPI's call is the fastest, but a step took 1.1 times as long as with rings.)
_FAR = 4
_SMALLEST_BUCKET, _LARGEST_BUCKET = 1 << 20, 25 << 20
# Depth of the JSON text: an object of lists of pairs.
_LEVELS = 3


class Curve(NamedTuple):
    """Seconds of an algorithm's allreduce at points: one or more sizes in bytes, ascending."""

    points: tuple[tuple[int, float], ...]

    def time_s(self, nbytes: int) -> float:
        """Return the predicted time of an allreduce of `nbytes` bytes, in seconds."""
        sizes = [size for size, _ in self.points]
        position = bisect.bisect_left(sizes, nbytes)
        if position == 0:
            return self.points[0][1]
        if position == len(sizes):
            size, seconds = self.points[-1]
            return seconds + (nbytes - size) * self.s_per_byte
        (low, low_s), (high, high_s) = self.points[position - 1:position + 1]
        share = math.log(nbytes / low) / math.log(high / low)
        return math.exp((1 - share) * math.log(low_s) + share * math.log(high_s))

    @property
    def latency_s(self) -> float:
        """Time of the shortest allreduce, in seconds."""
        return self.points[0][1]

    @property
    def s_per_byte(self) -> float:
        """Time for each additional byte of a long allreduce, in seconds."""
        (low, low_s), (high, high_s) = (self.points * 2)[-2:]
        if high <= low:
            return high_s / high
        # Because of noise, the longer allreduce may have the shorter time.
        return max((high_s - low_s) / (high - low), 0.1 * high_s / high)


@dataclass(frozen=True)
class Model:
    """The curves of the algorithms that this cluster can use, in the order of measurement."""

    curves: tuple[tuple[str, Curve], ...]

    def best(self, nbytes: int, candidates: Iterable[str]) -> str:
        """Return the fastest candidate; the first one if none was measured.

        The last candidate sends the fewest bytes.
        """
        candidates = list(candidates)
        curves = dict(self.curves)
        if any(name in curves and nbytes > _FAR * curves[name].points[-1][0]
               for name in candidates):
            return candidates[-1]

        def time_s(name: str) -> float:
            curve = curves[name]
            doubtful = name != candidates[-1] and nbytes > curve.points[-1][0]
            return curve.time_s(nbytes) * (_UNMEASURED if doubtful else 1)

        return min((name for name in candidates if name in curves), key=time_s,
                   default=candidates[0])

    @property
    def bucket_bytes(self) -> int:
        """Length of the shortest bucket with a small latency share, between 1 and 25 MiB."""
        shortest = min(
            (curve.latency_s / curve.s_per_byte / _LATENCY_SHARE for _, curve in self.curves),
            default=_LARGEST_BUCKET)
        power = 1 << math.ceil(math.log2(max(shortest, 1)))
        return min(max(power, _SMALLEST_BUCKET), _LARGEST_BUCKET)

    def to_json(self) -> str:
        """Return a string from which `from_json` makes an equal model."""
        return json.dumps({name: curve.points for name, curve in self.curves})

    @classmethod
    def from_json(cls, text: str) -> "Model":
        """Return the model that a string contains; raise ValueError if it contains none."""
        try:
            curves: Mapping[str, Any] = parsed(text.encode(), _LEVELS)
            return cls(tuple((str(name), Curve(_points(points)))
                             for name, points in curves.items()))
        except (ArithmeticError, AttributeError, KeyError, TypeError) as exc:
            raise ValueError(f"not a model: {text[:100]!r}") from exc


def _points(pairs: Sequence[Sequence[float]]) -> tuple[tuple[int, float], ...]:
    points = tuple((int(size), float(seconds)) for size, seconds in pairs)
    sizes = [size for size, _ in points]
    if not points or sizes != sorted(set(sizes)) or min(sizes) < 1:
        raise ValueError(f"sizes {sizes} do not ascend from 1")
    if not all(0 < seconds < math.inf for _, seconds in points):
        raise ValueError("times must be positive")
    return points
