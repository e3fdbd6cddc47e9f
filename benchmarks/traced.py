"""Trains a model of the benchmarks for some steps under a trace: docs/benchmarks/scaling.md."""

import itertools
import sys
from argparse import ArgumentParser, Namespace
from statistics import median

from mpiring import init
from mpiring.tools.arguments import checked, positive
from mpiring.tools.bench.benchmark import MODELS
from mpiring.tools.bench.timing import by_clock
from mpiring.tools.units import parse_count

from . import main


def declare(parser: ArgumentParser) -> None:
    """Declare the study's options."""
    parser.description = "Run under mpirun, with MPIRING_TRACE=FOLDER; rank 0 prints the median."
    parser.set_defaults(action=run)
    parser.add_argument("--model", choices=MODELS, default=MODELS[0],
                        help="model (default: transformer)")
    parser.add_argument("--parameters", type=checked(parse_count), default=13_000_000,
                        help="approximate number of parameters (default: 13M)")
    parser.add_argument("--steps", type=positive, default=40, help="number of steps (default: 40)")


def run(options: Namespace) -> int:
    """Train, print the median step time on rank 0, and return the exit status."""
    import torch

    from mpiring.tools.bench import torch_training
    from mpiring.torch import DataParallel
    with init() as comm:
        module = torch_training.model_of(
            options.model, torch_training.width_for(options.model, options.parameters))
        model = DataParallel(module, comm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        batch = torch_training.batch_of(options.model, None, seed=comm.rank)
        training = torch_training.Training("", module, model, optimizer, itertools.repeat(batch))
        seconds = [by_clock(training.step) for _ in range(options.steps)]
        if comm.rank == 0:
            print(f"{comm.size} ranks: median step {1e3 * median(seconds[2:] or seconds):.1f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main("traced", declare))
