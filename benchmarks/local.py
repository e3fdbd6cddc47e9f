"""Compares methods that communicate rarely or do not wait, in training on real text."""

import math
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from mpiring import ConfigError
from mpiring.tools.arguments import (
    UsageError, above_zero, checked, listed, names, not_negative, positive,
)
from mpiring.tools.bench.benchmark import Benchmark, Measurement, run
from mpiring.tools.bench.reducers import ALONE, DENSE, METHODS, ratio, reading, refuse_few_steps
from mpiring.tools.bench.world import World
from mpiring.tools.table import Column, Environment, Row
from mpiring.tools.units import parse_time

from . import learning, main
from .learning import Run
from .plot import DRAWINGS

_DESCRIPTION = """\
Trains a transformer on the text of Python's standard library with methods that communicate
rarely or do not wait, from the same weights, and computes the loss on other text.

  alone      each rank trains for itself, without communication
  dense      the mean of gradients in each step, the baseline of all methods
  powersgd   the same mean, approximated by matrices of rank 4
  localsgd   the mean of parameters, every --every steps
  diloco     outer steps with Nesterov's momentum, every --every steps
  streaming  diloco for --fragments of the model in turn, each in flight for --delay steps
  server     each rank pushes gradients and pulls weights, at most --staleness steps old
  pairs      random pairs of ranks exchange weights, and wait after --pair-delay steps

Each method is trained at all --learning-rates with the first of the --seeds. The learning rate
with the lowest final loss is also trained with the other seeds. The loss is computed with the
global parameters. With pairs, it is computed with the mean of the ranks' parameters, which the
ranks then adopt. With server, each rank predicts a share of the texts with the weights that it
pulled last. Ranks wait for each other before each computation of the loss. At the end, all ranks
must have the same parameters.

  exposed    time per step that the slowest rank waited for others, except for losses and the end
  bytes      bytes that dense sends in a step / bytes that this method sends
  on wire    the same ratio by the hosts' own counters
  reached s  seconds of training until the target loss
  faster     seconds of dense until then / seconds of this method"""

NAMES = (ALONE, DENSE, "powersgd", "localsgd", "diloco", "streaming", "server", "pairs")
# Methods whose ranks must answer other ranks while they wait in MPI.
_THREADED = ("server", "pairs")
# Around the best rates of small transformers.
_RATES = {"adamw": [3e-4, 1e-3, 3e-3], "sgd": [0.05, 0.2, 0.8]}


