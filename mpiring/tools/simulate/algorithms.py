"""Simulates each algorithm, and the communication of a sharded step, on a cluster."""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from ...provisional import (
    Array, Channel, Collectives, Schedule, collectives, memory, operations, transport,
)
from ...simulated.network import cyclic, pairwise
from ...simulated.node import SimulatedMemory
from ...simulated.prices import PricedCombine, ghost
from . import mpich
from .cluster import Cluster, Symmetry

DTYPE = np.dtype(np.float32)
# With bursts, a call depends on earlier calls, which have emptied the token bucket. As in a
# benchmark, calls are repeated until they have sent this many bursts, at most this often.
_BURSTS, _CALLS = 8, 1000


class SimulatedTime(NamedTuple):
    """The predicted time of an algorithm, in seconds.

    The field `how` is "stepped" if all ranks were simulated, and "symmetry" if one node represented
    all nodes.
    """

    seconds: float
    how: str

    def percent_of(self, limit_s: float) -> float:
        """Return a limit of the time as a percentage of it; NaN if nothing takes time."""
        return 100 * limit_s / self.seconds if self.seconds else math.nan


class _Windows(transport.Windows):
    """Windows that contain the vectors of all ranks."""

    def position_of(self, x: Array) -> tuple[int, int]:
        return 0, 0

    def slices(self, node: transport.Node, positions: Sequence[tuple[int, ...]],
               x: Array) -> list[Array]:
        return [memory.slice_of(x, node.rank, node.size) for _ in positions]

    def vectors(self, positions: Sequence[tuple[int, ...]], x: Array) -> list[Array]:
        return [x[:] for _ in positions]


# Functions that return the schedule of a rank's operation, the second one on a vector.
Build = Callable[["SimulatedOperation"], Schedule[None]]
VectorBuild = Callable[["SimulatedOperation", Array], Schedule[None]]


class Simulation:
    """A simulated cluster that runs groups of operations, one group after the other.

    Attributes:
        symmetry: Symmetry by which one node represents all; None to simulate all ranks.
        nodes: Ranks of each node.
        how: "stepped" or "symmetry"; see SimulatedTime.
    """

    def __init__(self, cluster: Cluster, symmetry: Symmetry | None, *,
                 in_python: bool = True) -> None:
        self.cluster, self.symmetry = cluster, symmetry
        self.network = cluster.network(symmetry, in_python=in_python)
        self.memory = SimulatedMemory(
            self.network, barrier_s=cluster.barrier_s,
            slot_bytes=max(collectives.Tuning.short_bytes, collectives.Tuning.eager_bytes))
        r = cluster.ranks_per_node
        self.nodes = [range(first, first + r) for first in range(0, cluster.ranks, r)]
        self.how = "stepped" if symmetry is None else "symmetry"
        self._operations = 0

    def run(self, *builds: Build,
            programs: Sequence[Callable[[Channel], Schedule[None]]] = ()) -> None:
        """Run operations and other programs on all ranks at once.

        Programs advance after the operations; see SimulatedNetwork.run.
        """
        def operation(build: Build, number: int, net: Channel) -> Schedule[None]:
            return build(SimulatedOperation(self, net, number))

        self.network.run(*(partial(operation, build, number)
                           for number, build in enumerate(builds, self._operations)), *programs)
        self._operations += len(builds)


class SimulatedOperation(Collectives):
    """One rank's operation on vectors without memory: copying and combining only take time.

    The function `work` keeps the rank busy for a number of seconds.
    """

    __slots__ = ("_simulation", "work")

    def __init__(self, simulation: Simulation, net: Channel, number: int) -> None:
        super().__init__(operations.alone(net, simulation.nodes, _Windows()),
                         simulation.memory.node(net.rank, number), number)
        self._simulation = simulation
        self.work = partial(simulation.network.work, net.rank)

    def vector(self, n: int, dtype: DTypeLike = DTYPE) -> Array:
        """Return a vector without memory; copies into it take time."""
        rate = self._simulation.cluster.node_bandwidth
        return ghost(n, dtype, lambda nbytes: self.work(nbytes / rate))

    def borrow(self, n: int, dtype: DTypeLike) -> AbstractContextManager[Array]:
        """Lend a vector without memory."""
        return contextlib.nullcontext(self.vector(n, dtype))

    def combiner(self, op: str, dtype: "np.dtype[Any]", size: float) -> memory.Combine:
        """Return a Combine that only takes time."""
        cluster = self._simulation.cluster
        return PricedCombine(self.work, cluster.reduction_rate, cluster.node_bandwidth)

    def announced(self, schedule: Schedule[None]) -> Schedule[None]:
        """Run a schedule, and exchange the headers of the nodes, as `agreement.agreed` does."""
        r, net = self._simulation.cluster.ranks_per_node, self.net
        headers = []
        if self.node.rank == 0 and len(self.nodes) > 1:
            header, after = ghost(transport.HEADER_BYTES, np.uint8), (net.rank + r) % net.size
            # If one node represents all, and nodes exchange in pairs, the receiver sends its own.
            in_pairs = self._simulation.symmetry is pairwise
            before = after if in_pairs else (net.rank - r) % net.size
            headers = [net.irecv(header, before), net.isend(header, after)]
        first = next(schedule)
        yield (*headers, *first)
        yield from schedule


