"""The command `python -m mpiring bench`; its options need no MPI library."""

import argparse
from functools import partial
from typing import NoReturn

from ..plot import DRAWINGS, draw
from ..results import read_json
from . import allreduce, latency, overlap, reducers, steps

_DESCRIPTION = """\
Measures mpiring beside MPI's own allreduce, Gloo and Horovod, where installed.

Under a launcher the benchmark measures in that job:
  mpirun -n 4 python -m mpiring bench allreduce
Without one it starts jobs of its own, at one or several thread levels of MPI:
  python -m mpiring bench allreduce --ranks 4

Before each timed call stands a barrier; a call's time is that of its slowest rank
(but latency counts as the OSU micro-benchmarks do, and has an option for barriers).
Contenders use the same arrays and take turns in random order, in several rounds.
A result that is not the sum ends the benchmark with exit status 1."""

# Each benchmark is a file, which declares its own options, and a row.
_BENCHMARKS = {
    "allreduce": (allreduce.declare, "time blocking allreduces, size by size"),
    "latency": (latency.declare,
                "time short collectives, in the tables of the OSU micro-benchmarks"),
    "overlap": (overlap.declare, "how much communication hides behind computation"),
    "steps": (steps.declare, "time the training steps of a NumPy or PyTorch model"),
    "reducers": (reducers.declare,
                 "what compressing gradients saves and costs in training (PyTorch)"),
}


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmarks and their options."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(required=True)
    for name, (declare_options, text) in _BENCHMARKS.items():
        declare_options(commands.add_parser(name, help=text))
    plotting = commands.add_parser("plot", help="draw what --json has written")
    plotting.add_argument("results", metavar="FILE.json", help="-: standard input")
    plotting.add_argument("plot", metavar="FILE.png")
    plotting.set_defaults(action=_plot)
    parser.error = partial(_refuse, parser)  # type: ignore[method-assign]


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    argparse.ArgumentParser.error(
        parser, f"{message}; studies of methods are in the folder benchmarks of mpiring's sources: "
                f"python -m benchmarks.NAME")


def _plot(options: argparse.Namespace) -> int:
    draw(options.plot, *read_json(options.results), DRAWINGS)
    return 0
