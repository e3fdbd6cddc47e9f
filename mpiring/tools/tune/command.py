"""The command `mpiring tune`: measures algorithms, and shows which are the fastest."""

import argparse
import time
from collections.abc import Iterator

import numpy as np

from ... import Communicator, ConfigError, init
from ...provisional import operations, same_on_all
from .. import table
from ..busy import busy_warning, processor_use
from ..output import refuse_unwritable
from ..results import declare_json, machine, write_json
from ..table import Column, Row
from ..units import ranks_on_nodes, size_text
from .rates import measure

_SMALLEST, _LARGEST = 8, 1 << 30
_AUTO, _SHARED = "auto", "shared"
_CALLS = 5
# If the chosen algorithm takes this many times as long as another one, a line says why it is used.
_CLEARLY = 2.0


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.description = (
        "Measures the time of each algorithm on the ranks of this job, as the first allreduce "
        "between nodes does: mpirun -n 8 python -m mpiring tune. Times are in microseconds, sizes "
        "in bytes per rank.")
    parser.set_defaults(action=run)
    declare_json(parser, "the times and the environment")


def run(options: argparse.Namespace) -> int:
    """Measure, save the result for later jobs, and print it on rank 0.

    Raises:
        ConfigError: There is only one rank, or the file cannot be written.
    """
    with init() as comm:
        if comm.size == 1:
            raise ConfigError("there is nothing to measure: a single rank sends nothing; start "
                              "several, as with mpirun -n 8 python -m mpiring tune")
        with same_on_all(comm, "tune"):
            if options.json and comm.rank == 0:
                refuse_unwritable(options.json)
        comm.barrier()
        warning = busy_warning(comm.allgather_object(processor_use()),
                               "These times are too long, and may name the wrong algorithm.")
        if comm.rank == 0 and warning:
            print(f"{warning}\n")
        rows = _report(comm, ranks_on_nodes(comm.size, comm.num_nodes), comm.rank == 0)
        if 1 < comm.num_nodes < comm.size:
            node_comm = comm.split(comm.node_rank)
            if node_comm is not None:
                rows += _report(node_comm, f"Within a node: {node_comm.size} ranks",
                                comm.rank == 0)
                node_comm.close()
        rates = measure(comm)
        if comm.rank == 0:
            print(f"While all ranks combine and copy: simulate {rates.options}\n")
            if options.json:
                write_json(options.json, "tune", {
                    **machine(), "ranks": comm.size, "nodes": comm.num_nodes, "warning": warning,
                    **{f"{name}_bytes_per_s": rate for name, rate in rates._asdict().items()},
                }, rows)
    return 0


def _report(comm: Communicator, title: str, shown: bool) -> list[Row]:
    """Measure on all ranks together, print a table, and return its rows for a file."""
    model = comm.tune(fresh=True)
    by_auto = _by_auto(comm, model) if _SHARED in dict(model.curves) else None
    if shown:
        _print(model, by_auto, title)
    return [{"ranks": comm.size, "nodes": comm.num_nodes, "algorithm": name, "bytes": size,
             "us": 1e6 * seconds, "selected": name == _selected(model, size),
             "bucket_bytes": model.bucket_bytes}
            for name, curve in _curves(model, by_auto).items() for size, seconds in curve.points]


def _selected(model: operations.Model, size: int) -> str:
    """Return the algorithm that auto uses."""
    names = [name for name, _ in model.curves]
    return _SHARED if _SHARED in names else model.best(size, names)


def _curves(model: operations.Model,
            by_auto: operations.Curve | None) -> dict[str, operations.Curve]:
    """Return the times by algorithm, also those of ordinary calls."""
    return dict(model.curves) | ({} if by_auto is None else {_AUTO: by_auto})


def _by_auto(comm: Communicator, model: operations.Model) -> operations.Curve:
    """Measure ordinary calls on all ranks together; short calls bypass the engine."""
    points = []
    for size, _ in model.curves[0][1].points:
        x, seconds = comm.empty(size // 4, np.float32), []
        x[...] = 0
        for _ in range(_CALLS):
            comm.allreduce(x)
            comm.barrier()
            began_s = time.perf_counter()
            comm.allreduce(x)
            seconds.append(time.perf_counter() - began_s)
        slowest = np.array([min(seconds)])
        comm.allreduce(slowest, op="max")
        points.append((size, float(slowest[0])))
    return operations.Curve(tuple(points))


def _print(model: operations.Model, by_auto: operations.Curve | None, title: str) -> None:
    curves = _curves(model, by_auto)
    sizes = [size for size, _ in model.curves[0][1].points] if model.curves else []
    columns = [Column("name", -12, title="microseconds"),
               *(Column(size_text(size), 10, 4) for size in sizes), Column("GB/s", 8, 3)]
    print(f"{title}\n\n{table.head(columns)}")
    for name, curve in curves.items():
        row = {size_text(size): 1e6 * curve.time_s(size) for size in sizes}
        print(table.line({"name": name, "GB/s": 1e-9 / curve.s_per_byte, **row}, columns, best=[
            size_text(size) for size in sizes
            if curve.time_s(size) == min(each.time_s(size) for each in curves.values())]))
    print()
    for line in _choices(model, by_auto):
        print(line)
    print(f"bucket_bytes: {model.bucket_bytes} ({size_text(model.bucket_bytes)}) is long enough\n")


def _choices(model: operations.Model, by_auto: operations.Curve | None) -> Iterator[str]:
    """Yield lines with the algorithm of each range of sizes, and why it is used if not fastest."""
    if by_auto is not None:
        yield f"auto takes {_SHARED} from {size_text(_SMALLEST)}"
        yield (f"On one node auto uses {_SHARED} at every size, whatever was measured. The row "
               f"{_AUTO} shows\nordinary calls. Short ones bypass the engine, and are faster than "
               f"in the row {_SHARED}.")
        yield from _faster(model, by_auto)
        return
    largest = max((curve.points[-1][0] for _, curve in model.curves), default=0)
    for first, name in _ranges(model):
        yield f"auto takes {name} from {size_text(first)}"
        other, factor = _fastest(model, first, dict(model.curves)[name].time_s(first))
        if first > largest and factor > _CLEARLY:
            yield (f"  {size_text(largest)} is the largest measured size. Far beyond it auto uses "
                   f"the algorithm that sends the\n  fewest bytes, although the line through the "
                   f"measured times makes {other} {factor:.1f} times as fast.")


def _faster(model: operations.Model, by_auto: operations.Curve) -> Iterator[str]:
    """Yield a line about the largest speedup of another algorithm over ordinary calls, if clear."""
    factors = [(*_fastest(model, size, seconds)[::-1], size) for size, seconds in by_auto.points]
    factor, name, size = max(factors)
    if factor > _CLEARLY:
        yield (f"{name} was {factor:.1f} times as fast at {size_text(size)}. If that stays so on "
               f"idle cores, use algorithm=\"{name}\"\nthere, or MPIRING_ALGORITHM={name}.")


def _fastest(model: operations.Model, size: int, seconds: float) -> tuple[str, float]:
    """Return the fastest algorithm at a size, and its speedup relative to `seconds`."""
    name, curve = min(model.curves, key=lambda named: named[1].time_s(size))
    return name, seconds / curve.time_s(size)


def _ranges(model: operations.Model) -> Iterator[tuple[int, str]]:
    """Yield the algorithms that are used, each with the first size of its range, in bytes."""
    names = [name for name, _ in model.curves]
    last, size = "", _SMALLEST
    while names and size <= _LARGEST:
        best = model.best(size, names)
        if best != last:
            yield size, best
        last, size = best, size * 2
