"""Settings that change the speed of a training step, and the search for the fastest ones.

They are tried in real steps, in which computation competes with communication (AutoCCL, Xu et al.,
NSDI 2025).
"""

from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..buckets.bucket import FIRST_BUCKET_BYTES
from ..collectives.operation import Tuning
from ..operations.collectives import Collectives

# Smaller gains count as noise.
_MIN_GAIN = 0.01
# Number of turns in which the best and the first settings are compared at the end.
TURNS = 2


@dataclass(frozen=True)
class Choice:
    """Settings that change the speed of a step, and at most the rounding of its results.

    Attributes:
        bucket_bytes: Length of buckets; see Fusion.
        operations: Number of operations that advance at the same time; see Config.
        long, short: Algorithms for buckets longer than FIRST_BUCKET_BYTES, and for others; "auto"
            means the configured algorithm.
        pieces: Factor for the length of the pieces into which algorithms cut buckets.
        slices: Number of a rank's slices that are in flight between nodes at the same time.
    """

    bucket_bytes: int
    operations: int
    long: str = "auto"
    short: str = "auto"
    pieces: float = 1.0
    slices: int = Tuning.in_flight

    def __str__(self) -> str:
        parts = [f"buckets of {self.bucket_bytes / 2**20:.4g} MiB",
                 f"{self.operations} in flight", f"algorithm {self.long}"]
        if self.short != self.long:
            parts[-1] += f" ({self.short} up to {FIRST_BUCKET_BYTES >> 20} MiB)"
        if self.pieces != 1:
            parts.append(f"pieces {self.pieces:g} times as long")
        if self.slices != Tuning.in_flight:
            parts.append(f"{self.slices} slices in flight")
        return ", ".join(parts)

    def algorithm(self, nbytes: int) -> str:
        """Return the algorithm for a bucket of `nbytes` bytes."""
        return self.short if nbytes <= FIRST_BUCKET_BYTES else self.long

    def adjustment(self, nbytes: int) -> Callable[[Collectives], None] | None:
        """Return the function that applies these settings to collectives on `nbytes` bytes.

        Return None if these settings are those of all operations.
        """
        algorithm = self.algorithm(nbytes)
        if (algorithm, self.pieces, self.slices) == ("auto", 1, Tuning.in_flight):
            return None

        def adjust(collectives: Collectives) -> None:
            tuning, factor = collectives.tuning, self.pieces
            if algorithm != "auto":
                collectives.preferred = algorithm
            collectives.tuning = replace(
                tuning, in_flight=self.slices, ring_bytes=int(factor * tuning.ring_bytes),
                direct_bytes=(tuning.direct_bytes[0], int(factor * tuning.direct_bytes[1])),
                slice_bytes=int(factor * tuning.slice_bytes),
                chunk_bytes=int(factor * tuning.chunk_bytes))

        return adjust


@dataclass(frozen=True)
class Axis:
    """A setting, a field of Choice, and the values that are worth trying.

    These include the value at the start of the search. If `ordered`, neighboring values give
    similar speeds, so the search walks along them; otherwise it tries all values.
    """

    name: str
    values: Sequence[Any]
    ordered: bool = True


@dataclass(frozen=True)
class Outcome:
    """The settings to keep, and the first settings, each with the duration of a step in s."""

    choice: Choice
    first: Choice
    seconds: float
    first_s: float

    def __str__(self) -> str:
        if self.choice == self.first:
            return f"no other settings are clearly faster than {self.first}"
        return (f"{self.choice}: {self.seconds * 1e3:.4g} ms per step, "
                f"{100 * (1 - self.seconds / self.first_s):.1f} % less than with {self.first}")


Search = Generator[Choice, float, Outcome]


class _Exhausted(Exception):
    """All trials are used up."""


class Descent:
    """A search that changes one setting at a time, as long as steps become faster.

    It begins with `first`, and tries at most `trials` choices. Axes begin with the most important
    one. `identity` returns equal values for choices with equal steps.
    """

    def __init__(self, first: Choice, axes: Sequence[Axis],
                 identity: Callable[[Choice], Hashable], trials: int) -> None:
        self._first, self._axes, self._identity = first, axes, identity
        self._left = trials
        self._best, self._best_s = first, np.inf
        self._tried: set[Hashable] = set()
        self._others_s: dict[Choice, float] = {}

    def search(self) -> Search:
        """Yield settings to try, and receive the duration of a step with them, in seconds.

        Return the best settings, if a comparison at the end confirms that they are faster than the
        first settings; otherwise the first settings.
        """
        try:
            yield from self._try(self._first)
            # Repeat the first trial, because processors and memory must warm up.
            self._tried.clear()
            yield from self._try(self._first)
            before = None
            while self._best != before:
                before = self._best
                for axis in self._axes:
                    yield from self._walk(axis) if axis.ordered else self._try_all(axis)
        except _Exhausted:
            pass
        return (yield from self._compare())

    def _try(self, choice: Choice) -> Generator[Choice, float, bool]:
        """Try settings, unless equivalent ones were tried; return whether they are the best yet."""
        identity = self._identity(choice)
        if identity in self._tried:
            return False
        if not self._left:
            raise _Exhausted
        self._left -= 1
        self._tried.add(identity)
        seconds = yield choice
        if choice == self._best:
            self._best_s = min(seconds, self._best_s)
            return False
        if choice != self._first:
            self._others_s[choice] = seconds
        if seconds < (1 - _MIN_GAIN) * self._best_s:
            self._best, self._best_s = choice, seconds
            return True
        return False

    def _try_all(self, axis: Axis) -> Generator[Choice, float, None]:
        for value in axis.values:
            yield from self._try(replace(self._best, **{axis.name: value}))

    def _walk(self, axis: Axis) -> Generator[Choice, float, None]:
        """Walk along the values in either direction, first in strides of two, then of one."""
        for stride in (2, 1):
            for direction in (stride, -stride):
                start, moves = self._best, True
                while moves:
                    position = axis.values.index(getattr(self._best, axis.name)) + direction
                    moves = 0 <= position < len(axis.values) and (yield from self._try(
                        replace(self._best, **{axis.name: axis.values[position]})))
                if self._best != start:
                    break

    def _compare(self) -> Search:
        """Compare the best settings with the first, alternately; in doubt, keep the first.

        If the first settings were the best, compare the second best, because one step that was fast
        by chance would exclude all other settings.
        """
        best, first = self._best, self._first
        if best == first:
            if not self._others_s:
                return Outcome(first, first, self._best_s, self._best_s)
            best = min(self._others_s, key=self._others_s.__getitem__)
        times: dict[Choice, list[float]] = {first: [], best: []}
        for _ in range(TURNS):
            for choice in (first, best):
                times[choice].append((yield choice))
        # Disturbances only make steps slower.
        seconds, first_s = min(times[best]), min(times[first])
        if seconds < (1 - _MIN_GAIN) * first_s:
            return Outcome(best, first, seconds, first_s)
        return Outcome(first, first, first_s, first_s)
