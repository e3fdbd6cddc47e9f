"""Options for the files that results are written to: --json, --csv and --plot."""

import argparse
from collections.abc import Sequence

from ..errors import ConfigError
from .files import Environment, Row, refuse_unwritable, write_csv, write_json
from .picture import refuse_undrawable
from .plot import draw


def declare(parser: argparse.ArgumentParser, content: str) -> None:
    """Declare the options.

    Args:
        content: What is written, for the help.
    """
    for name in "--json", "--csv":
        parser.add_argument(name, metavar="FILE", help=f"write {content}; -: to stdout alone")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the results (needs matplotlib)")


def check_files(options: argparse.Namespace) -> None:
    """Refuse files that could not be written, before anything is measured.

    Raises:
        ConfigError: A folder is missing or read-only, a picture's format is unknown, or two
            files are the same.
        MissingDependencyError: A picture needs matplotlib.
    """
    paths = [path for path in (options.json, options.csv, options.plot) if path]
    for path in paths:
        refuse_unwritable(path)
        if paths.count(path) > 1:
            raise ConfigError(f"{path}: one file cannot take both; give two names")
    if options.plot:
        refuse_undrawable(options.plot)


def report(name: str, about: Environment, rows: Sequence[Row], options: argparse.Namespace,
           ) -> None:
    """Write the files that the options ask for."""
    if options.json:
        write_json(options.json, name, about, rows)
    if options.csv:
        write_csv(options.csv, about, rows)
    if options.plot:
        draw(options.plot, name, about, rows)
