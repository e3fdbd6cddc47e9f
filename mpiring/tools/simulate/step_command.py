"""The command `mpiring simulate step`: predicts training steps from a trace."""

import argparse
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ... import ConfigError, __version__
from .. import table
from ..arguments import UsageError, checked
from ..busy import busy_warning, processor_use
from ..plot import CLUSTER, Drawing, over_nodes
from ..results import check_files, declare_files, write_files
from ..table import Column, Row
from ..terminal import line_width
from ..units import parse_size, ranks_on_nodes, size_text
from .cluster import Cluster
from .counted import counted
from .options import caveat_of, cluster_of, declare_cluster, environment_of
from .profile import Profile, read_profile
from .step import Workload, predict_step
from .strategies import DATA_PARALLEL, averaged, strategies

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DESCRIPTION = """\
Predicts the training steps of a job on another cluster, from the trace of a short run. The trace
contains the compute time of each step, and the time when each gradient was ready. Record it with
DataParallel and a plain optimizer, on one or more ranks:

    MPIRING_TRACE=FOLDER mpirun -n 1 python train.py

The real schedules then run on a simulated cluster, whose ranks repeat steps that are drawn at
random from the trace. Each rank computes as much as in the trace, for any number of ranks. The
efficiency is the time of a step without communication divided by the time of a step.

With --compare, it also predicts steps with Sharded, with Reducers and with DiLoCo, and recommends
one. It measures the codecs of Reducers on this machine, with tensors of the model. With --against,
it predicts the steps of other traces for their numbers of nodes and ranks, and prints the
deviation."""

_COLUMNS = [
    Column("nodes", 6), Column("ranks", 7), Column("strategy", -25), Column("step_ms", 8, 4),
    Column("compute_ms", 10, 4), Column("exposed_ms", 10, 3),
    Column("efficiency_percent", 12, 3, "efficiency %"), Column("how", -8)]
_AGAINST = [
    Column("nodes", 6), Column("ranks", 7), Column("trace", -30),
    Column("step_ms", 12, 4, "predicted ms"), Column("measured_ms", 12, 4),
    Column("ratio", 9, 3, "pred/meas")]
_RESULT = "Codecs are measured too slow, and Reducers may not be recommended although they pay."
# Precision of predictions; a strategy that saves less than this is not recommended.
_WORTHWHILE = 0.1
_LOSSES = ("", "rounds gradients to 16 bits", "rounds gradients to 8 bits",
           "approximates gradients, and sends the errors with later ones",
           "averages weights after local steps, not gradients")


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = _DESCRIPTION
    parser.set_defaults(action=run)
    parser.add_argument("--trace", required=True, metavar="FOLDER",
                        help="folder with the traces of a job")
    parser.add_argument("--job", metavar="NAME",
                        help="name of the job, or its beginning, if the folder has several")
    parser.add_argument("--bucket-bytes", type=checked(parse_size), metavar="SIZE",
                        help="length of a bucket, such as 4MiB (default: as in DataParallel)")
    parser.add_argument("--compare", action="store_true", help="also predict other strategies")
    parser.add_argument("--against", nargs="+", metavar="FOLDER", default=[],
                        help="folders of other traces, to compare their steps with predictions")
    declare_cluster(parser)
    declare_files(parser, "the predictions")


