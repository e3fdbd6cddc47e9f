"""Model of how long each algorithm takes on this cluster, from a few measured times.

The model is as plain as can be explained: an algorithm's time between two measured
sizes lies on the line between them in a plot with logarithmic axes; beyond the largest
it grows as between the last two, and below the smallest it is constant.
"""

import bisect
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..files import parsed

# A bucket is long enough when latency is not more than this share of its time.
_LATENCY_SHARE = 0.1
# Beyond the measured sizes bytes count, so that the algorithm that sends the fewest is
# taken unless another promises to be clearly faster: small differences are noise, and
# MPI may change its algorithm. (MPICH between 4 hosts was as fast as a ring at 2 MiB, and
# took twice its time at 16 MiB.)
_UNMEASURED = 1.25
# Beyond this many times the largest measured size only bytes count. (A link of 100 Mbit/s left time
# for 64 KiB only; from there, the curves promised that MPI's call is the fastest for buckets of
# 1 MiB, and a step took 1.1 times as long as by rings.)
_FAR = 4
_SMALLEST_BUCKET, _LARGEST_BUCKET = 1 << 20, 25 << 20
# An object of lists of pairs.
_LEVELS = 3


@dataclass(frozen=True)
class Curve:
    """The time of an allreduce by one algorithm, over its size.

    Attributes:
        points: Pairs of bytes, ascending, and seconds; at least one.
    """

    points: tuple[tuple[int, float], ...]

    def time_s(self, nbytes: int) -> float:
        """Return the predicted seconds of an allreduce of so many bytes."""
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
        """Seconds of the shortest allreduce."""
        return self.points[0][1]

    @property
    def s_per_byte(self) -> float:
        """Seconds of a further byte of a long allreduce."""
        (low, low_s), (high, high_s) = (self.points * 2)[-2:]
        if high <= low:
            return high_s / high
        # A measured time may fall where it should rise.
        return max((high_s - low_s) / (high - low), 0.1 * high_s / high)


@dataclass(frozen=True)
class Model:
    """The curves of the algorithms that can be used on this cluster.

    Attributes:
        curves: By algorithm, in the order in which they were tried.
    """

    curves: tuple[tuple[str, Curve], ...]

    def best(self, nbytes: int, candidates: Iterable[str]) -> str:
        """Return the candidate that takes the least time; the first one if none was measured.

        Args:
            candidates: The one that sends the fewest bytes last.
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
        """The shortest bucket of which latency is a small share, between 1 and 25 MiB."""
        shortest = min(
            (curve.latency_s / curve.s_per_byte / _LATENCY_SHARE for _, curve in self.curves),
            default=_LARGEST_BUCKET)
        power = 1 << math.ceil(math.log2(max(shortest, 1)))
        return min(max(power, _SMALLEST_BUCKET), _LARGEST_BUCKET)

    def to_json(self) -> str:
        """Return a text from which `from_json` makes an equal model."""
        return json.dumps({name: curve.points for name, curve in self.curves})

    @classmethod
    def from_json(cls, text: str) -> "Model":
        """Return the model that a text holds.

        Raises:
            ValueError: It holds none.
        """
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
