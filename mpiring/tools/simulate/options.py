"""Declares the command line of `python -m mpiring simulate`; works without any MPI library."""

import argparse

from .. import reporting
from ..arguments import above_zero, checked, positive
from ..units import parse_rate, parse_size, parse_time
from .cluster import Cluster
from .command import run

_DESCRIPTION = """\
Predicts the time of an allreduce on a cluster that is not here, by running the real
algorithms on a simulated network, without data and on a virtual clock. Where all nodes
do the same ("symmetry"), one of them is run, and stands for all; else all ranks are
("stepped"). MPI's own allreduce is a model of what MPICH does.

efficiency = byte limit / time. Between N nodes the limit is what each node's network
interface needs for 2(N-1)/N of the array, at bandwidth x goodput; on one node it is the
time of a copy of the array. Every measured number of your cluster makes it better: the
defaults are those of a usual InfiniBand cluster.

With --against, it predicts the sizes, hosts and ranks that a `bench allreduce --json`
has measured, and prints the deviation."""


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    usual = Cluster()
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(action=run)
    time, rate, size = checked(parse_time), checked(parse_rate), checked(parse_size)
    parser.add_argument("--nodes", type=_counts, default=_counts("64"), metavar="N or A,B,C",
                        help="powers of two up to N, and N; or these; default: 64")
    parser.add_argument("--ranks-per-node", type=positive, default=8, help="default: 8")
    parser.add_argument("--size", type=size, default=100_000_000, help="default: 100MB")
    between = parser.add_argument_group("between nodes")
    between.add_argument("--latency", type=time, default=usual.latency_s, help="default: 2us")
    between.add_argument("--bandwidth", type=rate, default=usual.bandwidth,
                         help="of a node's interface, each way; default: 100gbit")
    between.add_argument("--goodput", type=above_zero, default=usual.goodput, metavar="SHARE",
                         help="of it that is data; default: 0.97; TCP on Ethernet: 0.956")
    between.add_argument("--burst", type=checked(lambda text: parse_size(text, least=0)),
                         default=0, metavar="SIZE",
                         help="what passes at once after a pause, where the rate is limited "
                              "on average only: 128KiB in the lab; default: 0")
    ranks = parser.add_argument_group("of each rank, while all are at work")
    ranks.add_argument("--reduction-rate", type=rate, default=usual.reduction_rate,
                       help="of combining; default: 5GB/s")
    ranks.add_argument("--message-overhead", type=time, default=usual.overhead_s,
                       help="computing per message of our schedules in Python, at either "
                            "end; default: 5us")
    ranks.add_argument("--mpi-overhead", type=time, default=usual.mpi_overhead_s,
                       help="computing per message in MPI and the system, at either end: where "
                            "it is not in the latency, because ranks share cores; default: 0us")
    ranks.add_argument("--node-latency", type=time, default=usual.node_latency_s,
                       help="of a message within a node; default: 500ns")
    ranks.add_argument("--node-bandwidth", type=rate, default=usual.node_bandwidth,
                       help="of copies within a node; default: 5GB/s")
    ranks.add_argument("--barrier", type=time, default=usual.barrier_s,
                       help="of a barrier in a node's memory; default: 3us")
    parser.add_argument("--against", metavar="FILE.json",
                        help="compare with what `bench allreduce --json` has measured")
    reporting.declare(parser, "the predictions")


def _counts(text: str) -> list[int]:
    """Return the numbers in a list, or the powers of two up to a number, and the number."""
    parts = [positive(part.strip()) for part in text.split(",")]
    if len(parts) > 1:
        return sorted(set(parts))
    powers = [1 << power for power in range(parts[0].bit_length())]
    return sorted({*powers, parts[0]})
