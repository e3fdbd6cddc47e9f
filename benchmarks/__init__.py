"""Studies of methods, which are not in the wheel: `python -m benchmarks.NAME` in a checkout."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence

from mpiring.tools import output

Declare = Callable[[ArgumentParser], None]


def parse(name: str, declare: Declare, words: Sequence[str]) -> Namespace:
    """Return the options of a study's command line; `action` runs it.

    Args:
        name: Name of the study's file.
        declare: Function that declares the study's options.
        words: The words after `python -m benchmarks.NAME`.
    """
    parser = ArgumentParser(prog=f"python -m benchmarks.{name}")
    declare(parser)
    # Without a launcher, a study starts itself again under mpiexec.
    return parser.parse_args(words, Namespace(words=["-m", f"benchmarks.{name}", *words]))


def main(name: str, declare: Declare, words: Sequence[str] | None = None) -> int:
    """Run a study, and return the exit status; for the arguments, see `parse`."""
    return output.run(lambda: parse(name, declare, sys.argv[1:] if words is None else words))
