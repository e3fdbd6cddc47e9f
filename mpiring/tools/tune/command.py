"""The command `python -m mpiring tune`: measures algorithms, and shows which are the fastest."""

import argparse
from collections.abc import Iterator

from ...communicator import Communicator, init
from ...errors import ConfigError
from ...operations.model import Model
from ..arguments import above_zero, checked
from ..units import parse_size, size_text
from .advice import Workload, advise, parse_matrix
from .rates import measure

_SMALLEST, _LARGEST = 8, 1 << 30


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.description = (
        "Measures what each algorithm costs on the ranks that it is started on, as the first "
        "allreduce between nodes does: mpirun -n 8 python -m mpiring tune")
    parser.set_defaults(action=run)
    advice = parser.add_argument_group("to predict which Reducer pays, for a model")
    advice.add_argument("--model-bytes", type=checked(parse_size), metavar="SIZE",
                        help="of all its gradients in float32, as 52M")
    advice.add_argument("--compute-ms", type=above_zero, metavar="MS",
                        help="what a step takes without communication, as bench steps measures it")
    advice.add_argument("--largest-matrix", type=checked(parse_matrix), default=(512, 2048),
                        metavar="NxM", help="all gradients are taken to be such matrices, on which "
                                            "TopK and PowerSGD depend; default: 512x2048")


def run(options: argparse.Namespace) -> int:
    """Measure, keep the result for later jobs, and print it on rank 0.

    Raises:
        ConfigError: There is one rank only, or options do not go together.
    """
    if options.compute_ms is not None and options.model_bytes is None:
        raise ConfigError("--compute-ms says nothing without --model-bytes; give both")
    with init() as comm:
        if comm.size == 1:
            raise ConfigError("there is nothing to measure: a single rank sends nothing; start "
                              "several, as with mpirun -n 8 python -m mpiring tune")
        model = _report(comm, f"{comm.size} ranks, nodes: {comm.num_nodes}", comm.rank == 0)
        if 1 < comm.num_nodes < comm.size:
            inside = comm.split(comm.node_rank)
            if inside is not None:
                _report(inside, f"Within a node: {inside.size} ranks", comm.rank == 0)
                inside.close()
        rates = measure(comm)
        if comm.rank == 0:
            print(f"While all ranks combine and copy: simulate {rates.options}\n")
        if options.model_bytes is not None:
            compute_s = None if options.compute_ms is None else options.compute_ms / 1e3
            text = advise(
                comm, model, Workload(options.model_bytes, options.largest_matrix, compute_s))
            if comm.rank == 0:
                print(text)
    return 0


def _report(comm: Communicator, title: str, shown: bool) -> Model:
    model = comm.tune(fresh=True)
    if shown:
        _print(model, title)
    return model


def _print(model: Model, title: str) -> None:
    print(f"{title}\n")
    sizes = [size for size, _ in model.curves[0][1].points] if model.curves else []
    print(f"{'microseconds':14}" + "".join(f"{size_text(size):>12}" for size in sizes)
          + f"{'latency us':>14}{'GB/s':>10}")
    for name, curve in model.curves:
        print(f"{name:14}" + "".join(f"{1e6 * curve.time_s(size):12.1f}" for size in sizes)
              + f"{1e6 * curve.latency_s:14.1f}{1e-9 / curve.s_per_byte:10.3f}")
    print()
    ranges = [(_SMALLEST, "shared")] if "shared" in dict(model.curves) else _ranges(model)
    for first, name in ranges:
        print(f"auto takes {name} from {size_text(first)}")
    print(f"bucket_bytes: {model.bucket_bytes} ({size_text(model.bucket_bytes)}) is long enough\n")


def _ranges(model: Model) -> Iterator[tuple[int, str]]:
    """Yield the fastest algorithms, each with the size from which on it is the fastest."""
    names = [name for name, _ in model.curves]
    last, size = "", _SMALLEST
    while names and size <= _LARGEST:
        best = model.best(size, names)
        if best != last:
            yield size, best
        last, size = best, size * 2
