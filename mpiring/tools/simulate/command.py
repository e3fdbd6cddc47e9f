"""The command `mpiring simulate`; works without any MPI library."""

import argparse
from dataclasses import replace

from ... import ConfigError, __version__
from .. import table
from ..arguments import UsageError, checked
from ..entries import Field, listed, number, text, whole
from ..results import check_files, declare_files, read_json, write_files
from ..table import Column, Environment, Row
from ..units import parse_size, size_text
from . import step_command
from .algorithms import ALGORITHMS, SHARDED, predict, selected
from .cluster import MAX_BYTES, MAX_RANKS, Cluster, refuse_large
from .counted import counted
from .options import caveat_of, cluster_of, declare_cluster, environment_of

_DESCRIPTION = """\
Predicts the time of an allreduce on another cluster. It runs the real algorithms on a simulated
network, without data and on a virtual clock. If all nodes behave identically, it simulates one node
("symmetry"), otherwise all ranks ("stepped"). "native" models the allreduce of MPICH.

efficiency = byte limit / time. Between N nodes, the limit is the time in which a node's network
interface carries 2(N-1)/N of the array, at bandwidth x goodput. On one node it is the time of a
copy of the array. The defaults are typical of an InfiniBand cluster; replace them with measured
values.

With --sharded, it also predicts the communication of a sharded optimizer: the reduce-scatter of
gradients and the allgather of weights. Each rank ("sharded") or each node ("once per node") stores
the weights.

With --against, it predicts the results in a file of `bench allreduce --json`, for the same sizes,
hosts and ranks, and prints the deviation."""

_COLUMNS = [
    Column("nodes", 6), Column("ranks", 7), Column("algorithm", -12),
    Column("ms", 10, 4, "time ms"), Column("limit_ms", 10, 4),
    Column("efficiency_percent", 12, 3, "efficiency %"), Column("how", -8),
    Column("choice", -4, title="")]
_AGAINST = [
    Column("nodes", 6), Column("ranks", 7), Column("size", 9),
    Column("contender", -14), Column("ms", 12, 4, "predicted ms"),
    Column("measured_ms", 12, 4), Column("ratio", 9, 3, "pred/meas")]
# Algorithms by their names in `bench allreduce`.
_CONTENDERS = {"MPI_Allreduce": "native",
               **{f"mpiring {algorithm}": algorithm for algorithm in ALGORITHMS}}
# Fields of a benchmark's environment and of its rows that --against reads.
_HOST = Field(lambda x: isinstance(x, dict) and text().fits(x.get("host")), "a rank's host")
_ABOUT = {"ranks": whole(1, MAX_RANKS), "nodes": whole(1, MAX_RANKS),
          "cores": whole(1, MAX_RANKS), "placement": listed(_HOST)}
_MEASURED = {"contender": text(), "bytes": whole(1, MAX_BYTES),
             "median_us": number(1e-3, nan=True)}


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = _DESCRIPTION
    parser.set_defaults(action=run)
    step_command.declare(parser.add_subparsers(title="commands", metavar="[step]").add_parser(
        "step", help="predict training steps instead, from the trace of a job"))
    declare_cluster(parser)
    parser.add_argument("--size", type=checked(parse_size), default=100_000_000,
                        help="size of the array, such as 64KiB or 100MB (default: 100MB)")
    parser.add_argument("--sharded", action="store_true",
                        help="also predict reduce-scatter and allgather")
    parser.add_argument("--against", metavar="FILE.json",
                        help="file of `bench allreduce --json` to compare with")
    declare_files(parser, "the predictions")


