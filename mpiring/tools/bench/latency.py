"""Times short collectives as the OSU micro-benchmarks do."""

import itertools
import random
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import fmean
from typing import NamedTuple

import numpy as np

from ...provisional import Array, memory
from ..arguments import checked, names, positive
from ..table import Environment, Row
from ..units import parse_sizes, size_text
from . import inputs, timing
from .allreduce import BUFFERS, MEMORY, HostArrays
from .benchmark import LEVELS, Benchmark, Measurement, declare_turns, least_by_case, run
from .contenders import NONBLOCKING, Call, Start, chosen, completed
from .matrix import Line, by_name, over_native
from .overlap import calibrated
from .world import World

_DTYPE = np.dtype(np.float32)
# As in the OSU micro-benchmarks, a tenth of the calls is enough above this size, and a warm-up with
# a tenth of the calls precedes the timed calls.
_LARGE_BYTES = 8192
_CALLS, _LARGE_SHARE, _WARM_SHARE = 200, 10, 10
_CALLS_BEFORE_COMPUTE = 20
# About 2 µs of work that releases the GIL.
_UNIT_NUMBERS = 1024
_AUTO, _PERSISTENT = "mpiring auto", "mpiring persistent"
_SUMS = ("allreduce", "iallreduce")
_TESTS = (*_SUMS, "allgather", "bcast", "reduce_scatter")
_CASE = ("test", "buffer", "bytes")


def declare(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--tests", type=names(_TESTS), default=list(_TESTS),
                        metavar="A,B",
                        help=f"collectives, some of {', '.join(_TESTS)} (default: all)")
    parser.add_argument("--sizes", type=checked(parse_sizes), default=parse_sizes("4..1M"),
                        help="sizes of each rank's contribution in bytes, a list as 8,1K,64K, or "
                             "a range in factors of 4 (default: 4..1M)")
    parser.add_argument("--buffers", type=names(BUFFERS), default=list(BUFFERS), metavar="A,B",
                        help="kinds of memory, empty (comm.empty) or private (numpy.empty) "
                             "(default: both)")
    parser.add_argument("--barrier", action="store_true",
                        help="run an MPI barrier before each call, as osu_allreduce does (default: "
                             "calls run back to back)")
    parser.add_argument("--calls", type=positive, default=_CALLS, metavar="N",
                        help=f"number of calls per round, and a tenth of it above 8 KiB (default: "
                             f"{_CALLS})")
    declare_turns(parser, LEVELS)
    parser.set_defaults(action=lambda options: run(LATENCY, options))


class _Subject(NamedTuple):
    """The calls of a contender on an array, whose results were checked.

    Attributes:
        call: Runs a complete collective.
        start: Begins the collective, and returns a function that waits; None for blocking calls.
        prepare: Called before the first of every `every` calls.
    """

    contender: str
    call: Call
    start: Start | None
    prepare: Call
    every: int


