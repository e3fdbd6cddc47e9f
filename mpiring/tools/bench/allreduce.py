"""Measures blocking allreduces of mpiring, MPI and the peers, size by size."""

import itertools
import math
import random
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from ... import ConfigError
from ...provisional import Array, operations
from ..arguments import above_zero, checked, names
from ..table import Environment, Row
from ..units import parse_sizes, size_text
from . import inputs, timing
from .benchmark import (
    LEVELS, Benchmark, Measurement, declare_device, declare_link, declare_turns, least_by_case,
    run,
)
from .contenders import (
    LIMITS, REFERENCES, SUMMING, Call, Contender, chosen, declare_contenders, memory_copy,
    settle_contenders,
)
from .matrix import Line, by_name, over_native
from .on_device import GpuArrays
from .world import World

MEMORY = {"empty": "comm.empty", "private": "private memory"}
BUFFERS = tuple(MEMORY)
_CASE = ("bytes", "dtype", "buffer")


def declare(parser: ArgumentParser) -> None:
    """Declare the options."""
    declare_device(parser)
    parser.add_argument("--sizes", type=checked(parse_sizes), default=parse_sizes("8..64M"),
                        help="sizes in bytes, a list as 8,1K,64M, or a range in factors of 4 "
                             "(default: 8..64M)")
    parser.add_argument("--algorithms", type=names(operations.NAMES), metavar="A,B",
                        help=f"mpiring algorithms to measure in addition to auto (default: "
                             f"{','.join(operations.NAMES)})")
    parser.add_argument("--buffers", type=names(BUFFERS), default=["empty"], metavar="A,B",
                        help="kinds of memory, empty (comm.empty) or private (numpy.empty). On a "
                             "GPU, ranks access each other's empty arrays directly, and private "
                             "arrays through the host (default: empty)")
    parser.add_argument("--dtypes", type=names(inputs.DTYPES), default=["float32"], metavar="A,B",
                        help=f"dtypes, some of {', '.join(inputs.DTYPES)} (default: float32)")
    parser.add_argument("--budget", type=above_zero, default=0.3, metavar="SECONDS",
                        help="seconds per contender and case, over all rounds (default: 0.3)")
    declare_link(parser)
    declare_turns(parser, LEVELS)
    declare_contenders(parser)
    parser.set_defaults(action=_run)


def _run(options: Namespace) -> int:
    settle_contenders(options, SUMMING, options.device)
    return run(ALLREDUCE, options)


def _cases(options: Namespace) -> list[tuple[str, str, int]]:
    return list(itertools.product(options.dtypes, options.buffers, options.sizes))


