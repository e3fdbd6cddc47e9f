"""The command `python -m mpiring bench`; its options need no MPI library."""

import argparse

from .. import files, plot
from . import (
    allreduce, batches, codecs, latency, local, overlap, prefetch, reducers, steps, updates,
)

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
    "local": (local.declare,
              "what talking less often, or not waiting, saves and costs in training (PyTorch)"),
    "batches": (batches.declare,
                "what samples of different lengths cost, by ways to share them (PyTorch)"),
    "prefetch": (prefetch.declare,
                 "what it costs that data is loaded, and comes from the host (PyTorch)"),
    "codecs": (codecs.declare,
               "how fast gradients are encoded, on one core or a GPU; needs no MPI"),
    "updates": (updates.declare,
                "how fast optimizers update weights, on one core; needs no MPI"),
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


def _plot(options: argparse.Namespace) -> int:
    plot.draw(options.plot, *files.read_json(options.results))
    return 0
