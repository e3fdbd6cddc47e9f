"""Measures the speed of optimizer updates on one core, compared with a plain copy."""

import statistics
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence

import numpy as np

from mpiring.provisional import optimizers
from mpiring.tools.bench.timing import by_clock
from mpiring.tools.table import Column, Row

from . import main, report
from .vectors import READINGS, declare_elements, code_kind

# Updates in a step of each method. Each update reads all its vectors, and writes some of them.
METHODS: dict[str, Sequence[optimizers.Update]] = {
    "sgd": (optimizers.sgd.PLAIN,), "momentum": (optimizers.sgd.MOMENTUM,),
    "adamw": (optimizers.adam.ADAM,), "lars": (optimizers.lars.LARS_UPDATE,),
    "lamb": (optimizers.lamb.MOMENTS, optimizers.lamb.APPLY)}
_COLUMNS = [Column("optimizer", -16), Column("bytes", 14, 0), Column("GBps", 14, 1),
            Column("of_a_copy", 14, 2)]


def declare(parser: ArgumentParser) -> None:
    """Declare the options."""
    declare_elements(parser, 16, "weights; more than a cache holds")
    parser.set_defaults(action=lambda options: report(
        "updates", options, _COLUMNS, lambda: (
            f"{options.elements:,} float32, by {code_kind()}; bytes: read and written per weight, "
            f"not counting norms",
            {"way": code_kind(), "elements": options.elements}, _rows(options.elements))))


def _rows(n: int) -> Iterator[Row]:
    """Measure each method's bytes per second, and the median of its ratio to a copy."""
    vectors_of_all = {x for updates in METHODS.values() for update in updates
                      for x in update.vectors}
    weights = {name: np.full(n, 0.5, np.float32) for name in vectors_of_all}
    source, copy = np.ones(n, np.float32), np.zeros(n, np.float32)
    for name, updates in METHODS.items():
        numbers = {number: 0.5 for update in updates for number in update.numbers}
        nbytes = 4 * sum(len(update.vectors) + len(update.stored) for update in updates)

        def step(updates: Sequence[optimizers.Update] = updates,
                 numbers: dict[str, float] = numbers) -> None:
            for update in updates:
                update(weights, numbers)

        step()
        readings = [(by_clock(lambda: np.copyto(copy, source)), by_clock(step))
                    for _ in range(READINGS)]
        yield {"optimizer": name, "bytes": nbytes,
               "GBps": nbytes * n / statistics.median(stepping for _, stepping in readings) / 1e9,
               "of_a_copy": statistics.median(
                   nbytes / stepping / (8 / copying) for copying, stepping in readings)}


if __name__ == "__main__":
    sys.exit(main("updates", declare))
