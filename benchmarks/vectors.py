"""Options, table and result file of studies of operations on one vector, without MPI."""

import importlib.util
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mpiring.tools.arguments import checked
from mpiring.tools.output import refuse_unwritable
from mpiring.tools.results import machine, write_json
from mpiring.tools.table import Column, Row, head, line
from mpiring.tools.units import parse_count

READINGS = 15


def declare_elements(parser: ArgumentParser, elements: int, text: str) -> None:
    """Declare the options.

    Args:
        parser: Parser of the study.
        elements: Default length of the vector, in millions.
        text: Help of `--elements`.
    """
    parser.add_argument("--elements", type=checked(parse_count), default=elements * 1_000_000,
                        help=f"{text}; default {elements}M")
    parser.add_argument("--json", metavar="FILE",
                        help="file for the results; - for standard output only")


def way_here() -> str:
    """Return a description of the code that computes."""
    return "numba's code" if importlib.util.find_spec("numba") else "NumPy, for want of numba"


def report(name: str, options: Namespace, columns: Sequence[Column],
           measure: Callable[[], tuple[str, Mapping[str, Any], Iterable[Row]]]) -> int:
    """Print the rows as they come, and write them if requested; return the exit status.

    Args:
        name: Name of the study.
        options: Options of the study.
        columns: Columns of the table.
        measure: Returns the title, the environment and the rows.

    Raises:
        ConfigError: The file cannot be written.
    """
    if options.json:
        refuse_unwritable(options.json)
    title, about, rows = measure()
    print(f"# {options.elements:,} float32, {title}\n{head(columns)}")
    measured = []
    for row in rows:
        measured.append(row)
        print(line(row, columns), flush=True)
    if options.json:
        write_json(options.json, name, {**machine(), **about, "elements": options.elements},
                   measured)
    return 0
