"""Measures the costs of Reducers, and the loss with them, in training on real text."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from typing import Any

from mpiring.tools.arguments import UsageError, above_zero, not_negative
from mpiring.tools.bench.benchmark import Benchmark, Measurement, run
from mpiring.tools.bench.reducers import (
    ALONE, COLUMNS, METHODS, METHODS_HELP, UNSETTLED_STEPS, by_method, costs, declare_reducers,
    warn_if_nothing_is_compressed,
)
from mpiring.tools.bench.world import World
from mpiring.tools.table import Column, Environment, Row

from . import learning, main
from .plot import DRAWINGS

_DESCRIPTION = f"""\
Trains a transformer on the text of Python's standard library with each method of averaging
gradients, from the same weights, and computes the loss on other text.

{METHODS_HELP}
  compressed  bytes of plain means / bytes sent     reached s  training until the target loss
  on wire     the same, by the hosts' counters      faster     dense's time until then / this one
  encode, wire, decode  time in a step on the slowest rank; overlaps between buckets and with
                        computation"""

_LEARNING_RATES = {"adamw": 3e-4, "sgd": 0.05}


def declare(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.description = _DESCRIPTION
    parser.set_defaults(action=lambda options: run(REDUCERS, complete(options)), stretch=1)
    declare_reducers(parser)
    parser.add_argument("--learning-rate", type=above_zero, metavar="RATE",
                        help="learning rate (default: " + ", ".join(
                            f"{rate:g} with {name}"
                            for name, rate in _LEARNING_RATES.items()) + ")")
    parser.add_argument("--warmup-steps", type=not_negative, metavar="N",
                        help="steps of the reducers' warm-up, not timed with any reducer "
                             "(default: a tenth of the steps)")
    learning.declare_learning(parser)


def complete(options: Namespace) -> Namespace:
    """Set options whose defaults depend on others.

    Raises:
        UsageError: No steps are left to measure.
    """
    if options.warmup_steps is None:
        options.warmup_steps = options.steps // 10
    if options.validate_every is None:
        options.validate_every = max(1, options.steps // 20)
    if options.learning_rate is None:
        options.learning_rate = _LEARNING_RATES[options.optimizer]
    # From this step on all methods compress, and all code is warm.
    options.settled = max(options.warmup_steps, UNSETTLED_STEPS)
    if options.settled >= options.steps:
        raise UsageError(f"--steps {options.steps} is too few: the first {options.settled} are "
                         f"not measured, with --warmup-steps {options.warmup_steps}")
    return options


def measure(world: World, options: Namespace) -> Iterator[list[Measurement]]:
    """Train with all methods, seed by seed; see `learning.measure`."""
    warn_if_nothing_is_compressed(world)

    def join(name: str, module: Any, optimizer: Any, rehearsal: bool) -> Any:
        from .methods import MeanGradients, Method
        if name == ALONE:
            return Method(module, optimizer)
        reducer = METHODS[name](0 if rehearsal else options.warmup_steps)
        return MeanGradients(module, world.comm, optimizer, reducer)

    runs = [learning.Run(name, seed, lambda _: options.learning_rate)
            for seed in options.seeds for name in options.reducers]
    yield from learning.measure(world, options, "reducer", runs, join)


def rows(measurements: Sequence[Measurement], about: Environment, options: Namespace) -> list[Row]:
    """Return a row for each method, compared with the plain mean and with computation alone."""
    trainings = by_method(measurements)
    return learning.rows(trainings, options, lambda runs: costs(runs, trainings, options.settled))


_COLUMNS = [
    *COLUMNS, Column("bits_per_byte", 9, 4, "bits/byte"),
    Column("bits_over_dense", 8, 2, "- dense"), Column("spread_of_seeds", 6, 2, "spread"),
    Column("target_bits", 6, 4, "target"), Column("seconds_to_target", 9, 4, "reached s"),
    Column("times_faster", 6, 3, "faster")]
REDUCERS = Benchmark("reducers", lambda options: len(options.seeds) * len(options.reducers),
                     measure, rows, _COLUMNS, drawings=DRAWINGS)


if __name__ == "__main__":
    sys.exit(main("reducers", declare))