def measure(world: World, options: Namespace) -> Iterator[list[Measurement]]:
    """Measure all contenders on an array of each dtype, kind of buffer and size."""
    arrays = GpuArrays(world) if options.device == "cuda" else HostArrays(world)
    contenders = arrays.contenders(options)
    rng = random.Random(options.seed)
    for name, buffer, nbytes in _cases(options):
        dtype = inputs.dtype_of(name)
        length = max(1, nbytes // dtype.itemsize)
        x = arrays.array(buffer, length, dtype)
        labels = {"bytes": x.nbytes, "dtype": name, "buffer": buffer, "device": str(arrays.device),
                  "thread_level": world.thread_level}
        readings = yield from timing.in_turns(
            options, rng, _subjects(world, contenders, x, options, arrays.stopwatch))
        yield [Measurement({**labels, "contender": contender.name},
                           readings.get(contender.name, {"call": []})) for contender in contenders]


class HostArrays:
    """Arrays in host memory, and the contenders for them."""

    device = "cpu"
    stopwatch = staticmethod(timing.by_clock)

    def __init__(self, world: World) -> None:
        self._world = world

    def array(self, buffer: str, length: int, dtype: np.dtype[Any]) -> Array:
        """Return an array: private, or shared with the node's ranks if `buffer` is "empty"."""
        if buffer == "empty":
            x: Array = self._world.comm.empty(length, dtype)
            return x
        return np.empty(length, dtype)

    def contenders(self, options: Namespace) -> list[Contender]:
        """Return the requested contenders, and a contender that shows the limit on one node."""
        # Compile before anything is measured.
        self._world.comm.prepare(map(inputs.dtype_of, options.dtypes))
        contenders = chosen(self._world, options.contenders, options.algorithms, options.interface)
        if self._world.comm.num_nodes == 1:
            contenders.append(memory_copy())
        return contenders


def _subjects(world: World, contenders: Sequence[Contender], x: Array, options: Namespace,
              stopwatch: timing.Stopwatch) -> dict[str, Callable[[], timing.Readings]]:
    """Check the contenders that can sum `x`; return for each a function that times its calls."""
    def timed(call: Call, times: int) -> timing.Readings:
        return {"call": timing.timed(
            world, call, times, **inputs.series(world, x, call), stopwatch=stopwatch)}

    calls = {contender.name: call for contender in contenders
             if (call := _checked(world, contender, x)) is not None}
    return {name: partial(timed, call, timing.calls_within(
        options.budget / options.rounds, timing.median(timed(call, 3)["call"])))
        for name, call in calls.items()}


def _checked(world: World, contender: Contender, x: Array) -> Call | None:
    """Return the contender's call on `x`, checked once; None if it cannot sum `x`."""
    inputs.fill(x, world.rank, world.size)
    try:
        call = contender.blocking(x)
        call()
    except ConfigError:
        return None
    if contender.sums:
        inputs.check(world, x, contender.name)
    return call


def rows(measurements: Sequence[Measurement], about: Environment, options: Namespace) -> list[Row]:
    """Return a row for each measurement, compared with MPI's own call, case by case.

    On GPUs, the reference is the naive use of MPI. With several thread levels, it is the faster of
    MPI's calls.
    """
    def median(measurement: Measurement) -> float:
        return timing.median(measurement.readings["call"])

    cases = list(dict.fromkeys(measurement.case(*_CASE) for measurement in measurements))
    references = least_by_case((measurement for measurement in measurements
                                if measurement.labels["contender"] in REFERENCES), _CASE, median)
    limits = least_by_case((
        measurement for measurement in measurements if measurement.labels["buffer"]
        in LIMITS.get(measurement.labels["contender"], ())), _CASE, median)
    return [_row(measurement, about, options, references.get(case, math.nan),
                 limits.get(case, math.nan))
            for case in cases for measurement in measurements if measurement.case(*_CASE) == case]


def _row(measurement: Measurement, about: Environment, options: Namespace, reference_s: float,
         copy_s: float) -> Row:
    labels, seconds = measurement.labels, measurement.readings["call"]
    median, nbytes, p = timing.median(seconds), labels["bytes"], about["ranks"]
    algbw, limit_s = nbytes / median / 1e9, copy_s
    if about["nodes"] > 1 and options.link_rate is not None:
        limit_s = timing.wire_seconds(nbytes, about["nodes"], options.link_rate * options.goodput)
    return {
        "size": size_text(nbytes),
        **labels,
        "calls": len(seconds),
        "median_us": median * 1e6,
        "p95_us": timing.p95(seconds) * 1e6,
        "min_us": min(seconds, default=math.nan) * 1e6,
        "max_us": max(seconds, default=math.nan) * 1e6,
        "algbw_GBps": algbw,
        "busbw_GBps": algbw * 2 * (p - 1) / p,
        "native_over_this": reference_s / median,
        "limit_us": limit_s * 1e6,
        "this_over_limit": median / limit_s,
    }


def _title(row: Row) -> str:
    memory = MEMORY[row["buffer"]]
    return f"{row['dtype']} in {memory}: median us of a call, and MPI's over auto's"


def _line(rows: Sequence[Row]) -> Line:
    """Return the times of contenders, then the limits."""
    sums = [row for row in rows if row["contender"] not in LIMITS]
    limits = by_name([row for row in rows if row["contender"] in LIMITS
                      and row["buffer"] in LIMITS[row["contender"]]], "median_us")
    if not limits:
        limits = {"limit": rows[0]["limit_us"]}
    return Line(by_name(sums, "median_us"), limits | over_native(rows, "auto"))


ALLREDUCE = Benchmark("allreduce", lambda options: len(_cases(options)) * options.rounds,
                      measure, rows, _line, _title)
