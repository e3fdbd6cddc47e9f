"""Declares the options that describe a cluster, for all commands that predict."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ... import __version__
from ..arguments import checked, listed, positive, share
from ..results import command, now
from ..table import Environment
from ..units import parse_rate, parse_size, parse_time
from .cluster import MAX_RANKS, Cluster

# Options by group: the field of Cluster that each sets, its parser, and its help text.
_OPTIONS: Mapping[str, Sequence[tuple[str, str, Callable[[str], Any], str]]] = {
    "between nodes": (
        ("--latency", "latency_s", parse_time, "time of a message between nodes (default: 2us)"),
        ("--bandwidth", "bandwidth", parse_rate,
         "rate of a node's interface, each way, such as 100gbit or 5GB/s (default: 100gbit)"),
        ("--goodput", "goodput", share,
         "share of the bandwidth that is data, 0 to 1 (default: 0.97, for TCP on Ethernet 0.956)"),
        ("--burst", "burst_bytes", partial(parse_size, least=0, most=1 << 30),
         "bytes that pass at once after a pause if only the mean rate is limited, such as 128KiB "
         "in the lab (default: 0)")),
    "for each rank, while all ranks compute": (
        ("--reduction-rate", "reduction_rate", parse_rate,
         "rate at which combining reads and writes memory (default: 20GB/s)"),
        ("--message-overhead", "overhead_s", parse_time,
         "processor time per message in mpiring's schedules, at either end (default: 5us)"),
        ("--mpi-overhead", "mpi_overhead_s", parse_time,
         "processor time per message in MPI and the system, at either end, in addition to the "
         "latency, for ranks that share cores (default: 0us)"),
        ("--copy-rate", "copy_rate", parse_rate,
         "rate at which the system copies messages between nodes, at either end, as for TCP, on "
         "the core of the program (default: no copies)"),
        ("--node-latency", "node_latency_s", parse_time,
         "time of a message within a node (default: 500ns)"),
        ("--node-bandwidth", "node_bandwidth", parse_rate,
         "rate of copies within a node (default: 10GB/s)"),
        ("--barrier", "barrier_s", parse_time,
         "time of a barrier in a node's memory (default: 3us)"),
        ("--cores", "cores", partial(positive, least=0, most=MAX_RANKS),
         "number of cores that all nodes share, as in a lab (default: 0, one core per rank)"))}
_METAVARS: dict[Callable[[str], Any], str] = {
    parse_time: "TIME", parse_rate: "RATE", share: "SHARE"}


def declare_cluster(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a cluster, with its numbers of nodes."""
    parser.add_argument("--nodes", type=_counts, default=_counts("64"), metavar="N or A,B,C",
                        help="numbers of nodes, the powers of two up to N or a list (default: 64)")
    parser.add_argument("--ranks-per-node", type=positive, default=8, metavar="N",
                        help="number of ranks on each node (default: 8)")
    for title, prices in _OPTIONS.items():
        group = parser.add_argument_group(
            title, "times like 2us or 1ms, rates like 100gbit or 5GB/s")
        for option, field, parse, text in prices:
            group.add_argument(option, dest=field, type=checked(parse), help=text,
                               default=getattr(Cluster, field),
                               metavar=_METAVARS.get(parse, "N" if field == "cores" else "SIZE"))


def cluster_of(options: argparse.Namespace) -> Cluster:
    """Return the cluster that the options describe, with one node."""
    return Cluster(ranks_per_node=options.ranks_per_node, **{
        field: getattr(options, field) for prices in _OPTIONS.values() for _, field, *_ in prices})


def environment_of(cluster: Cluster, text: str) -> Environment:
    """Return the environment of predictions without a number of nodes; `text` begins "cluster"."""
    shared = f"; all on {cluster.cores} cores" if cluster.cores else ""
    return {
        "date": now(), "command": command(), "mpiring": __version__,
        "cluster": f"{text}{cluster.bandwidth * 8 / 1e9:g} Gbit/s × {cluster.goodput:g}, "
                   f"{cluster.latency_s * 1e6:g} µs; "
                   f"combining at {cluster.reduction_rate / 1e9:g} GB/s{shared}",
        **{name: value for name, value in vars(cluster).items() if name != "nodes"}}


def caveat_of(clusters: Sequence[Cluster]) -> str:
    """Return a warning if predictions are too short on some of these clusters; otherwise ""."""
    for cluster in clusters:
        if 0 < cluster.cores < cluster.ranks:
            return (f"# With more ranks than the {cluster.cores} cores, the system decides which "
                    f"ranks run first.\n"
                    f"# This is not simulated, so such predictions are lower bounds.")
    return ""


def _counts(text: str) -> list[int]:
    """Return the numbers in a list; for a single number, also the powers of two up to it."""
    numbers = listed(positive)(text)
    if len(numbers) == 1:
        numbers += [1 << power for power in range(numbers[0].bit_length())]
    return sorted(set(numbers))
