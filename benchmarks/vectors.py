"""Options of studies of operations on one vector, without MPI."""

import importlib.util
from argparse import ArgumentParser

from mpiring.tools.arguments import checked
from mpiring.tools.units import parse_count

from . import declare_json

READINGS = 15


def declare_elements(parser: ArgumentParser, elements: int, text: str) -> None:
    """Declare the options.

    Args:
        parser: Parser of the study.
        elements: Default length of the vector, in millions.
        text: Help of `--elements`.
    """
    parser.add_argument("--elements", type=checked(parse_count), default=elements * 1_000_000,
                        help=f"{text} (default: {elements}M)")
    declare_json(parser)


def code_kind() -> str:
    """Return the kind of code that computes here."""
    return "numba's code" if importlib.util.find_spec("numba") else "NumPy, for want of numba"