def _cases(options: Namespace) -> list[tuple[str, str, int]]:
    lengths = sorted({max(1, nbytes // _DTYPE.itemsize) for nbytes in options.sizes})
    return list(itertools.product(options.tests, options.buffers, lengths))


def measure(world: World, options: Namespace) -> Iterator[list[Measurement]]:
    """Measure MPI's own calls and those of mpiring."""
    rng, arrays = random.Random(options.seed), HostArrays(world)
    for test, buffer, length in _cases(options):
        subjects = (_sum_subjects if test in _SUMS else _other_subjects)(
            world, lambda n: arrays.array(buffer, n, _DTYPE), length, test)
        nbytes = length * _DTYPE.itemsize
        calls = max(1, options.calls // (_LARGE_SHARE if nbytes > _LARGE_BYTES else 1))
        labels = {"test": test, "bytes": nbytes, "buffer": buffer, "calls": calls,
                  "barrier": options.barrier, "thread_level": world.thread_level}
        readings = yield from timing.in_turns(options, rng, {
            subject.contender: partial(_round, world, calls, _actions(
                world, subject, options.barrier)) for subject in subjects})
        yield [Measurement({**labels, "contender": name}, times)
               for name, times in readings.items()]


def _sum_subjects(world: World, array: Callable[[int], Array], length: int, test: str,
                  ) -> list[_Subject]:
    """Return the subjects of an allreduce, whose results are checked."""
    x = array(length)
    contenders = chosen(world, ["mpiring", "mpi"], ["auto"])
    op = world.comm.persistent_allreduce(x)

    def begin() -> Call:
        op.start()
        return op.wait

    calls: dict[str, tuple[Call, Start | None]]
    if test == "iallreduce":
        starts = {NONBLOCKING.get(contender.name, contender.name): contender.starting(x)
                  for contender in contenders} | {_PERSISTENT: begin}
        calls = {name: (completed(start), start) for name, start in starts.items()}
    else:
        calls = {contender.name: (contender.blocking(x), None) for contender in contenders}
        calls[_PERSISTENT] = op, None
    for name, (call, _) in calls.items():
        inputs.fill(x, world.rank, world.size)
        call()
        inputs.check(world, x, name)
    return [_Subject(name, call, start, **inputs.series(world, x, call))
            for name, (call, start) in calls.items()]


def _other_subjects(world: World, array: Callable[[int], Array], length: int, test: str,
                    ) -> list[_Subject]:
    """Return the subjects of a collective whose array needs no refill between calls.

    Each rank contributes `length` numbers; in a broadcast, only rank 0 does. Results are checked.
    """
    def contribution(rank: int) -> Array:
        part = np.empty(length, _DTYPE)
        inputs.fill(part, rank, world.size)
        return part

    comm, raw, initial = world.comm, world.raw, contribution(world.rank)
    x = array(world.size * length if test == "allgather" else length)
    calls: dict[str, Callable[[], Array]]
    if test == "allgather":
        right = np.concatenate([contribution(rank) for rank in range(world.size)])
        initial = np.zeros_like(x)
        memory.slice_of(initial, world.rank, world.size)[...] = memory.slice_of(
            right, world.rank, world.size)
        calls = {"MPI_Allgather": lambda: (raw.Allgather(world.mpi.IN_PLACE, x), x)[1],
                 _AUTO: lambda: comm.allgather(x), _PERSISTENT: comm.persistent_allgather(x)}
    elif test == "bcast":
        right = contribution(0)
        calls = {"MPI_Bcast": lambda: (raw.Bcast(x), x)[1],
                 _AUTO: lambda: comm.broadcast(x), _PERSISTENT: comm.persistent_broadcast(x)}
    else:
        total = np.sum([contribution(rank) for rank in range(world.size)], axis=0)
        right, counts = memory.slice_of(total, world.rank, world.size), [
            chunk.size for chunk in memory.chunks_of(x, world.size)]
        # In place, MPI would overwrite the input of the next call with its result.
        result = np.empty_like(right)
        calls = {"MPI_Reduce_scatter": lambda: (raw.Reduce_scatter(x, result, counts), result)[1],
                 _AUTO: lambda: comm.reduce_scatter(x),
                 _PERSISTENT: comm.persistent_reduce_scatter(x)}
    for name, call in calls.items():
        x[...] = initial
        wrong = np.flatnonzero(call() != right)
        inputs.refuse_wrong(world, x, int(wrong[0]) if wrong.size else None, name,
                            "what the ranks have contributed")
    return [_Subject(name, call, None, call, timing.MAX_CALLS) for name, call in calls.items()]


def _round(world: World, calls: int, action: Callable[[int], dict[str, float]]) -> timing.Readings:
    """Return each rank's mean seconds per call, after some calls that are not timed."""
    action(max(1, calls // _WARM_SHARE))
    ranks = world.raw.allgather(action(calls))
    return {kind: [seconds[kind] for seconds in ranks] for kind in ranks[0]}


def _actions(world: World, subject: _Subject, barrier: bool) -> Callable[[int], dict[str, float]]:
    """Return a function that times a number of calls; nonblocking calls also behind compute."""
    mean_seconds = partial(timing.mean_seconds, world, barrier=barrier, prepare=subject.prepare,
                           every=subject.every)

    def alone(calls: int) -> dict[str, float]:
        return {"call": mean_seconds(subject.call, calls)}

    start = subject.start
    if start is None:
        return alone
    # The first calls are slower.
    alone(_CALLS_BEFORE_COMPUTE)
    numbers, roots = np.ones(_UNIT_NUMBERS), np.empty(_UNIT_NUMBERS)
    # As long as the collective takes alone, as in osu_iallreduce.
    compute = calibrated(world, lambda: np.sqrt(numbers, out=roots),
                         world.slowest([alone(_CALLS_BEFORE_COMPUTE)["call"]])[0])
    spent = dict.fromkeys(("init", "compute", "wait"), 0.0)

    def together() -> None:
        waits: list[Call] = []
        steps = (lambda: waits.append(start()), compute, lambda: waits[0]())
        for kind, step in zip(spent, steps):
            spent[kind] += timing.by_clock(step)

    def alone_and_together(calls: int) -> dict[str, float]:
        seconds_alone = alone(calls)
        spent.update(dict.fromkeys(spent, 0.0))
        mean_seconds(together, calls)
        return seconds_alone | {kind: seconds / calls for kind, seconds in spent.items()}

    return alone_and_together


def rows(measurements: Sequence[Measurement], about: Environment, options: Namespace) -> list[Row]:
    """Return a row for each measurement, compared with MPI's own call, test by test.

    With several thread levels, the reference is the faster of MPI's calls.
    """
    order = {test: number for number, test in enumerate(_TESTS)}
    measurements = sorted(measurements, key=lambda measurement: (
        order[measurement.labels["test"]], measurement.labels["buffer"],
        measurement.labels["contender"], measurement.labels["thread_level"],
        measurement.labels["bytes"]))
    p = about["ranks"]
    native = least_by_case(
        (measurement for measurement in measurements
         if measurement.labels["contender"].startswith("MPI_")), _CASE,
        lambda measurement: timing.median(_round_means(measurement, p)))
    return [_row(measurement, p, native[measurement.case(*_CASE)]) for measurement in measurements]


def _round_means(measurement: Measurement, p: int) -> list[float]:
    """Return the seconds of a call in each round, as means over the ranks."""
    return [fmean(seconds) for seconds in timing.in_rounds(measurement.readings["call"], p)]


def _row(measurement: Measurement, p: int, native_s: float) -> Row:
    labels, readings = measurement.labels, measurement.readings

    def rank_means(kind: str) -> list[float]:
        return [fmean(readings[kind][rank::p]) * 1e6 for rank in range(p)]

    alone, median = rank_means("call"), timing.median(_round_means(measurement, p))
    row: Row = {
        "size": size_text(labels["bytes"]), **labels,
        "iterations": labels["calls"] * len(readings["call"]) // p,
        "avg_us": fmean(alone), "min_us": min(alone), "max_us": max(alone),
        "median_us": median * 1e6, "native_over_this": native_s / median}
    if "init" in readings:
        init, compute, wait = (fmean(rank_means(kind)) for kind in ("init", "compute", "wait"))
        row |= {"overall_us": init + compute + wait, "compute_us": compute, "init_us": init,
                # Compute runs in one piece, without MPI_Test, which is also the default of OSU.
                "test_us": 0.0, "wait_us": wait,
                "overlap_percent": timing.overlap_percentage(
                    compute, row["avg_us"], init + compute + wait)}
    return row


def _title(row: Row) -> str:
    calls = "a barrier before each call" if row["barrier"] else "back to back"
    mean = f"mean us of a call, {calls}, and MPI's over ours"
    if row["test"] == "iallreduce":
        mean = f"mean us of a call alone, {calls}, and % hidden behind compute"
    return f"{row['test']} in {MEMORY[row['buffer']]}: {mean}"


def _line(rows: Sequence[Row]) -> Line:
    times = by_name(rows, "avg_us")
    if rows[0]["test"] != "iallreduce":
        return Line(times, over_native(rows, *(name for name in times if name != "MPI")))
    return Line(times, {f"{name} %": value
                        for name, value in by_name(rows, "overlap_percent").items()})


LATENCY = Benchmark("latency", lambda options: len(_cases(options)) * options.rounds,
                    measure, rows, _line, _title)
