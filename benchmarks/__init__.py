"""Studies of methods, which are not in the wheel: `python -m benchmarks.NAME` in a checkout."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mpiring.tools import output
from mpiring.tools.arguments import Parser
from mpiring.tools.results import machine, write_json
from mpiring.tools.table import Column, Row, head, line, note

Declare = Callable[[ArgumentParser], None]


def parse(name: str, declare: Declare, words: Sequence[str]) -> Namespace:
    """Parse the command line of a study, and return its options; `action` runs the study.

    Args:
        name: Name of the study's file.
        declare: Function that declares the study's options.
        words: Arguments after `python -m benchmarks.NAME`.
    """
    parser = Parser(prog=f"python -m benchmarks.{name}")
    declare(parser)
    # Without a launcher, a study starts itself again under mpiexec.
    return parser.parse_args(words, Namespace(words=["-m", f"benchmarks.{name}", *words]))


def main(name: str, declare: Declare, words: Sequence[str] | None = None) -> int:
    """Run a study, and return the exit status; for the arguments, see `parse`."""
    return output.run(lambda: parse(name, declare, sys.argv[1:] if words is None else words))


def declare_json(parser: ArgumentParser) -> None:
    """Declare the file that `report` writes."""
    parser.add_argument("--json", metavar="FILE",
                        help="file for the results; - for standard output only")


def report(name: str, options: Namespace, columns: Sequence[Column],
           measure: Callable[[], tuple[str, Mapping[str, Any], Iterable[Row]]]) -> int:
    """Print the rows as they arrive, and write them if requested; return the exit status.

    Args:
        name: Name of the study.
        options: Options of the study.
        columns: Columns of the table.
        measure: Function that returns the title, the environment and the rows.

    Raises:
        ConfigError: The file cannot be written.
    """
    if options.json:
        output.refuse_unwritable(options.json)
    title, about, rows = measure()
    print(f"{note(title)}\n{head(columns)}")
    measured = []
    for row in rows:
        measured.append(row)
        print(line(row, columns), flush=True)
    if options.json:
        write_json(options.json, name, {**machine(), **about}, measured)
    return 0