ALGORITHMS = tuple(name for name in operations.NAMES if name not in ("auto", "nccl"))
# A reduce-scatter of gradients and an allgather of weights. Each rank, or each node, has a copy of
# the weights.
SHARDED = ("sharded", "once per node")
# Algorithms in which all nodes send in a circle.
_CYCLIC = ("ring", "direct", "hierarchical", *SHARDED)


def symmetry_of(name: str, cluster: Cluster, nbytes: int) -> Symmetry | None:
    """Return the symmetry by which one node represents all; None if all ranks must be simulated."""
    tuning = collectives.Tuning()
    is_doubling = (name in _CYCLIC and name != "direct" and nbytes <= tuning.short_bytes
                   and cluster.nodes > tuning.direct_nodes)
    if name in SHARDED and is_doubling:
        # Nodes send in pairs in one half, and in a circle in the other.
        return None
    if name == "native" or is_doubling:
        # Exchanges in pairs are the same on all nodes if the number of nodes is a power of two.
        partners = cluster.ranks if name == "ring" else cluster.nodes
        return None if partners & partners - 1 else pairwise
    return cyclic if name in _CYCLIC else None


def predict(name: str, cluster: Cluster, nbytes: int, *, fold: bool = True) -> SimulatedTime | None:
    """Return the time of an allreduce on a cluster; None if the algorithm cannot run there.

    The name is one of ALGORITHMS or SHARDED. Without `fold`, all ranks are simulated even if one
    node could represent all.
    """
    schedule = _schedule(name, _case(cluster, nbytes))
    if schedule is None or cluster.ranks == 1:
        return None
    fold &= cluster.nodes > 1 and not cluster.cores
    symmetry = symmetry_of(name, cluster, nbytes) if fold else None
    n = math.ceil(nbytes / DTYPE.itemsize)
    simulation = Simulation(cluster, symmetry, in_python=name != "native")
    network = simulation.network
    for _ in range(_CALLS):
        last = cluster.nodes == 1 or network.bytes_between[0] >= _BURSTS * cluster.burst_bytes
        began_s = network.time_s = network.time_s + cluster.pause_s
        simulation.run(lambda call: schedule(call, call.vector(n)))
        if last:
            break
    return SimulatedTime(network.time_s - began_s, simulation.how)


def _case(cluster: Cluster, nbytes: int) -> operations.Case:
    return operations.Case(nbytes, DTYPE, "sum", cluster.ranks, cluster.nodes,
                           collectives.Tuning())


def _schedule(name: str, case: operations.Case) -> VectorBuild | None:
    """Return the function that builds the schedule of an algorithm; None if it cannot run."""
    if name in SHARDED:
        return lambda call, x: call.announced(_exchange(call, x, once=name == "once per node"))
    row = operations.named(name)
    if row is None or row.refusal(case):
        return None
    if name == "native":
        return lambda call, x: mpich.allreduce(
            call.net, call.node.size, x, call.vector(x.size),
            call.combiner("sum", DTYPE, call.size))
    return lambda call, x: call.announced(call.allreduce(x, algorithm=name))


def _exchange(call: SimulatedOperation, x: Array, *, once: bool) -> Schedule[None]:
    yield from scatter(call, x)
    yield from gather(call, x, once=once)


def scatter(call: SimulatedOperation, x: Array) -> Schedule[None]:
    """Run the reduce-scatter of gradients of a sharded step."""
    yield from call.reduce_scatter(x)


def gather(call: SimulatedOperation, x: Array, *, once: bool) -> Schedule[None]:
    """Run the allgather of weights of a sharded step; with `once`, each node stores them once."""
    return (call.allgather_once(x, bounds=memory.bounds_of(x.size, call.size)) if once else
            call.allgather(x))


def selected(cluster: Cluster, nbytes: int, seconds: Mapping[str, float]) -> str:
    """Return the algorithm that "auto" would use for a sum of float32, given the time of each."""
    model = operations.Model(tuple((name, operations.Curve(((nbytes, time_s),)))
                                   for name, time_s in seconds.items()))
    chosen = operations.choose(_case(cluster, nbytes), model=model)
    return {"eager": "shared", "short": "hierarchical", "doubling": "ring"}.get(
        chosen.name, chosen.name)