def run(options: argparse.Namespace) -> int:
    """Predict, print, and write files; return the exit status.

    Raises:
        UsageError: There is nothing to predict, or options cannot be combined.
        ConfigError: A file cannot be used.
    """
    if options.plot and options.against:
        raise UsageError("--plot and --against cannot be combined; leave out one")
    check_files(options)
    cluster = cluster_of(options)
    if options.against:
        rows, columns = _against(options.against, cluster), _AGAINST
    else:
        rows, columns = _scaling(options, cluster), _COLUMNS
    if not rows:
        raise UsageError("there is nothing to predict: a single rank sends nothing; raise "
                         "--nodes or --ranks-per-node")
    about = environment_of(cluster, "" if options.against else (
        f"{_size_text(options.size)} of float32, {cluster.ranks_per_node} ranks per node, "))
    print(table.note(f"mpiring {__version__} simulate: {about['cluster']}"))
    table.show(rows, columns)
    clusters = [replace(cluster.of(row["nodes"], row["ranks"] // row["nodes"]),
                        cores=row.get("cores", cluster.cores)) for row in rows]
    if caveat := caveat_of(clusters):
        print(caveat)
    write_files("against" if options.against else "simulate", about, rows, options)
    return 0


def _size_text(nbytes: int) -> str:
    """Return a size in decimal megabytes if it is a multiple, otherwise in binary units."""
    return size_text(nbytes) if nbytes % 1_000_000 else f"{nbytes // 1_000_000} MB"


def _scaling(options: argparse.Namespace, costs: Cluster) -> list[Row]:
    names, rows = ALGORITHMS + SHARDED * options.sharded, []
    refuse_large(options.size)
    # A cluster that is too large is refused before others are simulated.
    clusters = [costs.of(nodes, costs.ranks_per_node) for nodes in options.nodes]
    predicted = {(cluster.nodes, name): predict(name, cluster, options.size) for cluster, name in
                 counted("simulate", [(each, name) for each in clusters for name in names])}
    for cluster in clusters:
        predictions = {name: prediction for name in names
                       if (prediction := predicted[cluster.nodes, name]) is not None}
        seconds: dict[str, float] = {
            name: predictions[name].seconds for name in ALGORITHMS if name in predictions}
        choice, limit_s = selected(cluster, options.size, seconds), cluster.limit_s(options.size)
        for name, prediction in predictions.items():
            rows.append({
                "nodes": cluster.nodes, "ranks": cluster.ranks, "bytes": options.size,
                "algorithm": name, "ms": prediction.seconds * 1e3, "limit_ms": limit_s * 1e3,
                "efficiency_percent": prediction.percent_of(limit_s),
                "how": prediction.how, "selected": name == choice,
                "choice": "auto" if name == choice else ""})
    return rows


def _cores(about: Environment) -> int:
    """Return the number of cores that the simulated hosts of a lab shared; 0 for real hosts."""
    machines = {rank["host"] for rank in about["placement"]}
    return int(about["cores"]) if len(machines) == 1 else 0


def _against(path: str, costs: Cluster) -> list[Row]:
    """Return a prediction for each median that a benchmark has measured."""
    _, about, measured = read_json(path, {"allreduce": (_ABOUT, _MEASURED)})
    if about["ranks"] % about["nodes"]:
        raise ConfigError(f"{path}: allreduce of {about['ranks']} ranks on {about['nodes']} "
                          f"nodes; expected a `bench allreduce` with equal numbers on all nodes")
    cluster = replace(costs, nodes=about["nodes"], cores=_cores(about),
                      ranks_per_node=about["ranks"] // about["nodes"])
    rows = []
    for row in counted("simulate", measured):
        name, median_ms = _CONTENDERS.get(row["contender"]), row["median_us"] / 1e3
        if name is None or median_ms != median_ms:
            continue
        predicted = predict(name, cluster, row["bytes"])
        if predicted is not None:
            rows.append({
                "nodes": cluster.nodes, "ranks": cluster.ranks, "cores": cluster.cores,
                "bytes": row["bytes"], "size": size_text(row["bytes"]),
                "contender": row["contender"], "ms": predicted.seconds * 1e3,
                "measured_ms": median_ms, "ratio": predicted.seconds * 1e3 / median_ms})
    if not rows:
        raise ConfigError(f"{path}: no row has the time of an algorithm that can be predicted")
    return rows
