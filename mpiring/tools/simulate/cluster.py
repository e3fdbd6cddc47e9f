"""Describes a cluster by a few numbers, and computes the least time of an allreduce on it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from ... import ConfigError
from ...simulated.network import SimulatedNetwork, SymmetricNetwork
from ...simulated.prices import Computing, Link

Symmetry = Callable[[int, int], int]
# Larger clusters and arrays would be simulated for hours: 1,000 ranks and 1 GB take seconds each.
MAX_RANKS, MAX_BYTES = 1 << 17, 64 << 30


def refuse_large(nbytes: int) -> None:
    """Raise ConfigError if the simulation of an array would take hours."""
    if not 0 < nbytes <= MAX_BYTES:
        raise ConfigError(f"an array of {nbytes} bytes: expected 1 to {MAX_BYTES}, which can be "
                          f"simulated within an hour")


@dataclass(frozen=True)
class Cluster:
    """Identical nodes with the same number of ranks, and their costs.

    Attributes:
        latency_s: Seconds of a message between nodes.
        bandwidth: Bytes per second of a node's network interface, each way.
        goodput: Share of the bandwidth that carries data.
        burst_bytes: Bytes that pass at the sender's full speed after a pause; see Link.
        overhead_s: CPU time per message of mpiring's schedules in Python, at either end.
        mpi_overhead_s: CPU time per message in MPI and the system, at either end.
        copy_rate: Bytes per second at which the system copies messages between nodes, at either
            end, as for TCP; 0 if the interface reads and writes memory directly.
        reduction_rate: Bytes per second that a rank reads and writes, while all ranks combine.
        node_latency_s, node_bandwidth: Latency in seconds, and bytes per second, of each rank's
            copies within a node.
        barrier_s: Seconds of a barrier in a node's shared memory.
        cores: Number of cores that all ranks share, as in a lab; 0 if each rank has its own core.
        gpus: Whether ranks compute on GPUs, while their cores send messages.

    Raises:
        ConfigError: It has so many ranks that its simulation would take hours.
    """

    nodes: int = 1
    ranks_per_node: int = 1
    latency_s: float = 2e-6
    bandwidth: float = 12.5e9
    goodput: float = 0.97
    burst_bytes: float = 0
    overhead_s: float = 5e-6
    mpi_overhead_s: float = 0.0
    copy_rate: float = 0.0
    reduction_rate: float = 20e9
    node_latency_s: float = 0.5e-6
    node_bandwidth: float = 10e9
    barrier_s: float = 3e-6
    cores: int = 0
    gpus: bool = False

    def __post_init__(self) -> None:
        if self.ranks > MAX_RANKS:
            raise ConfigError(f"{self.nodes} nodes with {self.ranks_per_node} ranks each: expected "
                              f"at most {MAX_RANKS} ranks, which can be simulated within an hour")

    @property
    def ranks(self) -> int:
        """Number of all ranks."""
        return self.nodes * self.ranks_per_node

    def of(self, nodes: int, ranks_per_node: int) -> "Cluster":
        """Return a cluster of another size with the same costs."""
        return replace(self, nodes=nodes, ranks_per_node=ranks_per_node)

    @property
    def pause_s(self) -> float:
        """Seconds of MPI's barrier, which benchmarks call before each timed call."""
        turns = max(1.0, self.ranks / self.cores) if self.cores else 1.0
        rounds = (self.ranks - 1).bit_length()
        return rounds * (self.latency_s + 2 * self.mpi_overhead_s * turns)

    def limit_s(self, nbytes: int) -> float:
        """Return the least time, in seconds, in which the bytes of an allreduce can be moved.

        Between N nodes, each interface sends and receives 2(N-1)/N of the array. Within a node,
        each rank reads and writes as many bytes as a copy of the array does.
        """
        if self.nodes == 1:
            return nbytes / self.node_bandwidth if self.ranks > 1 else 0.0
        share = 2 * (self.nodes - 1) / self.nodes
        return share * nbytes / (self.bandwidth * self.goodput)

    def network(self, symmetry: Symmetry | None, *, in_python: bool) -> SimulatedNetwork:
        """Return a simulated network of this cluster; by symmetry, one node represents all.

        With `in_python`, each message costs the overhead of schedules in Python.
        """
        between = Link(self.latency_s, self.bandwidth * self.goodput, self.burst_bytes)
        within = Link(self.node_latency_s, self.node_bandwidth)
        overhead_s = self.mpi_overhead_s + self.overhead_s * in_python
        computing = Computing(overhead_s, self.copy_rate or math.inf, self.cores)
        if symmetry is None:
            return SimulatedNetwork(
                self.ranks, node_of=self.ranks_per_node, payload=False, between=between,
                within=within, computing=computing)
        return SymmetricNetwork(self.nodes, self.ranks_per_node, symmetry, between=between,
                                within=within, computing=replace(computing, cores=0))
