"""The command `python -m mpiring simulate`; works without any MPI library."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ... import __version__
from ...errors import ConfigError
from .. import table
from ..arguments import above_zero, checked, positive
from ..results import check_files, command, declare_files, now, read_json, write_files
from ..table import Column, Environment, Row
from ..units import parse_rate, parse_size, parse_time, size_text
from .algorithms import ALGORITHMS, SHARDED, predict, selected
from .cluster import Cluster

_DESCRIPTION = """\
Predicts the time of an allreduce on a cluster that is not here, by running the real
algorithms on a simulated network, without data and on a virtual clock. Where all nodes
do the same ("symmetry"), one of them is run, and stands for all; else all ranks are
("stepped"). MPI's own allreduce is a model of what MPICH does.

efficiency = byte limit / time. Between N nodes the limit is what each node's network
interface needs for 2(N-1)/N of the array, at bandwidth x goodput; on one node it is the
time of a copy of the array. Every measured number of your cluster makes it better: the
defaults are those of a usual InfiniBand cluster.

With --sharded, it predicts what a sharded optimizer sends in a step as well: the
reduce-scatter of gradients and the allgather of weights, of which each rank has a copy
("sharded"), or all ranks of a node have one ("once per node").

With --against, it predicts the sizes, hosts and ranks that a `bench allreduce --json`
has measured, and prints the deviation."""

_COLUMNS = [
    Column("nodes", 6), Column("ranks", 7), Column("algorithm", -12),
    Column("ms", 10, 4, "time ms"), Column("limit_ms", 10, 4),
    Column("efficiency_percent", 12, 3, "efficiency %"), Column("how", -8),
    Column("choice", -4, title="")]
_AGAINST = [
    Column("nodes", 6), Column("ranks", 7), Column("size", 9),
    Column("contender", -14), Column("ms", 12, 4, "predicted ms"),
    Column("measured_ms", 12, 4), Column("ratio", 9, 3, "pred/meas")]
# What `bench allreduce` calls the algorithms.
_CONTENDERS = {"MPI_Allreduce": "native",
               **{f"mpiring {algorithm}": algorithm for algorithm in ALGORITHMS}}


# Options: the field of Cluster that each sets, how it is read, and its help.
_BETWEEN_NODES: Sequence[tuple[str, str, Callable[[str], Any], str]] = (
    ("--latency", "latency_s", parse_time, "default: 2us"),
    ("--bandwidth", "bandwidth", parse_rate, "of a node's interface, each way; default: 100gbit"),
    ("--goodput", "goodput", above_zero,
     "share of it that is data; default: 0.97; TCP on Ethernet: 0.956"),
    ("--burst", "burst_bytes", partial(parse_size, least=0),
     "what passes at once after a pause, where the rate is limited on average only: 128KiB in the "
     "lab; default: 0"))
_OF_RANKS: Sequence[tuple[str, str, Callable[[str], Any], str]] = (
    ("--reduction-rate", "reduction_rate", parse_rate,
     "of what combining reads and writes; default: 20GB/s"),
    ("--message-overhead", "overhead_s", parse_time,
     "computing per message of our schedules in Python, at either end; default: 5us"),
    ("--mpi-overhead", "mpi_overhead_s", parse_time,
     "computing per message in MPI and the system, at either end: where it is not in the latency, "
     "because ranks share cores; default: 0us"),
    ("--node-latency", "node_latency_s", parse_time,
     "of a message within a node; default: 500ns"),
    ("--node-bandwidth", "node_bandwidth", parse_rate,
     "of copies within a node; default: 10GB/s"),
    ("--barrier", "barrier_s", parse_time, "of a barrier in a node's memory; default: 3us"))


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(action=run)
    parser.add_argument("--nodes", type=_counts, default=_counts("64"), metavar="N or A,B,C",
                        help="powers of two up to N, and N; or these; default: 64")
    parser.add_argument("--ranks-per-node", type=positive, default=8, help="default: 8")
    parser.add_argument("--size", type=checked(parse_size), default=100_000_000,
                        help="default: 100MB")
    for title, prices in (("between nodes", _BETWEEN_NODES),
                          ("of each rank, while all are at work", _OF_RANKS)):
        group = parser.add_argument_group(title)
        for option, field, parse, text in prices:
            group.add_argument(option, dest=field, type=checked(parse), help=text,
                               metavar=option[2:].upper(), default=getattr(Cluster, field))
    parser.add_argument("--sharded", action="store_true",
                        help="predict reduce-scatter + allgather, too")
    parser.add_argument("--against", metavar="FILE.json",
                        help="compare with what `bench allreduce --json` has measured")
    declare_files(parser, "the predictions")


def _counts(text: str) -> list[int]:
    """Return the numbers in a list, or the powers of two up to a number, and the number."""
    parts = [positive(part.strip()) for part in text.split(",")]
    if len(parts) > 1:
        return sorted(set(parts))
    powers = [1 << power for power in range(parts[0].bit_length())]
    return sorted({*powers, parts[0]})


def run(options: argparse.Namespace) -> int:
    """Predict, print, and write files; return the exit status.

    Args:
        options: As `declare` has declared them.

    Raises:
        ConfigError: There is nothing to predict.
    """
    if options.plot and options.against:
        raise ConfigError("--plot draws node counts; leave out --against")
    check_files(options)
    cluster = Cluster(ranks_per_node=options.ranks_per_node, **{
        field: getattr(options, field) for _, field, *_ in (*_BETWEEN_NODES, *_OF_RANKS)})
    if options.against:
        rows, columns = _against(options.against, cluster), _AGAINST
    else:
        rows, columns = _scaling(options, cluster), _COLUMNS
    if not rows:
        raise ConfigError("there is nothing to predict: a single rank sends nothing; raise "
                          "--nodes or --ranks-per-node")
    about = _about(options, cluster)
    print(f"# mpiring {__version__} simulate: {about['cluster']}")
    print(table.head(columns))
    for row in rows:
        print(table.line(row, columns))
    write_files("against" if options.against else "simulate", about, rows, options)
    return 0


def _about(options: argparse.Namespace, cluster: Cluster) -> Environment:
    """Return the environment of the predictions."""
    text = (f"{_size_text(options.size)} of float32, {cluster.ranks_per_node} ranks per node, "
            if not options.against else "")
    return {
        "date": now(), "command": command(),
        "mpiring": __version__,
        "cluster": f"{text}{cluster.bandwidth * 8 / 1e9:g} Gbit/s × {cluster.goodput:g}, "
                   f"{cluster.latency_s * 1e6:g} µs; "
                   f"combining at {cluster.reduction_rate / 1e9:g} GB/s",
        **{name: value for name, value in vars(cluster).items() if name != "nodes"}}


def _size_text(nbytes: int) -> str:
    """Return a size as it was probably given: whole megabytes as such."""
    return size_text(nbytes) if nbytes % 1_000_000 else f"{nbytes // 1_000_000} MB"


def _scaling(options: argparse.Namespace, usual: Cluster) -> list[Row]:
    rows = []
    for nodes in options.nodes:
        cluster = usual.of(nodes, usual.ranks_per_node)
        predictions = {name: prediction for name in (*ALGORITHMS, *SHARDED[:2 * options.sharded])
                       if (prediction := predict(name, cluster, options.size)) is not None}
        seconds = {name: predictions[name].seconds for name in ALGORITHMS if name in predictions}
        choice, limit_s = selected(cluster, options.size, seconds), cluster.limit_s(options.size)
        for name, prediction in predictions.items():
            rows.append({
                "nodes": nodes, "ranks": cluster.ranks, "bytes": options.size,
                "algorithm": name, "ms": prediction.seconds * 1e3, "limit_ms": limit_s * 1e3,
                "efficiency_percent": 100 * limit_s / prediction.seconds,
                "how": prediction.how, "selected": name == choice,
                "choice": "auto" if name == choice else ""})
    return rows


def _cores(about: Environment) -> int:
    """Return the cores that all ranks shared, if any: a lab's hosts are one machine."""
    machines = {rank["host"] for rank in about["placement"]}
    return int(about["cores"]) if len(machines) == 1 else 0


def _against(path: str, usual: Cluster) -> list[Row]:
    """Return a prediction beside each median that a benchmark has measured."""
    benchmark, about, measured = read_json(path)
    if benchmark != "allreduce" or about["ranks"] % about["nodes"]:
        raise ConfigError(f"{path}: {benchmark} of {about['ranks']} ranks on {about['nodes']} "
                          f"nodes; expected a `bench allreduce` with equally many on each")
    cluster = replace(usual, nodes=about["nodes"], cores=_cores(about),
                      ranks_per_node=about["ranks"] // about["nodes"])
    rows = []
    for row in measured:
        name, median_ms = _CONTENDERS.get(row["contender"]), row["median_us"] / 1e3
        if name is None or median_ms != median_ms:
            continue
        predicted = predict(name, cluster, row["bytes"])
        if predicted is not None:
            rows.append({
                "nodes": cluster.nodes, "ranks": cluster.ranks, "bytes": row["bytes"],
                "size": size_text(row["bytes"]), "contender": row["contender"],
                "ms": predicted.seconds * 1e3, "measured_ms": median_ms,
                "ratio": predicted.seconds * 1e3 / median_ms})
    return rows
