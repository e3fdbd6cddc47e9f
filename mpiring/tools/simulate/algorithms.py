"""Runs each algorithm of an allreduce on a simulated cluster: one table, a line for each."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ...collectives import direct, hierarchical, ring, shared
from ...memory.arrays import Array, slice_of
from ...operations.model import Curve, Model
from ...operations.select import choose
from ...simulated.symmetry import cyclic, pairwise
from ...simulated.network import SimulatedNetwork
from ...simulated.node import SimulatedMemory
from ...simulated.prices import PricedCombine, ghost
from ...transport.base import HEADER_BYTES, Channel, Schedule
from . import mpich
from .cluster import Cluster, Symmetry

DTYPE = np.dtype(np.float32)
# With bursts a call depends on those before it, which have emptied the bucket of tokens: as
# in a benchmark, calls follow each other, until they have sent so many bursts.
_BURSTS = 8


@dataclass(frozen=True)
class Prediction:
    """What was found for one algorithm.

    Attributes:
        seconds: Of one call.
        how: "stepped": all ranks were run; "symmetry": one node's, as all do the same.
    """

    seconds: float
    how: str


class _Rank:
    """One rank of a run: what its schedule needs."""

    def __init__(self, cluster: Cluster, network: SimulatedNetwork, memory: SimulatedMemory,
                 net: Channel, operation: int) -> None:
        self.cluster, self.net = cluster, net
        self.node = memory.node(net.rank, operation)
        self.combine = PricedCombine(network, net.rank, cluster.reduction_rate)
        self._network = network

    def array(self, n: int) -> Array:
        """Return a vector without memory; copies into it take time."""
        rank, rate = self.net.rank, self.cluster.node_bandwidth
        return ghost(n, DTYPE, lambda nbytes: self._network.work(rank, nbytes / rate))


@dataclass(frozen=True)
class Algorithm:
    """What the algorithms differ in.

    Attributes:
        schedule: Returns the allreduce of n elements, for a rank.
        suits: Whether it can be used on a cluster.
        symmetry: Returns how one node stands for all; None where none can.
        in_python: It is ours.
    """

    schedule: Callable[[_Rank, int], Schedule[None]]
    suits: Callable[[Cluster], bool]
    symmetry: Callable[[Cluster], Symmetry | None] = lambda cluster: cyclic
    in_python: bool = True


def _announced(rank: _Rank, schedule: Schedule[None]) -> Schedule[None]:
    """Run a schedule as `agreement.agreed` does: nodes tell the next one what they were asked."""
    r, net = rank.cluster.ranks_per_node, rank.net
    headers = []
    if rank.node.rank == 0 and rank.cluster.nodes > 1:
        header = ghost(HEADER_BYTES, np.uint8)
        headers = [net.irecv(header, (net.rank - r) % net.size),
                   net.isend(header, (net.rank + r) % net.size)]
    first = next(schedule)
    yield (*headers, *first)
    yield from schedule


def _ring(rank: _Rank, n: int) -> Schedule[None]:
    inbox = rank.array(ring.inbox_size(n, rank.net.size, DTYPE.itemsize))
    return ring.allreduce(rank.net, rank.array(n), inbox, rank.combine)


def _direct(rank: _Rank, n: int) -> Schedule[None]:
    inbox = rank.array(direct.inbox_size(n, rank.net.size, DTYPE.itemsize))
    return direct.allreduce(rank.net, rank.array(n), inbox, rank.combine)


def _shared(rank: _Rank, n: int) -> Schedule[None]:
    node = rank.node
    # One of an array's places after the other, as in Collectives: they are shared first.
    yield from node.share(0)
    slices = [slice_of(rank.array(n), node.rank, node.size) for _ in node.ranks]
    yield from shared.in_place(node, slices, rank.combine)


def _hierarchical(rank: _Rank, n: int) -> Schedule[None]:
    cluster, node = rank.cluster, rank.node
    r = cluster.ranks_per_node
    nodes = [range(first, first + r) for first in range(0, cluster.ranks, r)]
    levels = hierarchical.Levels(rank.combine, rank.combine, False)
    if n * DTYPE.itemsize <= hierarchical.SHORT_BYTES:
        inbox = rank.array((len(nodes) - 1) * n)
        return (yield from hierarchical.short(
            rank.net, nodes, node, rank.array(n), inbox, levels))
    # Where the vectors are is shared first, as in Collectives.
    yield from node.share(0)
    inside = hierarchical.in_windows(node, [rank.array(n) for _ in node.ranks], levels.within)
    inbox = rank.array(hierarchical.inbox_size(n, DTYPE.itemsize, nodes, levels))
    yield from hierarchical.allreduce(rank.net, nodes, inside, node, rank.array(n), inbox, levels)


def _native(rank: _Rank, n: int) -> Schedule[None]:
    return mpich.allreduce(rank.net, rank.cluster.ranks_per_node, rank.array(n), rank.array(n),
                           rank.combine)


def _in_pairs(cluster: Cluster) -> Symmetry | None:
    """Exchanges in pairs are alike on all nodes where these are a power of two."""
    return None if cluster.nodes & cluster.nodes - 1 else pairwise


ALGORITHMS = {
    "ring": Algorithm(_ring, lambda cluster: True),
    "direct": Algorithm(_direct, lambda cluster: cluster.nodes > 1),
    "hierarchical": Algorithm(
        _hierarchical, lambda cluster: 1 < cluster.nodes < cluster.ranks),
    "shared": Algorithm(_shared, lambda cluster: cluster.nodes == 1),
    "native": Algorithm(_native, lambda cluster: True, _in_pairs, in_python=False),
}


def predict(name: str, cluster: Cluster, nbytes: int, *, fold: bool = True) -> Prediction | None:
    """Return how long an allreduce takes on a cluster; None where the algorithm cannot run.

    Args:
        name: Of ALGORITHMS.
        nbytes: Of the array.
        fold: False runs all ranks in any case.
    """
    algorithm = ALGORITHMS[name]
    if not algorithm.suits(cluster) or cluster.ranks == 1:
        return None
    fold &= cluster.nodes > 1 and not cluster.cores
    symmetry = algorithm.symmetry(cluster) if fold else None
    n = math.ceil(nbytes / DTYPE.itemsize)
    network = cluster.network(symmetry, in_python=algorithm.in_python)
    memory = SimulatedMemory(network, barrier_s=cluster.barrier_s,
                             slot_bytes=hierarchical.SHORT_BYTES)
    operation, last = 0, False
    while not last:
        last = cluster.nodes == 1 or network.bytes_between[0] >= _BURSTS * cluster.burst_bytes
        began_s = network.time_s = network.time_s + cluster.pause_s

        def program(net: Channel, operation: int = operation) -> Schedule[None]:
            rank = _Rank(cluster, network, memory, net, operation)
            schedule = algorithm.schedule(rank, n)
            return _announced(rank, schedule) if algorithm.in_python else schedule

        network.run(program)
        operation += 1
    return Prediction(network.time_s - began_s, "stepped" if symmetry is None else "symmetry")


def selected(cluster: Cluster, nbytes: int, seconds: Mapping[str, float]) -> str:
    """Return the algorithm that "auto" would take for a sum of float32.

    Args:
        seconds: By algorithm, what the ranks would have measured on such a cluster.
    """
    model = Model(tuple((name, Curve(((nbytes, time_s),))) for name, time_s in seconds.items()))
    chosen = choose(nbytes, DTYPE, "sum", "auto", cluster.ranks, cluster.nodes, model)
    return {"eager": "shared", "short": "hierarchical"}.get(chosen, chosen)
