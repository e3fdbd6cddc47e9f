"""The command `mpiring bench`; its options need no MPI library."""

import argparse

from ..arguments import Parser
from ..results import draw_json
from . import allreduce, latency, overlap, reducers, steps

_DESCRIPTION = """\
Compares mpiring with MPI's own allreduce, Gloo and Horovod, if they are installed.

Under a launcher, the benchmark runs in that job:
  mpirun -n 4 python -m mpiring bench allreduce
Without a launcher, it starts jobs itself, at one or more thread levels of MPI:
  python -m mpiring bench allreduce --ranks 4

A barrier precedes each timed call, and the slowest rank determines its time. (`latency` measures
like the OSU micro-benchmarks, and has an option for barriers.) Contenders use the same arrays, and
take turns in random order for several rounds. A wrong sum ends the benchmark with exit status 1."""

# The module and the help text of each benchmark; the module declares the options.
_BENCHMARKS = {
    "allreduce": (allreduce, "time blocking allreduces, size by size"),
    "latency": (latency, "time short collectives as the OSU micro-benchmarks do"),
    "overlap": (overlap, "measure how much communication hides behind compute"),
    "steps": (steps, "time the training steps of a NumPy or PyTorch model"),
    "reducers": (reducers, "time training steps with compressed gradients (PyTorch)"),
}


def declare(parser: Parser) -> None:
    """Declare the benchmarks and their options."""
    parser.description = _DESCRIPTION
    commands = parser.add_subparsers(required=True)
    for name, (benchmark, text) in _BENCHMARKS.items():
        benchmark.declare(commands.add_parser(name, help=text))
    plotting = commands.add_parser("plot", help="draw the results in a file of --json")
    plotting.add_argument("results", metavar="FILE.json",
                          help="file of --json, or - for standard input")
    plotting.add_argument("plot", metavar="FILE.png", help="picture to draw")
    plotting.set_defaults(action=_plot)
    parser.advice = ("(studies of methods are in the folder benchmarks of mpiring's sources: "
                     "python -m benchmarks.NAME)")


def _plot(options: argparse.Namespace) -> int:
    draw_json(options.results, options.plot)
    return 0
