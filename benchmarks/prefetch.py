"""Measures the cost of loading the data of PyTorch training steps and moving it to the device."""

import itertools
import random
import sys
import time
import zlib
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpiring.data import prefetch
from mpiring.tools.arguments import UsageError, above_zero, names, positive
from mpiring.tools.bench import peers, timing
from mpiring.tools.bench.benchmark import (
    Benchmark, Measurement, declare_device, declare_models, declare_turns, run, with_case,
)
from mpiring.tools.bench.world import World
from mpiring.tools.table import Column, Environment, Row

from . import main
from .plot import DRAWINGS

if TYPE_CHECKING:
    from mpiring.tools.bench import torch_training

RESIDENT, PREFETCHED, COPIED = "data on the device", "mpiring.data.prefetch", "copied in the step"
LOADED = "loaded in the step"
# Number of different batches, which the loader repeats.
_BATCHES = 8
# Number of steps that determine the time of the loader.
_TRIALS = 8


# Sizes of a piece of work, each about a millisecond or less; realistic for loaders.
_BYTES = 1 << 18
_TO_SORT = 1 << 16
_TO_ADD = 20_000
_PIECE_TRIALS = 20


def _zlib_work() -> timing.Action:
    """Decompress data with as many kinds of bytes as text, without the GIL."""
    text = np.random.default_rng(0).integers(0, 64, _BYTES, dtype=np.uint8)
    packed = zlib.compress(text.tobytes())
    return lambda: zlib.decompress(packed)


def _numpy_work() -> timing.Action:
    """Sort with NumPy, without the GIL."""
    values = np.random.default_rng(0).random(_TO_SORT, np.float32)
    return lambda: np.sort(values)


_PIECES: dict[str, Callable[[], timing.Action]] = {
    "zlib": _zlib_work, "numpy": _numpy_work, "python": lambda: lambda: sum(iter(range(_TO_ADD)))}
# "sleep" waits, as for a disk; "python" holds the GIL.
WORK = ("sleep", *_PIECES)


def work_for(kind: str, seconds: float) -> timing.Action:
    """Return a function that takes a given time on a separate core.

    Args:
        kind: Name in WORK.
        seconds: Time that it takes.
    """
    if kind == "sleep":
        return lambda: time.sleep(seconds)
    piece = _PIECES[kind]()
    pieces = round(seconds / timing.median([timing.by_clock(piece) for _ in range(_PIECE_TRIALS)]))

    def work() -> None:
        for _ in range(pieces):
            piece()

    return work


def with_work(batches: Iterable[Any], work: timing.Action) -> Iterator[Any]:
    """Yield each batch after some work."""
    for batch in batches:
        work()
        yield batch


def declare(parser: ArgumentParser) -> None:
    """Declare the options."""
    declare_device(parser)
    declare_models(parser)
    parser.add_argument("--batch", type=positive,
                        help="samples per rank (default: a number that depends on the model)")
    parser.add_argument("--calls", type=positive, default=20, help="steps per round (default: 20)")
    parser.add_argument("--depth", type=positive, default=2,
                        help="batches that are fetched ahead (default: 2)")
    parser.add_argument("--loader", type=above_zero, metavar="SHARE",
                        help="time of the loader's work per batch, as a share of a step's time "
                             "(default: no work)")
    parser.add_argument("--work", type=names(WORK), metavar="A,B",
                        help=f"kinds of the loader's work, some of {', '.join(WORK)} (python holds "
                             f"the GIL) (default: zlib)")
    parser.add_argument("--switch-interval", type=above_zero, metavar="SECONDS",
                        help="time after which a thread releases the GIL for others (default: "
                             "Python's, 0.005)")
    declare_turns(parser)
    parser.set_defaults(action=_run)


def _run(options: Namespace) -> int:
    """Determine the loader's work, and measure.

    Raises:
        UsageError: The kind of work is given, but not its time.
    """
    if options.work and not options.loader:
        raise UsageError("--work needs --loader SHARE: so much of a step's time, as 0.8")
    sys.setswitchinterval(options.switch_interval or sys.getswitchinterval())
    # "-" means no work.
    options.work = (options.work or ["zlib"]) if options.loader else ["-"]
    return run(PREFETCH, options)


