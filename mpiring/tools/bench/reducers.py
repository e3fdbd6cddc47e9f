"""Measures what Reducers save and cost, by training a model on real text with each of them."""

import logging
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError
from ...reducers import Cast, ErrorFeedback, Int8, OneBit, PowerSGD, Reducer, TopK
from ..arguments import above_zero, names, not_negative
from ..files import Environment, Row
from ..table import Column
from . import learning, timing
from .benchmark import Benchmark, Measurement, run
from .learning import ALONE, DENSE, LEARNING_RATES, UNSETTLED_STEPS, mean, ratio, reading
from .world import World

if TYPE_CHECKING:
    from .torch_training import TrainingMethod

_DESCRIPTION = """\
Trains a transformer on the text of Python's standard library, from the same weights, with
each way to average gradients, and looks at the loss on other text.

  alone      each rank for itself: the compute only
  dense      plain means, of which all others are measured
  fp16, bf16, int8, onebit, topk, powersgd, powersgd4
             those of mpiring.reducers; int8 with error feedback, topk sends 0.1 %,
             powersgd has rank 2, powersgd4 rank 4

Between nodes only is compressed: it takes several hosts, or MPIRING_SHARED_MEMORY=0.

  compressed  bytes of plain means / bytes sent      reached s  training until the target loss
  on wire     the same, by the hosts' own counters   faster     dense's time until then / this one
  encode, wire, decode  in a step, of the slowest rank; buckets overlap, and hide behind compute"""

_log = logging.getLogger("mpiring")

# Each is made anew for each training, from the number of steps in which it may begin gently.
METHODS: Mapping[str, Callable[[int], Reducer | None]] = {
    DENSE: lambda warmup: None,
    "fp16": lambda warmup: Cast("float16"),
    "bf16": lambda warmup: Cast("bfloat16"),
    "int8": lambda warmup: ErrorFeedback(Int8()),
    "onebit": lambda warmup: OneBit(warmup_steps=warmup),
    "topk": lambda warmup: TopK(density=0.001, warmup_steps=warmup),
    "powersgd": lambda warmup: PowerSGD(rank=2, start_step=warmup),
    "powersgd4": lambda warmup: PowerSGD(rank=4, start_step=warmup),
}
NAMES = (ALONE, *METHODS)