def run(options: argparse.Namespace) -> int:
    """Predict, print, and write files; return the exit status.

    Raises:
        UsageError: Options cannot be combined.
        ConfigError: The trace lacks compute times.
    """
    if options.against and (options.plot or options.compare):
        raise UsageError("--against compares one prediction for each trace; leave out "
                         "--compare and --plot")
    check_files(options)
    profile, cluster = read_profile(options.trace, options.job), cluster_of(options)
    about = {
        **environment_of(cluster, f"{cluster.ranks_per_node} ranks per node, "),
        "recorded": f"recorded: {profile.caption}; {size_text(profile.nbytes)} of gradients in "
                    f"{len(profile.tensors)} tensors, {1e3 * profile.compute_s:.4g} ms of compute"}
    columns = _AGAINST if options.against else _COLUMNS
    print(table.note(f"mpiring {__version__} simulate step: {about['cluster']}"))
    print(table.note(about["recorded"]))
    if options.compare and (warning := busy_warning([processor_use()], _RESULT)):
        print("\n" + warning)
    rows = list((_against if options.against else _scaling)(options, profile, cluster))
    if options.compare:
        # The table may be longer than the screen, so the recommendation is above it.
        for text in verdict([row for row in rows if row["nodes"] == rows[-1]["nodes"]]):
            print("\n" + textwrap.fill(text, line_width()))
        print()
    table.show(rows, columns)
    if caveat := caveat_of([cluster.of(row["nodes"], row["ranks"] // row["nodes"])
                            for row in rows]):
        print(caveat)
    write_files("steps against" if options.against else "predicted steps", about, rows, options,
                DRAWINGS)
    return 0


def _scaling(options: argparse.Namespace, profile: Profile, cluster: Cluster) -> Iterator[Row]:
    """Yield a prediction for each number of nodes and each strategy."""
    # A cluster that is too large is refused before others are simulated.
    workloads = [Workload(profile, cluster.of(nodes, cluster.ranks_per_node), options.bucket_bytes)
                 for nodes in options.nodes]
    compared = strategies(profile) if options.compare else [DATA_PARALLEL]
    for workload, strategy in counted("simulate step", [
            (workload, strategy) for workload in workloads for strategy in compared]):
        predicted = strategy.predict(workload)
        if predicted is not None:
            yield {
                "nodes": workload.cluster.nodes, "ranks": workload.cluster.ranks,
                "strategy": strategy.name, "step_ms": 1e3 * predicted.seconds,
                "compute_ms": 1e3 * predicted.compute_s,
                "exposed_ms": 1e3 * max(0.0, predicted.seconds - predicted.compute_s),
                "efficiency_percent": 100 * profile.compute_s / predicted.seconds,
                "how": predicted.how, "loss": strategy.loss}


def _against(options: argparse.Namespace, profile: Profile, costs: Cluster) -> Iterator[Row]:
    """Yield a prediction next to the measured step of each trace."""
    for folder in counted("simulate step", options.against):
        other = read_profile(folder, None)
        if other.ranks % other.nodes:
            raise ConfigError(f"{folder}: {other.caption}; expected equally many ranks on each")
        cluster = costs.of(other.nodes, other.ranks // other.nodes)
        seconds = predict_step(Workload(profile, cluster, options.bucket_bytes), averaged).seconds
        yield {"nodes": cluster.nodes, "ranks": cluster.ranks, "trace": folder,
               "step_ms": 1e3 * seconds, "measured_ms": 1e3 * other.step_s,
               "ratio": seconds / other.step_s}


def verdict(rows: Sequence[Row]) -> Iterator[str]:
    """Yield sentences that recommend one of the strategies; the first row is for DataParallel."""
    dense = rows[0]
    where = f"{ranks_on_nodes(dense['ranks'], dense['nodes'])}:"
    faster = [row for row in rows if row["step_ms"] <= (1 - _WORTHWHILE) * dense["step_ms"]]
    if not faster:
        yield (f"{where} take DataParallel: no other strategy is predicted to save "
               f"{100 * _WORTHWHILE:.0f} % of its step.")
        return
    least = min(row["loss"] for row in faster)
    advised = min((row for row in faster if row["loss"] == least),
                  key=lambda row: row["step_ms"])
    text = f"{where} take {advised['strategy']}, predicted to take {_share(advised, dense)}"
    yield (text + (f". It {_LOSSES[least]}." if least else ", with the same training.")
           + _origin(advised, dense))
    fastest = min(rows, key=lambda row: row["step_ms"])
    if fastest["step_ms"] <= (1 - _WORTHWHILE) * advised["step_ms"]:
        yield (f"{fastest['strategy']} is predicted to take {_share(fastest, dense)}. It "
               f"{_LOSSES[fastest['loss']]}: only training can tell what that costs in accuracy."
               f"{_origin(fastest, dense)}")


def _origin(row: Row, dense: Row) -> str:
    """Return a sentence that divides the gain of a strategy into compute and communication."""
    saved_ms = {part: dense[key] - row[key] for part, key in (
        ("compute", "compute_ms"), ("exposed communication", "exposed_ms"))}
    return " Per step: " + ", ".join(
        f"{table.significant(abs(ms), 3)} ms {'more' if ms < 0 else 'less'} {part}"
        for part, ms in saved_ms.items()) + "."


def _share(row: Row, dense: Row) -> str:
    return f"{row['step_ms'] / dense['step_ms']:.2f} of the time of DataParallel's step"


def _curves(axes: "Sequence[Axes]", rows: Sequence[Row]) -> None:
    """Draw time and efficiency over the number of nodes, a curve per strategy."""
    over_nodes(axes, rows, "strategy", "step_ms")
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("time of a step (ms)")
    axes[1].set_ylabel("compute alone / step (%)")


DRAWINGS = {"predicted steps": Drawing(_curves, {}, about=CLUSTER)}
