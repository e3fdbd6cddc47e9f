"""Writes the files that a command's options ask for: --json, --csv and --plot."""

from argparse import Namespace
from collections.abc import Sequence

from ..errors import ConfigError
from .files import Environment, Row, refuse_unwritable, write_csv, write_json
from .picture import refuse_undrawable
from .plot import draw


def check_files(options: Namespace) -> None:
    """Raise before anything is measured if a file that the options ask for cannot be written.

    Raises:
        ConfigError: Its folder is missing or read-only, a picture's format is unknown, or two
            are the same.
        MissingDependencyError: A picture needs matplotlib.
    """
    paths = [path for path in (options.json, options.csv, options.plot) if path]
    for path in paths:
        refuse_unwritable(path)
        if paths.count(path) > 1:
            raise ConfigError(f"{path}: one file cannot take both; give two names")
    if options.plot:
        refuse_undrawable(options.plot)


def report(name: str, about: Environment, rows: Sequence[Row], options: Namespace) -> None:
    """Write the files that the options ask for."""
    if options.json:
        write_json(options.json, name, about, rows)
    if options.csv:
        write_csv(options.csv, about, rows)
    if options.plot:
        draw(options.plot, name, about, rows)