def declare(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.description = _DESCRIPTION
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.set_defaults(action=lambda options: run(REDUCERS, complete(options)), stretch=1)
    parser.add_argument("--reducers", type=names(NAMES), default=list(NAMES), metavar="A,B",
                        help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--learning-rate", type=above_zero, metavar="RATE",
                        help="default: " + ", ".join(
                            f"{rate:g} with {name}" for name, rate in LEARNING_RATES.items()))
    parser.add_argument("--warmup-steps", type=not_negative, metavar="N",
                        help="for reducers that begin gently; not timed with any; "
                             "default: a tenth of the steps")
    learning.declare(parser)


def complete(options: Namespace) -> Namespace:
    """Give the options that depend on others their defaults.

    Raises:
        ConfigError: No steps are left to be measured.
    """
    if options.warmup_steps is None:
        options.warmup_steps = options.steps // 10
    if options.validate_every is None:
        options.validate_every = max(1, options.steps // 20)
    if options.learning_rate is None:
        options.learning_rate = LEARNING_RATES[options.optimizer]
    # From here on all methods compress, and nothing happens for the first time.
    options.settled = max(options.warmup_steps, UNSETTLED_STEPS)
    if options.settled >= options.steps:
        raise ConfigError(f"--steps {options.steps} is too few: the first {options.settled} are "
                          f"not measured, with --warmup-steps {options.warmup_steps}")
    return options


def measure(world: World, options: Namespace) -> Iterator[list[Measurement]]:
    """Train with all methods, seed by seed; see `learning.measure`."""
    _warn_where_nothing_is_compressed(world)

    def join(name: str, module: Any, optimizer: Any, rehearsal: bool) -> "TrainingMethod":
        from .torch_training import MeanGradients, TrainingMethod
        if name == ALONE:
            return TrainingMethod(module, optimizer)
        reducer = METHODS[name](0 if rehearsal else options.warmup_steps)
        return MeanGradients(module, world.comm, optimizer, reducer)

    runs = [learning.Run(name, seed, lambda _: options.learning_rate)
            for seed in options.seeds for name in options.reducers]
    yield from learning.measure(world, options, "reducer", runs, join)


def _cases(options: Namespace) -> int:
    return len(options.seeds) * len(options.reducers)


def _warn_where_nothing_is_compressed(world: World) -> None:
    # Not comm.num_nodes: without shared memory, each rank of a host is a node.
    if len(world.comm.memory_groups) == 1 and world.rank == 0:
        _log.warning(
            "all %d ranks share one node's memory, where nothing is sent, and NOTHING IS "
            "COMPRESSED: all methods are one. Take several hosts, `python -m mpiring lab run "
            "--hosts 2 -- ...`, or set MPIRING_SHARED_MEMORY=0, which makes each rank a node",
            world.size)


def rows(measurements: Sequence[Measurement], about: Environment, options: Namespace) -> list[Row]:
    """Return a row for each method, next to the plain mean and the compute alone."""
    trainings: dict[str, list[Measurement]] = {}
    for training in measurements:
        trainings.setdefault(training.labels["reducer"], []).append(training)
    dense_bytes = reading(trainings.get(DENSE, []), "host_bytes")

    def costs(runs: Sequence[Measurement]) -> Row:
        on_wire = reading(runs, "host_bytes")
        return {
            **_times(runs, trainings, options.settled),
            "compression_ratio": ratio(reading(runs, "dense_bytes"), reading(runs, "sent_bytes")),
            "wire_ratio": ratio(dense_bytes, on_wire), "wire_MiB": on_wire / 2 ** 20,
            **{f"{name}_ms": reading(runs, f"{name}_s") * 1e3
               for name in ("encode", "wire", "decode")}}

    return learning.rows(trainings, options, costs)


def _times(runs: Sequence[Measurement], trainings: Mapping[str, Sequence[Measurement]],
           first: int) -> Row:
    """Return the times of steps. Ratios are medians over seeds, which are close in time.

    Args:
        first: Number of the first step that is settled.
    """
    def over(other: str) -> float:
        return timing.median([
            timing.median(run.readings["step"][first:])
            / timing.median(reference.readings["step"][first:])
            for run, reference in zip(runs, trainings.get(other, []))
            if run.readings["step"][first:] and reference.readings["step"][first:]])

    seconds = [value for run in runs for value in run.readings["step"][first:]]
    return {
        "steps": min(len(run.readings["step"]) for run in runs),
        "training_s": mean([sum(run.readings["step"]) for run in runs]),
        "median_ms": timing.median(seconds) * 1e3, "p95_ms": timing.p95(seconds) * 1e3,
        "over_dense": over(DENSE), "over_alone": over(ALONE)}


_COLUMNS = [
    Column("reducer", -9), Column("steps", 5, 1), Column("median_ms", 9, 4),
    Column("p95_ms", 7, 4), Column("over_dense", 6, 3, "/dense"),
    Column("over_alone", 6, 3, "/alone"), Column("compression_ratio", 10, 3, "compressed"),
    Column("wire_ratio", 7, 3, "on wire"), Column("encode_ms", 9, 3), Column("wire_ms", 7, 3),
    Column("decode_ms", 9, 3), Column("bits_per_byte", 9, 4, "bits/byte"),
    Column("bits_over_dense", 8, 2, "- dense"), Column("spread_of_seeds", 6, 2, "spread"),
    Column("target_bits", 6, 4, "target"), Column("seconds_to_target", 9, 4, "reached s"),
    Column("times_faster", 6, 3, "faster")]
REDUCERS = Benchmark("reducers", _cases, measure, rows, _COLUMNS)
