"""Strategies of a training step: averaged, compressed or sharded gradients, and local steps."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ...provisional import Array, Channel, Schedule, collectives, memory, operations
from .algorithms import SimulatedOperation, VectorBuild, gather, scatter
from .codecs import REDUCERS, CodecPrices, measured
from .profile import Profile, StepCompute
from .step import Compute, Flag, RankStep, StepTime, Workload, predict_step

# Number of DiLoCo's steps between synchronizations, and number of random draws of their times.
_LOCAL_STEPS, _DRAWS = 16, 8
_BYTES = np.dtype(np.uint8)


@dataclass(frozen=True)
class Strategy:
    """A way to train on several ranks.

    Attributes:
        loss: Degree to which it changes the training: 0 not at all, 1 by rounding gradients to 16
            bits, 2 to 8 bits, 3 by approximating them, 4 by local steps.
        predict: Function that returns the time of a step; None if the strategy makes no difference.
    """

    name: str
    loss: int
    predict: Callable[[Workload], StepTime | None]


DATA_PARALLEL = Strategy("DataParallel", 0, lambda work: predict_step(work, averaged))


def strategies(profile: Profile) -> list[Strategy]:
    """Return the strategies to compare; measures Reducers on this machine."""
    return [DATA_PARALLEL,
            Strategy("Sharded", 0, lambda work: predict_step(work, sharded)),
            Strategy("Sharded(overlap=True)", 0, _overlapped),
            Strategy('Sharded(weights="node")', 0, _once_per_node),
            *(Strategy(f"reducer={name}", loss, partial(_compressed, codec))
              for (name, loss, _), codec in zip(REDUCERS, measured(profile))),
            Strategy(f"DiLoCo(every={_LOCAL_STEPS})", 4, _local)]


# Gradients averaged

def _allreduce(call: SimulatedOperation, x: Array) -> Schedule[None]:
    """Run the mpiring algorithm that "auto" uses if nothing was measured.

    It is never MPI's own call, which is modeled separately, see mpich.py.
    """
    algorithm = "auto"
    if call.algorithm_of(x, "mean").name == "native":
        names = operations.candidates(call.size, len(call.nodes))
        algorithm = [name for name in names if name != "native"][-1]
    return call.allreduce(x, op="mean", algorithm=algorithm)


def averaged(workload: Workload, step: StepCompute, reduce: VectorBuild = _allreduce) -> RankStep:
    """Return a step of DataParallel: buckets are averaged as soon as they are full."""
    planned = RankStep()
    full, last = _backward(planned, workload, step, 0.0)
    if workload.cluster.ranks > 1:
        for bucket, flag in zip(workload.buckets, full):
            # Without overlap, they are sent at the end, one after the other.
            flag = flag if workload.overlaps else last
            last = planned.submit([flag], reduce, bucket)
    return planned


def _backward(planned: RankStep, workload: Workload, step: StepCompute,
              before_s: float) -> tuple[list[Flag], Flag]:
    """Compute the rest of a step; return an event for each full bucket, and one for the end.

    The part of the step that is already planned takes `before_s`.
    """
    flags = [Flag() for _ in (*workload.buckets, None)]
    for at_s, flag in zip([*workload.full_s(step), step.compute_s], flags):
        planned.computes.append(Compute(max(0.0, at_s - before_s), then=flag))
        before_s = max(before_s, at_s)
    return flags[:-1], flags[-1]


# Gradients compressed between nodes

def _compressed(codec: CodecPrices, workload: Workload) -> StepTime | None:
    if workload.cluster.nodes == 1:
        return None

    def reduce(call: SimulatedOperation, x: Array) -> Schedule[None]:
        yield from call.between_nodes(
            x, memory.bounds_of(x.size, call.slices),
            lambda net, part, _: _exchange(call, net, part, codec))

    return predict_step(workload, partial(averaged, reduce=reduce))


def _exchange(call: SimulatedOperation, net: Channel, part: Array,
              codec: CodecPrices) -> Schedule[bool]:
    """Take the time to exchange a slice: encode it, reduce or gather the result, and decode it."""
    piece_bytes = call.tuning.ring_bytes
    call.work(codec.encode_s * part.nbytes)
    reduced = call.vector(int(codec.reduced * part.nbytes), _BYTES)
    if reduced.size:
        n = collectives.ring.inbox_size(reduced.size, net.size, 1, piece_bytes)
        inbox = call.vector(n, _BYTES)
        yield from collectives.ring.allreduce(
            net, reduced, inbox, call.combiner("sum", _BYTES, net.size), piece_bytes)
    gathered = int(codec.gathered * part.nbytes)
    if gathered:
        yield from collectives.ring.allgather(
            net, [call.vector(gathered, _BYTES) for _ in range(net.size)], piece_bytes)
    call.work(codec.decode_s * part.nbytes)
    return True


# Gradients and updates in slices

def sharded(workload: Workload, step: StepCompute, *, once: bool = False) -> RankStep:
    """Return a step of Sharded: gradients are scattered, and updated weights gathered.

    With `once`, each node stores the weights once.
    """
    planned, buckets = RankStep(), workload.buckets
    # The updates are planned at the end, for slices only.
    full, _ = _backward(planned, workload, step, step.update_s)
    scattered = [planned.submit([flag], scatter, bucket) for bucket, flag in zip(buckets, full)]
    _update(planned, workload, step, range(len(buckets)), scattered, once=once)
    return planned


def _update(planned: RankStep, workload: Workload, step: StepCompute, order: Iterable[int],
            after: Sequence[Flag], *, once: bool = False) -> dict[int, Flag]:
    """Update slices of buckets, and gather their weights; return the event of each bucket."""
    buckets, arrived = workload.buckets, {}
    update_s = step.update_s / workload.cluster.ranks / sum(bucket.size for bucket in buckets)
    for index in order:
        updated = Flag()
        planned.computes.append(Compute(update_s * buckets[index].size, after, updated))
        arrived[index] = planned.submit([updated], partial(gather, once=once), buckets[index])
    return arrived


def _once_per_node(workload: Workload) -> StepTime | None:
    if workload.cluster.ranks_per_node == 1:
        return None
    return predict_step(workload, partial(sharded, once=True))


def _overlapped(workload: Workload) -> StepTime | None:
    began_s, ended_s = workload.profile.steps[0].forward_s
    # Without a recorded forward pass, there is no computation that could wait for weights.
    return predict_step(workload, _sharded_with_overlap) if began_s < ended_s else None


def _sharded_with_overlap(workload: Workload, step: StepCompute) -> RankStep:
    """Return a step that begins with the updates; the forward pass waits for each bucket's weights.

    The forward pass uses the buckets from the last to the first. Its time for a bucket is
    proportional to the time of the backward pass for that bucket.
    """
    planned, buckets, full_s = RankStep(), workload.buckets, workload.full_s(step)
    arrived = _update(planned, workload, step, reversed(range(len(buckets))), ())
    began_s, ended_s = step.forward_s
    planned.computes.append(Compute(max(0.0, began_s - step.update_s)))
    spans_s = [max(0.0, at_s - before_s) for before_s, at_s in zip([ended_s, *full_s], full_s)]
    for index in reversed(range(len(buckets))):
        share = spans_s[index] / (sum(spans_s) or 1.0)
        planned.computes.append(Compute((ended_s - began_s) * share, [arrived[index]]))
    full, _ = _backward(planned, workload, step, ended_s)
    for bucket, flag in zip(buckets, full):
        planned.submit([flag], scatter, bucket)
    return planned


# Local steps

def _local(workload: Workload) -> StepTime | None:
    """Return the mean time of DiLoCo's local steps, one in `_LOCAL_STEPS` with an average."""
    if workload.cluster.ranks == 1:
        return None

    def synchronized(work: Workload, step: StepCompute) -> RankStep:
        planned, last = RankStep(), list[Flag]()
        for bucket in work.buckets:
            last = [planned.submit(last, _allreduce, bucket)]
        return planned

    communication = predict_step(workload, synchronized, steps=1)
    times = np.array([step.compute_s for step in workload.profile.steps])
    drawn = np.random.default_rng(0).choice(
        times, (_DRAWS, workload.cluster.ranks, _LOCAL_STEPS))
    compute_s = float(drawn.mean(axis=2).max(axis=1).mean())
    return StepTime(compute_s + communication.seconds / _LOCAL_STEPS, compute_s,
                    communication.how)
