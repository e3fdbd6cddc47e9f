"""Measures how much of a bucketed allreduce hides behind compute."""

import random
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from ...provisional import Array, count
from ..arguments import above_zero, checked, names
from ..table import Column, Environment, Row
from ..units import parse_size, size_text
from . import inputs, timing
from .benchmark import Benchmark, Measurement, declare_turns, run
from .contenders import (
    NONBLOCKING, SUMMING, Contender, chosen, declare_contenders, settle_contenders,
)
from .world import World

# Compute is calibrated with runs of at least this duration.
_LONG_ENOUGH_S = 0.05
_MATRIX = 192
_ADDITIONS = 5000

Action = Callable[[], object]


def _numpy_unit() -> Action:
    """Return about 0.2 ms of work that releases the GIL, as NumPy and PyTorch do."""
    a, b, product = (np.full((_MATRIX, _MATRIX), 0.01, np.float32) for _ in range(3))
    return lambda: np.matmul(a, b, out=product)


def _python_unit() -> Action:
    """Return about 0.2 ms of work that holds the GIL."""
    def add() -> int:
        total = 0
        for value in range(_ADDITIONS):
            total += value
        return total
    return add


_UNITS = {"numpy": _numpy_unit, "python": _python_unit}
COMPUTES = tuple(_UNITS)


def declare(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--size", type=checked(parse_size), default=20_000_000,
                        help="total size of all buckets in bytes (default: 20MB)")
    parser.add_argument("--bucket", type=checked(parse_size), default=5_000_000, metavar="SIZE",
                        help="size of one bucket in bytes (default: 5MB)")
    parser.add_argument("--ratio", type=above_zero, default=1.8,
                        help="compute time divided by communication time (default: 1.8)")
    parser.add_argument("--computes", type=names(COMPUTES), default=list(COMPUTES),
                        metavar="A,B", help=f"kinds of compute (default: {','.join(COMPUTES)})")
    declare_turns(parser)
    declare_contenders(parser)
    parser.set_defaults(action=_run)


def _run(options: Namespace) -> int:
    settle_contenders(options, SUMMING)
    return run(OVERLAP, options)


def calibrated(world: World, unit: Action, wanted_s: float) -> Action:
    """Return repeated units that take `wanted_s` if all ranks do them at once, and nothing else."""
    def work(times: int) -> Action:
        def repeat() -> None:
            for _ in range(times):
                unit()
        return repeat

    times, seconds = 1, 0.0
    while seconds < min(_LONG_ENOUGH_S, wanted_s):
        times *= 2
        seconds = timing.median(timing.timed(world, work(times), 3))
    return work(max(1, round(times * wanted_s / seconds)))


def measure(world: World, options: Namespace) -> Iterator[list[Measurement]]:
    """Measure contenders and kinds of compute in rounds; the last round yields all results."""
    length = max(1, options.bucket // 4)
    total = max(1, options.size // 4)
    buckets = [world.comm.empty(min(length, total - start), np.float32)
               for start in range(0, total, length)]
    rng = random.Random(options.seed)
    subjects = {(name, kind): partial(_round, world, buckets, actions, rng)
                for contender in chosen(world, options.contenders, ["auto"], options.interface)
                for name, kind, actions in _subjects(world, contender, buckets, options)}
    readings = yield from timing.in_turns(options, rng, subjects)
    labels = {"bytes": sum(bucket.nbytes for bucket in buckets), "buckets": len(buckets),
              "ratio": options.ratio, "thread_level": world.thread_level}
    yield [Measurement({**labels, "contender": name, "compute": kind}, times)
           for (name, kind), times in readings.items()]


def _round(world: World, buckets: Sequence[Array], actions: Mapping[str, Action],
           rng: random.Random) -> timing.Readings:
    """Time each action once, in a random order."""
    return {name: timing.timed(world, actions[name], 1, prepare=lambda: _fill(world, buckets))
            for name in rng.sample(list(actions), len(actions))}


def _fill(world: World, buckets: Sequence[Array]) -> None:
    for bucket in buckets:
        inputs.fill(bucket, world.rank, world.size)


def _subjects(world: World, contender: Contender, buckets: Sequence[Array], options: Namespace,
              ) -> Iterator[tuple[str, str, dict[str, Action]]]:
    """Check a contender; yield its name, a kind of compute, and the actions to time, for each kind.

    The compute time is proportional to the communication time.
    """
    name = NONBLOCKING.get(contender.name, contender.name)
    begins = [contender.starting(bucket) for bucket in buckets]

    def together(compute: Action) -> None:
        waits = [begin() for begin in begins]
        compute()
        for wait in waits:
            wait()

    communicate = partial(together, lambda: None)
    _fill(world, buckets)
    communicate()
    for bucket in buckets:
        inputs.check(world, bucket, name)
    alone = timing.median(timing.timed(
        world, communicate, 3, prepare=lambda: _fill(world, buckets)))
    for kind in options.computes:
        compute = calibrated(world, _UNITS[kind](), options.ratio * alone)
        yield name, kind, {"compute": compute, "communication": communicate,
                           "total": partial(together, compute)}


def rows(measurements: Sequence[Measurement], about: Environment, options: Namespace) -> list[Row]:
    """Return a row for each contender and kind of compute."""
    return [_row(measurement) for measurement in measurements]


def _row(measurement: Measurement) -> Row:
    """Compare the three readings of each round, which are close in time; return the medians."""
    names = ("compute", "communication", "total")
    rounds = list(zip(*(measurement.readings[name] for name in names)))
    compute, communication, total = (timing.median(values) for values in zip(*rounds))
    return {
        "size": size_text(measurement.labels["bytes"]),
        **measurement.labels,
        "rounds": len(rounds),
        "compute_ms": compute * 1e3,
        "communication_ms": communication * 1e3,
        "total_ms": total * 1e3,
        "overlap_percent": timing.median([timing.overlap_percentage(*times) for times in rounds]),
        "total_over_longest": timing.median([together / max(alone) for *alone, together in rounds]),
    }


def _title(row: Row) -> str:
    return f"{row['size']} in {count(row['buckets'], 'bucket')}"


_COLUMNS = [
    Column("contender", -16), Column("thread_level", -10, title="threads"), Column("compute", -8),
    Column("compute_ms", 11, 4), Column("communication_ms", 10, 4, "comm. ms"),
    Column("total_ms", 10, 4), Column("overlap_percent", 9, 3, "overlap %"),
    Column("total_over_longest", 9, 3, "total/max")]
OVERLAP = Benchmark("overlap", lambda options: options.rounds, measure, rows, _COLUMNS, _title)
