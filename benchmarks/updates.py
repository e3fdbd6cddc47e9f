"""Measures how fast optimisers update weights on one core, beside a plain copy."""

import importlib.util
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from mpiring.optim import adam, lamb, lars, sgd
from mpiring.optim.update import Update
from mpiring.tools.arguments import checked
from mpiring.tools.files import Row, machine, refuse_unwritable, write_json
from mpiring.tools.table import Column, head, line
from mpiring.tools.units import parse_count

from . import main

# What a step of each does with memory: updates, of which each vector is read, or read and written.
METHODS: dict[str, Sequence[Update]] = {
    "sgd": (sgd.PLAIN,), "momentum": (sgd.MOMENTUM,), "adamw": (adam.ADAM,),
    "lars": (lars.LARS_UPDATE,), "lamb": (lamb.MOMENTS, lamb.APPLY)}
_COLUMNS = [Column("optimizer", -16), Column("bytes", 14, 0), Column("GBps", 14, 1),
            Column("of_a_copy", 14, 2)]
_READINGS = 15


def declare(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--elements", type=checked(parse_count), default=16_000_000,
                        help="weights; more than a cache holds; default: 16M")
    parser.add_argument("--json", metavar="FILE", help="write results; -: to stdout alone")
    parser.set_defaults(action=run)


def run(options: Namespace) -> int:
    """Print the table, and write it if asked to; needs no MPI.

    Raises:
        ConfigError: The file cannot be written.
    """
    if options.json:
        refuse_unwritable(options.json)
    way = "numba's code" if importlib.util.find_spec("numba") else "NumPy, for want of numba"
    print(f"# {options.elements:,} float32, by {way}; bytes: read and written per weight, not "
          f"counting norms\n{head(_COLUMNS)}")
    rows = []
    for row in _rows(options.elements):
        rows.append(row)
        print(line(row, _COLUMNS), flush=True)
    if options.json:
        write_json(options.json, "updates", {**machine(), "way": way,
                                             "elements": options.elements}, rows)
    return 0


def _rows(n: int) -> Iterator[Row]:
    """Measure each method's bytes per second, and the median of its ratio to a copy's."""
    vectors = {name: np.full(n, 0.5, np.float32) for name in "wgmvb"}
    source, copy = np.ones(n, np.float32), np.zeros(n, np.float32)
    for name, updates in METHODS.items():
        numbers = {number: 0.5 for update in updates for number in update.numbers}
        nbytes = 4 * sum(len(update.vectors) + len(update.stored) for update in updates)

        def step(updates: Sequence[Update] = updates, numbers: dict[str, float] = numbers) -> None:
            for update in updates:
                update(vectors, numbers)

        step()
        readings = [(_seconds(lambda: np.copyto(copy, source)), _seconds(step))
                    for _ in range(_READINGS)]
        yield {"optimizer": name, "bytes": nbytes,
               "GBps": nbytes * n / statistics.median(mine for _, mine in readings) / 1e9,
               "of_a_copy": statistics.median(
                   nbytes / mine / (8 / copying) for copying, mine in readings)}


def _seconds(action: Callable[[], None]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main("updates", declare))