def measure(world: World, options: Namespace) -> Iterator[list[Measurement]]:
    """Time steps without communication, case after case; yield after each round.

    Raises:
        MissingDependencyError: There is no PyTorch, or it finds no GPU.

    Collective: yes. Blocking: yes.
    """
    world.call_on_all(peers.refuse_missing_torch)
    from mpiring.tools.bench import torch_training
    device = torch_training.device_named(world, options.device)
    for kind, parameters in itertools.product(options.models, options.parameters):
        x, y = torch_training.batch_of(kind, options.batch, 1 + world.rank)
        training = torch_training.training_of(
            torch_training.NOBODY, kind, torch_training.width_for(kind, parameters),
            torch_training.RECIPES["sgd"], (x.to(device.torch), y.to(device.torch)))
        batches = [torch_training.batch_of(kind, options.batch, 1 << 20 | number)
                   for number in range(_BATCHES)]
        labels = {"model": kind, "parameters": training.parameter_count, "batch": len(x),
                  "batch_bytes": sum(x.numel() * x.element_size() for x in batches[0]),
                  "calls": options.calls, "device": str(device.torch),
                  "switch_interval_s": sys.getswitchinterval(),
                  "thread_level": world.thread_level}
        for load in options.work:
            work = _work(world, options, load, training, device)
            alone_s = [timing.by_clock(work) for _ in range(_TRIALS)]
            with_loader = iter(prefetch(with_work(itertools.cycle(batches), work),
                                        device.torch, depth=options.depth))
            copied = with_work(itertools.cycle(batches), work)
            actions: dict[str, timing.Action] = {
                RESIDENT: training.step,
                PREFETCHED: partial(_train_on_next, training, with_loader),
                LOADED if options.loader else COPIED: partial(_train_on_next, training, (
                    [x.to(device.torch) for x in batch] for batch in copied))}
            readings = yield from timing.in_turns(options, random.Random(options.seed), {
                name: partial(timing.timed_steps, world, options, {"step": action},
                              device.stopwatch)
                for name, action in actions.items()})
            with_loader.close()
            yield [Measurement({**labels, "loader": load, "contender": name},
                               {**times, "loader": alone_s})
                   for name, times in readings.items()]


def _train_on_next(training: "torch_training.Training", batches: Iterator[Any]) -> None:
    training.learn(*next(batches))


def _work(world: World, options: Namespace, load: str, training: "torch_training.Training",
          device: "torch_training.ModelDevice") -> timing.Action:
    """Return the work of the loader for a batch.

    Collective: yes. Blocking: yes.
    """
    if load == "-":
        return lambda: None
    training.step()
    step_s = timing.timed(world, training.step, _TRIALS, stopwatch=device.stopwatch)
    return work_for(load, options.loader * timing.median(step_s))


def rows(measurements: Sequence[Measurement], about: Environment, options: Namespace) -> list[Row]:
    """Return a row for each method, compared with steps whose data is already on the device.

    Ratios are those of medians.
    """
    table = []
    keys = ("model", "parameters", "loader", "thread_level")
    for measurement, case in with_case(measurements, *keys):
        labels, seconds = measurement.labels, measurement.readings["step"]
        ratio = timing.over(*(timing.in_rounds(each, labels["calls"])
                              for each in (seconds, case[RESIDENT].readings["step"])))
        table.append({**labels, **timing.summary(seconds),
                      "loader_ms": timing.median(measurement.readings["loader"]) * 1e3,
                      **ratio.of("over_resident"),
                      "efficiency_percent": 100 / ratio.value})
    return table


_COLUMNS = [
    Column("model", -11), Column("parameters", 10), Column("batch_bytes", 11),
    Column("loader", -6), Column("loader_ms", 9, 3), Column("contender", -22, title="data"),
    Column("thread_level", -10, title="threads"), Column("median_ms", 9, 4), Column("p95_ms", 8, 4),
    Column("over_resident", 10, 4, "/on device")]
PREFETCH = Benchmark(
    "prefetch", lambda options: (
        len(options.models) * len(options.parameters) * len(options.work) * options.rounds),
    measure, rows, _COLUMNS, drawings=DRAWINGS)


if __name__ == "__main__":
    sys.exit(main("prefetch", declare))
