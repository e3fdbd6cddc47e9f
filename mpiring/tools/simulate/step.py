"""Simulates training steps on a cluster, with recorded compute times and the real schedules.

A rank computes in short slices, between which its messages advance. Operations in flight take
processor time from computation, as on a rank with one core. If ranks compute on GPUs, neither
delays the other. Ranks draw their steps at random from the recorded steps, so a step waits for the
slowest rank, as real steps do. If one node represents all nodes, each of its ranks computes as long
as the slowest rank in the same place on any node.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from statistics import fmean
from typing import NamedTuple

import numpy as np

from ... import Config
from ...provisional import Schedule, buckets
from ...simulated.network import cyclic
from .algorithms import SimulatedOperation, Simulation, VectorBuild
from .cluster import Cluster
from .profile import Profile, StepCompute

# Time that a rank computes before it tests its messages; more in steps that compute longer than
# this number of slices.
_SLICE_S, _SLICES = 1e-3, 10_000
# Number of simulated steps; fewer with many ranks, because the slowest of many ranks varies less.
_STEPS, _STEPS_OF_MANY, _MANY_RANKS = 5, 2, 1024
_SEED = 0


class Flag:
    """An event on one rank; schedules of this rank can wait for it as for a request."""

    def __init__(self) -> None:
        self.is_set = False

    def test(self) -> bool:
        """Return whether the event has happened."""
        return self.is_set


class Compute(NamedTuple):
    """A part of the computation of a rank in a step; the parts run one after the other.

    It waits for the events `after`, and sets the event `then` at its end.
    """

    seconds: float
    after: Sequence[Flag] = ()
    then: Flag | None = None


class BucketOperation(NamedTuple):
    """An operation that a rank has in flight while it computes.

    It begins when the events `after` are set, and sets the event `done` at its end.
    """

    after: Sequence[Flag]
    build: VectorBuild
    bucket: buckets.BucketPlan
    done: Flag


@dataclass
class RankStep:
    """The work of one rank in one step, in order; Config limits the operations in flight."""

    computes: list[Compute] = field(default_factory=list)
    operations: list[BucketOperation] = field(default_factory=list)

    def submit(self, after: Sequence[Flag], build: VectorBuild, bucket: buckets.BucketPlan) -> Flag:
        """Add an operation on a bucket; return the event that is set when it is complete."""
        in_flight = Config().operations_in_flight
        if len(self.operations) >= in_flight:
            after = [*after, self.operations[-in_flight].done]
        self.operations.append(BucketOperation(after, build, bucket, done := Flag()))
        return done


@dataclass(frozen=True)
class Workload:
    """A model on a cluster."""

    profile: Profile
    cluster: Cluster
    bucket_bytes: int | None = None

    @cached_property
    def buckets(self) -> Sequence[buckets.BucketPlan]:
        """The buckets, in the order in which they are sent."""
        return buckets.plan(buckets.backward_order(self.profile.tensors),
                            self.bucket_bytes or buckets.usual_bytes(self.cluster.nodes))

    def full_s(self, step: StepCompute) -> list[float]:
        """Return the time at which each bucket, and all buckets before it, are full."""
        ready_s = {tensor.name: at_s for tensor, at_s in zip(self.profile.tensors, step.ready_s)}
        times = [max(ready_s[tensor.name] for tensor in bucket.tensors) for bucket in self.buckets]
        return np.maximum.accumulate(times).tolist()  # type: ignore[no-any-return]

    @property
    def overlaps(self) -> bool:
        """Whether buckets are sent during the backward pass; see fill_only_node."""
        return self.profile.overlap or self.cluster.nodes > 1


Plan = Callable[[Workload, StepCompute], RankStep]


class StepTime(NamedTuple):
    """The predicted time of a step, as a mean of several steps, in seconds.

    The compute time is that of the slowest rank; for `how`, see SimulatedTime.
    """

    seconds: float
    compute_s: float
    how: str


def predict_step(workload: Workload, planned: Plan, *, steps: int | None = None,
                 fold: bool = True) -> StepTime:
    """Return the time of a training step, from a few steps by default.

    The function `planned` returns the work of a rank in a step. For `fold`, see `predict`.
    """
    cluster, rng = workload.cluster, np.random.default_rng(_SEED)
    steps = steps or (_STEPS if cluster.ranks < _MANY_RANKS else _STEPS_OF_MANY)
    folded = fold and cluster.nodes > 1 and not cluster.cores
    simulation = Simulation(cluster, cyclic if folded else None)
    seconds, computing = [], []
    for _ in range(steps):
        computes = _draw(workload.profile, cluster, rng, folded=folded)
        ranks = [planned(workload, compute) for compute in computes]
        computing.append(max(sum(part.seconds for part in rank.computes) for rank in ranks))
        seconds.append(_run_step(simulation, ranks))
    return StepTime(fmean(seconds), fmean(computing), simulation.how)


def _draw(profile: Profile, cluster: Cluster, rng: np.random.Generator, *,
          folded: bool) -> list[StepCompute]:
    """Draw the recorded step that each simulated rank computes."""
    if not folded:
        return [profile.steps[i] for i in rng.integers(len(profile.steps), size=cluster.ranks)]
    rows = rng.integers(len(profile.steps), size=(cluster.ranks_per_node, cluster.nodes))
    return [slowest([profile.steps[i] for i in set(row)]) for row in rows.tolist()]


def slowest(steps: Sequence[StepCompute]) -> StepCompute:
    """Return a step that reaches each point when the last of these steps does."""
    return StepCompute(
        max(step.update_s for step in steps),
        (max(step.forward_s[0] for step in steps), max(step.forward_s[1] for step in steps)),
        tuple(np.max([step.ready_s for step in steps], axis=0).tolist()),
        max(step.compute_s for step in steps), max(step.step_s for step in steps))


def _run_step(simulation: Simulation, ranks: Sequence[RankStep]) -> float:
    """Run a step of ranks with equally many operations; return its seconds."""
    def operate(index: int, call: SimulatedOperation) -> Schedule[None]:
        after, build, bucket, done = ranks[call.rank].operations[index]
        yield after
        if simulation.symmetry is not None:
            # A network on which nodes send in a circle cannot carry exchanges in pairs, so the
            # shortest buckets go straight to all nodes.
            call.tuning = replace(call.tuning, direct_nodes=call.size)
        yield from call.announced(build(call, call.vector(bucket.size, bucket.dtype)))
        done.is_set = True

    network, began_s = simulation.network, simulation.network.time_s
    # Computing advances last, so that arrived messages advance before its next slice.
    simulation.run(*(partial(operate, index) for index in range(len(ranks[0].operations))),
                   programs=[lambda net: _computed(simulation, net.rank, ranks[net.rank].computes)])
    return network.time_s - began_s


def _computed(simulation: Simulation, rank: int, computes: Sequence[Compute]) -> Schedule[None]:
    network, on_gpu = simulation.network, simulation.cluster.gpus
    slice_s = max(_SLICE_S, sum(compute.seconds for compute in computes) / _SLICES)
    gpu_done_s = network.time_s
    for compute in computes:
        yield compute.after
        left_s = compute.seconds
        if on_gpu:
            # The GPU waits for operations, but not for the core.
            gpu_done_s = max(gpu_done_s, network.time_s) if compute.after else gpu_done_s
            gpu_done_s, left_s = gpu_done_s + left_s, 0.0
            yield (network.worked(rank, gpu_done_s),)
        while left_s > 0:
            network.work(rank, min(left_s, slice_s), on_own_core=True)
            left_s -= slice_s
            yield (network.worked(rank),)
        if compute.then is not None:
            compute.then.is_set = True
            # Operations that waited for it begin before the next slice.
            yield (network.worked(rank),)
