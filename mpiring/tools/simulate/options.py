"""The options that describe a cluster, of all commands that predict."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..arguments import above_zero, checked, not_negative, positive
from ..units import parse_rate, parse_size, parse_time
from .cluster import Cluster

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
    ("--copy-rate", "copy_rate", parse_rate,
     "of what the system copies of a message between nodes, at either end, as for TCP: it takes "
     "the processor from the compute; by default it copies nothing"),
    ("--node-latency", "node_latency_s", parse_time,
     "of a message within a node; default: 500ns"),
    ("--node-bandwidth", "node_bandwidth", parse_rate,
     "of copies within a node; default: 10GB/s"),
    ("--barrier", "barrier_s", parse_time, "of a barrier in a node's memory; default: 3us"),
    ("--cores", "cores", not_negative,
     "of one machine that all nodes share, as in a lab; default: 0, a core for each rank"))
_OPTIONS = (("between nodes", _BETWEEN_NODES), ("of each rank, while all are at work", _OF_RANKS))


def declare_cluster(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a cluster, and of how many nodes it has."""
    parser.add_argument("--nodes", type=_counts, default=_counts("64"), metavar="N or A,B,C",
                        help="powers of two up to N, and N; or these; default: 64")
    parser.add_argument("--ranks-per-node", type=positive, default=8, help="default: 8")
    for title, prices in _OPTIONS:
        group = parser.add_argument_group(title)
        for option, field, parse, text in prices:
            group.add_argument(option, dest=field, type=checked(parse), help=text,
                               metavar=option[2:].upper(), default=getattr(Cluster, field))


def cluster_of(options: argparse.Namespace) -> Cluster:
    """Return the cluster that the options describe, with one node."""
    return Cluster(ranks_per_node=options.ranks_per_node, **{
        field: getattr(options, field) for _, prices in _OPTIONS for _, field, *_ in prices})


def caption_of(cluster: Cluster) -> str:
    """Return a cluster in words, without the number of its nodes."""
    shared = f"; all on {cluster.cores} cores" if cluster.cores else ""
    return (f"{cluster.bandwidth * 8 / 1e9:g} Gbit/s × {cluster.goodput:g}, "
            f"{cluster.latency_s * 1e6:g} µs; "
            f"combining at {cluster.reduction_rate / 1e9:g} GB/s{shared}")


def caveat_of(clusters: Sequence[Cluster]) -> str:
    """Return a line for predictions that are too short on some of these clusters, else ""."""
    crowded = [cluster for cluster in clusters if 0 < cluster.cores < cluster.ranks]
    if not crowded:
        return ""
    return (f"# With more ranks than the {crowded[0].cores} cores, the system decides who computes "
            f"while a message waits. That is not simulated: such a prediction is the least time.")


def _counts(text: str) -> list[int]:
    """Return the numbers in a list, or the powers of two up to a number, and the number."""
    parts = [positive(part.strip()) for part in text.split(",")]
    if len(parts) > 1:
        return sorted(set(parts))
    powers = [1 << power for power in range(parts[0].bit_length())]
    return sorted({*powers, parts[0]})
