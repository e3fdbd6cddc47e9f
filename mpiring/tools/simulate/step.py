"""Runs training steps on a simulated cluster, with recorded computing and the real schedules.

A rank computes in short slices, between which its messages advance. Operations in flight take
processor time from the compute, as on a rank with one core. Ranks draw their steps at random from
the recorded steps, so a step waits for the slowest rank, as real steps do. If one node stands for
all, each of its ranks computes as long as the slowest of all nodes.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import NamedTuple

import numpy as np

from ...buckets.bucket import plan, usual_bytes
from ...collectives.operation import Tuning
from ...config import Config
from ...simulated.network import SimulatedNetwork, cyclic
from ...simulated.node import SimulatedMemory
from ...transport.base import Channel, Schedule
from .algorithms import SimulatedOperation
from .cluster import Cluster
from .profile import Profile, StepCompute

# A rank computes for so long before it tests its messages.
_SLICE_S = 1e-3
# So many steps are run, and fewer if they take long, as the slowest of many ranks varies less.
_STEPS, _STEPS_OF_MANY, _MANY_RANKS = 5, 2, 1024
_SEED = 0


class Flag:
    """Something that a rank has done; as a request, its other schedules wait for it."""

    def __init__(self) -> None:
        self.is_set = False

    def test(self) -> bool:
        """Return whether it is done."""
        return self.is_set


class Compute(NamedTuple):
    """A part of the computing of a rank in a step, one after the other.

    Attributes:
        seconds: Seconds of computing.
        after: Event that it waits for.
        then: Event that is set at its end.
    """

    seconds: float
    after: Sequence[Flag] = ()
    then: Flag | None = None


class BucketOperation(NamedTuple):
    """An operation that a rank has in flight while it computes.

    Attributes:
        after: Event that its beginning waits for.
        build: Returns the schedule.
        done: Event that is set at its end.
    """

    after: Sequence[Flag]
    build: Callable[[SimulatedOperation], Schedule[None]]
    done: Flag


@dataclass
class RankStep:
    """The work of one rank in one step.

    Attributes:
        computes: Parts of computing, in their order.
        operations: Operations in their order, of which at most `in_flight` advance at once.
    """

    computes: list[Compute] = field(default_factory=list)
    operations: list[BucketOperation] = field(default_factory=list)

    def submit(self, after: Sequence[Flag],
               build: Callable[[SimulatedOperation], Schedule[None]]) -> Flag:
        """Add an operation; return what is set when it is complete."""
        in_flight = Config().operations_in_flight
        earlier = [operation.done for operation in self.operations[-in_flight:][:1]
                   if len(self.operations) >= in_flight]
        self.operations.append(BucketOperation([*after, *earlier], build, done := Flag()))
        return done


class TrainedBucket(NamedTuple):
    """A bucket of the model.

    Attributes:
        tensors: The numbers of its tensors, in the model's order.
        size: Number of elements.
        dtype: Of its elements.
    """

    tensors: Sequence[int]
    size: int
    dtype: "np.dtype[np.generic]"

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.size * self.dtype.itemsize


@dataclass(frozen=True)
class Workload:
    """A model on a cluster.

    Attributes:
        profile: Computing of its steps.
        cluster: The cluster.
        bucket_bytes: Argument of DataParallel.
    """

    profile: Profile
    cluster: Cluster
    bucket_bytes: int | None = None

    @functools.cached_property
    def buckets(self) -> Sequence[TrainedBucket]:
        """The buckets, in the order in which they are sent."""
        tensors = self.profile.tensors
        numbers = {tensor.name: number for number, tensor in enumerate(tensors)}
        nbytes = self.bucket_bytes or usual_bytes(self.cluster.nodes)
        return [TrainedBucket([numbers[tensor.name] for tensor in bucket.tensors], bucket.size,
                              bucket.dtype)
                for bucket in plan([tensors[number] for number in self.profile.order], nbytes)]

    def full_s(self, step: StepCompute) -> list[float]:
        """Return when each bucket can be sent: it is full, and so are those before."""
        times = [max(step.ready_s[number] for number in bucket.tensors) for bucket in self.buckets]
        return np.maximum.accumulate(times).tolist()  # type: ignore[no-any-return]

    @property
    def overlaps(self) -> bool:
        """Whether buckets are sent during the backward pass; see fill_only_node."""
        return self.profile.overlap or self.cluster.nodes > 1


Plan = Callable[[Workload, StepCompute], RankStep]


class StepTime(NamedTuple):
    """The predicted time of a step.

    Attributes:
        seconds: Mean of several steps.
        compute_s: Mean seconds of computing of the slowest rank.
        how: "stepped" or "symmetry"; see SimulatedTime.
    """

    seconds: float
    compute_s: float
    how: str


def predict_step(workload: Workload, planned: Plan, *, steps: int | None = None,
                 fold: bool = True) -> StepTime:
    """Return how long a training step takes.

    Args:
        workload: The model and the cluster.
        planned: Returns what a rank does in a step.
        steps: So many are run; by default a few.
        fold: False runs all ranks in any case.
    """
    cluster, rng = workload.cluster, np.random.default_rng(_SEED)
    steps = steps or (_STEPS if cluster.ranks < _MANY_RANKS else _STEPS_OF_MANY)
    folded = fold and cluster.nodes > 1 and not cluster.cores
    run = _Run(cluster, folded)
    seconds, computing = [], []
    for _ in range(steps):
        computes = _drawn(workload.profile, cluster, rng, folded=folded)
        ranks = [planned(workload, compute) for compute in computes]
        computing.append(max(sum(part.seconds for part in rank.computes) for rank in ranks))
        seconds.append(run.step(ranks))
    return StepTime(fmean(seconds), fmean(computing), "symmetry" if folded else "stepped")


def _drawn(profile: Profile, cluster: Cluster, rng: np.random.Generator, *,
           folded: bool) -> list[StepCompute]:
    """Return what each rank that is run computes in a step."""
    if not folded:
        return [profile.steps[i] for i in rng.integers(len(profile.steps), size=cluster.ranks)]
    rows = rng.integers(len(profile.steps), size=(cluster.ranks_per_node, cluster.nodes))
    return [slowest([profile.steps[i] for i in set(row)]) for row in rows.tolist()]


def slowest(steps: Sequence[StepCompute]) -> StepCompute:
    """Return a step that gets to each point when the last of these steps does."""
    return StepCompute(
        max(step.update_s for step in steps),
        (max(step.forward_s[0] for step in steps), max(step.forward_s[1] for step in steps)),
        tuple(np.max([step.ready_s for step in steps], axis=0).tolist()),
        max(step.compute_s for step in steps), max(step.step_s for step in steps))


class _Run:
    """Steps that follow each other on one cluster.

    Args:
        folded: The ranks of one node stand for all.
    """

    def __init__(self, cluster: Cluster, folded: bool) -> None:
        self._cluster, self._folded, r = cluster, folded, cluster.ranks_per_node
        self._nodes = [range(first, first + r) for first in range(0, cluster.ranks, r)]
        self._network = cluster.network(cyclic if folded else None, in_python=True)
        tuning = Tuning()
        self._memory = SimulatedMemory(
            self._network, barrier_s=cluster.barrier_s,
            slot_bytes=max(tuning.short_bytes, tuning.eager_bytes))
        self._operations = 0

    def step(self, ranks: Sequence[RankStep]) -> float:
        """Run a step; return its seconds.

        Args:
            ranks: Work of each rank, with equally many operations.
        """
        network, began_s = self._network, self._network.time_s

        def operation(index: int, number: int) -> Callable[[Channel], Schedule[None]]:
            def program(net: Channel) -> Schedule[None]:
                call = SimulatedOperation(
                    self._cluster, self._nodes, network, self._memory, net, number)
                if self._folded:
                    # A network on which nodes send in a circle cannot carry exchanges in pairs:
                    # the shortest buckets go straight to all nodes.
                    call.tuning = replace(call.tuning, direct_nodes=net.size)
                return _operated(call, ranks[net.rank].operations[index])

            return program

        count = len(ranks[0].operations)
        # Last, so that arrived messages advance before the next slice of computing.
        network.run(*(operation(index, self._operations + index) for index in range(count)),
                    lambda net: _computed(network, net.rank, ranks[net.rank].computes))
        self._operations += count
        return network.time_s - began_s


def _operated(call: SimulatedOperation, operation: BucketOperation) -> Schedule[None]:
    yield operation.after
    yield from call.announced(operation.build(call))
    operation.done.is_set = True


def _computed(network: SimulatedNetwork, rank: int, computes: Sequence[Compute]) -> Schedule[None]:
    for compute in computes:
        yield compute.after
        left_s = compute.seconds
        while left_s > 0:
            network.work(rank, min(left_s, _SLICE_S), on_own_core=True)
            left_s -= _SLICE_S
            yield (network.worked(rank),)
        if compute.then is not None:
            compute.then.is_set = True
            # Operations that waited for it begin before the next slice.
            yield (network.worked(rank),)
