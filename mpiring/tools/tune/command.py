"""The command `python -m mpiring tune`: measures algorithms, and shows which are the fastest."""

import argparse
from collections.abc import Iterator

from ...communicator import Communicator, init
from ...errors import ConfigError
from ...operations.model import Model
from ..units import size_text
from .rates import measure

_SMALLEST, _LARGEST = 8, 1 << 30


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.description = (
        "Measures what each algorithm costs on the ranks that it is started on, as the first "
        "allreduce between nodes does: mpirun -n 8 python -m mpiring tune")
    parser.set_defaults(action=run)


def run(options: argparse.Namespace) -> int:
    """Measure, keep the result for later jobs, and print it on rank 0.

    Raises:
        ConfigError: There is one rank only.
    """
    with init() as comm:
        if comm.size == 1:
            raise ConfigError("there is nothing to measure: a single rank sends nothing; start "
                              "several, as with mpirun -n 8 python -m mpiring tune")
        _report(comm, f"{comm.size} ranks, nodes: {comm.num_nodes}", comm.rank == 0)
        if 1 < comm.num_nodes < comm.size:
            inside = comm.split(comm.node_rank)
            if inside is not None:
                _report(inside, f"Within a node: {inside.size} ranks", comm.rank == 0)
                inside.close()
        rates = measure(comm)
        if comm.rank == 0:
            print(f"While all ranks combine and copy: simulate {rates.options}\n")
    return 0


def _report(comm: Communicator, title: str, shown: bool) -> None:
    model = comm.tune(fresh=True)
    if shown:
        _print(model, title)


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