def declare(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.description = _DESCRIPTION
    parser.set_defaults(action=lambda options: run(LOCAL, complete(options)))
    parser.add_argument("--methods", type=names(NAMES), default=list(NAMES), metavar="A,B",
                        help=f"methods, some of {', '.join(NAMES)} (default: all)")
    parser.add_argument("--learning-rates", type=listed(above_zero), metavar="A,B",
                        help="learning rates of all methods (default: " + ", ".join(
                            f"{','.join(f'{rate:g}' for rate in rates)} with {name}"
                            for name, rates in _RATES.items()) + ")")
    parser.add_argument("--every", type=positive, default=20, metavar="STEPS",
                        help="steps between synchronizations of localsgd, diloco, streaming "
                             "(default: 20)")
    parser.add_argument("--fragments", type=positive, default=4, metavar="N",
                        help="number of fragments of streaming (default: 4)")
    parser.add_argument("--delay", type=not_negative, default=4, metavar="STEPS",
                        help="steps during which streaming sends a fragment (default: 4)")
    parser.add_argument("--outer-rate", type=above_zero, default=0.7, metavar="RATE",
                        help="outer learning rate of diloco, streaming (default: 0.7)")
    parser.add_argument("--outer-momentum", type=above_zero, default=0.9, metavar="MOMENTUM",
                        help="outer momentum of diloco, streaming (default: 0.9)")
    parser.add_argument("--outer-reducer", choices=tuple(METHODS), default="int8",
                        help="Reducer of localsgd, diloco, streaming between nodes (default: int8)")
    parser.add_argument("--staleness", type=_staleness, default=4, metavar="STEPS",
                        help="largest age of weights with server, in steps, or none to never wait "
                             "(default: 4)")
    parser.add_argument("--pair-delay", type=not_negative, default=4, metavar="STEPS",
                        help="steps after which pairs wait for a partner (default: 4)")
    parser.add_argument("--straggler", type=_straggler, metavar="TIME,SHARE",
                        help="time that each rank sleeps, and share of the steps in which it "
                             "sleeps, as 30ms,0.25")
    learning.declare_learning(parser)


def _staleness(text: str) -> int | None:
    return None if text == "none" else not_negative(text)


def _straggler(text: str) -> tuple[float, float]:
    """Parse seconds, and a share of steps."""
    seconds, _, share = text.partition(",")
    try:
        value = float(share)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise ArgumentTypeError(f"{text!r}: expected a time and a share of the steps, as "
                                f"30ms,0.25")
    return checked(parse_time)(seconds), value


def complete(options: Namespace) -> Namespace:
    """Set options whose defaults depend on others.

    Raises:
        UsageError: No steps are left to measure, or options of outer steps contradict each other.
    """
    refuse_few_steps(options)
    if "streaming" in options.methods and (
            options.fragments > options.every or options.delay >= options.every):
        raise UsageError(f"--fragments {options.fragments} --delay {options.delay}: expected at "
                         f"most --every {options.every} fragments, and a shorter delay")
    if options.validate_every is None:
        options.validate_every = max(1, options.steps // 20)
    # Between two computations of the loss, only the method itself waits for other ranks.
    options.stretch = options.steps
    options.learning_rates = options.learning_rates or _RATES[options.optimizer]
    return options


def measure(world: World, options: Namespace) -> Iterator[list[Measurement]]:
    """Train with all methods; see `learning.measure`.

    Raises:
        ConfigError: A method needs a background thread, and MPI allows none.
    """
    _require_thread(world, options)

    def join(name: str, module: Any, optimizer: Any, rehearsal: bool) -> Any:
        from .methods import create_method
        return create_method(name, module, world.comm, optimizer, options)

    yield from learning.measure(world, options, "method", _runs(options), join,
                                partial(_pauses, world, options), straggler=options.straggler)


def _require_thread(world: World, options: Namespace) -> None:
    asked = [name for name in options.methods if name in _THREADED]
    if asked and world.comm.config.progress == "inline":
        raise ConfigError(
            f"{' and '.join(asked)}: without a background thread (thread level "
            f"{world.thread_level}, or MPIRING_PROGRESS=inline) a rank that waits for others to "
            f"be timed would answer nobody; leave them out with --methods")


def _runs(options: Namespace) -> list[Run]:
    """Return the trainings: all rates with the first seed, the best rate with the other seeds."""
    first, *others = options.seeds
    grid = [Run(name, first, lambda _, rate=rate: rate)  # type: ignore[misc]
            for rate in options.learning_rates for name in options.methods
            if name != ALONE or rate == options.learning_rates[0]]
    return grid + [Run(name, seed, partial(_best_rate, name)) for seed in others
                   for name in options.methods if name != ALONE]


def _pauses(world: World, options: Namespace, seed: int) -> Callable[[], object]:
    """Return a function that sleeps in some steps of this rank, the same for each method."""
    if options.straggler is None:
        return lambda: None
    seconds, share = options.straggler
    rng = np.random.default_rng([seed, world.rank, world.size])
    return lambda: time.sleep(seconds if rng.random() < share else 0.0)


def _best_rate(name: str, measurements: Sequence[Measurement]) -> float:
    """Return the learning rate with which a method has the lowest loss with the first seed."""
    first = [training for training in measurements if training.labels["method"] == name
             and training.labels["seed"] == measurements[0].labels["seed"]]
    return float(min(first, key=_final_loss).labels["learning_rate"])


def _final_loss(training: Measurement) -> float:
    bits = training.readings["bits"]
    return bits[-1] if bits and math.isfinite(bits[-1]) else math.inf


def rows(measurements: Sequence[Measurement], about: Environment, options: Namespace) -> list[Row]:
    """Return a row for each method at its best learning rate, with its losses at all rates."""
    trainings: dict[str, list[Measurement]] = {}
    for name in dict.fromkeys(training.labels["method"] for training in measurements):
        best = _best_rate(name, measurements)
        trainings[name] = [training for training in measurements
                           if training.labels["method"] == name
                           and training.labels["learning_rate"] == best]
    dense = trainings.get(DENSE, [])

    def costs(runs: Sequence[Measurement]) -> Row:
        sent, on_wire = reading(runs, "sent_bytes"), reading(runs, "host_bytes")
        return {**_speeds(runs, trainings, about, options.settled),
                "fewer_bytes": ratio(reading(dense, "sent_bytes"), sent),
                "wire_ratio": ratio(reading(dense, "host_bytes"), on_wire),
                "sent_bytes_per_step": sent, "host_bytes_per_step": on_wire}

    return [{**row, **_grid(measurements, row["method"])}
            for row in learning.rows(trainings, options, costs)]


def _speeds(runs: Sequence[Measurement], trainings: Mapping[str, Sequence[Measurement]],
            about: Environment, first: int) -> Row:
    """Return the means of settled steps; medians would miss steps in which ranks communicate."""
    def mean_s(runs: Sequence[Measurement]) -> float:
        seconds = [value for run in runs for value in run.readings["step"][first:]]
        return fmean(seconds) if seconds else math.nan

    exposed_s, step_s = reading(runs, "exposed_s"), mean_s(runs)
    return {
        "steps": min(len(run.readings["step"]) for run in runs),
        "training_s": fmean([sum(run.readings["step"]) for run in runs]),
        "step_ms": step_s * 1e3,
        "samples_per_s": about["ranks"] * runs[0].labels["batch"] / step_s,
        "speedup": mean_s(trainings.get(DENSE, [])) / step_s,
        "over_alone": step_s / mean_s(trainings.get(ALONE, [])),
        "exposed_ms": exposed_s * 1e3, "exposed_percent": 100 * exposed_s / step_s}


def _grid(measurements: Sequence[Measurement], name: str) -> Row:
    """Return the learning rates that were tried, with seeds and losses at the end."""
    tried = [training for training in measurements
             if training.labels["method"] == name and training.readings["bits"]]
    return {"grid_rates": [training.labels["learning_rate"] for training in tried],
            "grid_seeds": [training.labels["seed"] for training in tried],
            "grid_bits": [training.readings["bits"][-1] for training in tried]}


_COLUMNS = [
    Column("method", -9), Column("learning_rate", 6, 1, "rate"), Column("steps", 5, 1),
    Column("step_ms", 8, 4), Column("samples_per_s", 9, 4, "samples/s"),
    Column("speedup", 7, 3, "× dense"), Column("over_alone", 6, 3, "/alone"),
    Column("exposed_ms", 10, 3), Column("exposed_percent", 9, 3, "exposed %"),
    Column("fewer_bytes", 6, 3, "bytes"), Column("wire_ratio", 7, 3, "on wire"),
    Column("bits_per_byte", 9, 4, "bits/byte"), Column("bits_over_dense", 8, 2, "- dense"),
    Column("spread_of_seeds", 6, 2, "spread"), Column("target_bits", 6, 4, "target"),
    Column("seconds_to_target", 9, 4, "reached s"), Column("times_faster", 6, 3, "faster")]
LOCAL = Benchmark("local", lambda options: len(_runs(options)), measure, rows, _COLUMNS,
                  drawings=DRAWINGS)


if __name__ == "__main__":
    sys.exit(main("local", declare))
