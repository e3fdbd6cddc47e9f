"""Averages named tensors in buckets, which are sent in an agreed order once they are full."""

import difflib
import functools
import logging
import math
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any, NoReturn

import numpy as np

from ..arguments import number, refuse_other_state
from ..buckets.bucket import Bucket, BucketPlan, TensorSpec
from ..communicator import Communicator
from ..engine.handle import Handle
from ..engine.prepared import Pattern
from ..engine.queued import QueuedHandle
from ..errors import ConfigError, GradientError
from ..memory.arrays import dtype_name
from ..operations.agreement import Call
from ..record.flight import Flight
from ..record.statistics import Statistics, statistics_of
from ..reducers.compressor import Cost
from ..text import count, first_few
from .autotune import Autotuner, is_wanted
from .fused import BucketReduction, FusedTensors, Fusion, Placement
from .replicas import Replicas
from .search import Choice
from .weighing import Weighing

# A rank checks this many bytes of means for NaN and Inf in 30 to 140 µs. If there are more bytes,
# each rank checks its slices only, and a short message distributes the result.
_LONGEST_CHECK_BYTES = 1 << 20
# Number of steps after a step with nonfinite means in which all gradients are checked. This takes
# 1.0 to 1.7 % of a step (13 MB in 80 ms: 0.8 to 1.4 ms), and a check of the last bucket 0.1 %. The
# last bucket holds the gradients of the first layers, which every NaN of later layers reaches.
_FULL_CHECKS = 10
# After this many nonfinite steps in a row, a large loss scale can no longer be the reason.
HOPELESS_STEPS = 10

_log = logging.getLogger("mpiring")


class Averager(FusedTensors):
    """Averages tensors in buckets over ranks while later tensors are still being written.

    In a step, write tensors into `views`, mark each with `ready`, and call `wait`. Buckets are sent
    in the same order on all ranks.

    Args:
        before: Averager that this one replaces between two steps; see `_continue`.
        overlap: If true, send buckets as soon as they are full. Otherwise `wait` sends them, one
            after another, since ranks compute on all cores until then. The same on all ranks.

    Attributes:
        steps: Number of completed steps.
        updates: Number of optimizer steps since the last completed step; the adapter counts them.
        label: Description of the current step, if the adapter counts steps; see `step_label`.
        compared: Strings by source, for example a description of an optimizer's last update. Ranks
            compare these strings when they send the next buckets.
        scatters: If true, only this rank's slices of the buckets receive means; see `scatter`.
        costs: Records of this step's operations, including those on gradients in no bucket.
        weighing: Weighing whose factor multiplies gradients before they are ready.
        replicas: Replicas that an optimizer compares before it updates them; None if the adapter
            does so.

    FusedTensors documents the other arguments and attributes, and the errors. Collective, blocking.
    """

    def __init__(self, tensors: Sequence[TensorSpec], comm: Communicator,
                 fusion: Fusion = Fusion(), placement: Placement = Placement(), *,
                 weighing: Weighing | None = None, before: "Averager | None" = None,
                 overlap: bool = True) -> None:
        super().__init__(tensors, comm, fusion, placement)
        self._overlaps = overlap
        self._autotuner = Autotuner(comm, overlaps=overlap) if is_wanted(fusion, comm) else None
        self.weighing = weighing or Weighing(comm)
        self.nonfinite = NonFinite(comm)
        # Function that adds up the costs of the last completed step, since few programs ask.
        self._statistics: Callable[[], Statistics] = Statistics
        self.costs: list[Flight] = []
        self._agreement = comm.prepared(
            Call("finite"), Pattern("allreduce", "max", np.dtype(np.bool_), 1))
        self.replicas: Replicas | None = None
        self.compared: dict[str, str] = {}
        self.label = ""
        self.steps, self.updates, self.scatters = 0, 0, False
        self._last = StepMeans(-1, (), _finite_means)
        self._last.is_ended = True
        # Time at which each tensor became ready in the current step, in the order of these times.
        self._ready_s: dict[str, float] = {}
        # Reductions of the sent buckets; None for a completed reduction without overlap.
        self._handles: list[Handle[None] | None] = []
        # Trace that already describes these tensors.
        self._described_in: object = None
        # Ratio of the current scale of the tensors to their scale in the previous step.
        self._rescaled = 1.0
        self._optimizer: Callable[[], Any] = _no_optimizer
        if before is not None:
            self._continue(before)
        comm.prepare()

    def _continue(self, before: "Averager") -> None:
        """Continue the training of another Averager, and its tuning if it has demanded this one."""
        self.weighing, self.nonfinite, self.replicas = (
            before.weighing, before.nonfinite, before.replicas)
        self.compared, self.label = before.compared, before.label
        self.steps, self._last, self._statistics = before.steps, before._last, before._statistics
        self._autotuner = None
        if self.tensors == before.tensors and (
                self.choice.bucket_bytes == before.choice.bucket_bytes):
            self._apply(before.choice)
            self._autotuner = before._autotuner

    @property
    def finite(self) -> bool:
        """Whether all means of the last completed step are finite; the same on all ranks.

        True before the first step. On a GPU, this may wait until the means are complete.
        """
        return self._last.finite

    @property
    def statistics(self) -> Statistics:
        """The costs of the last completed step's operations only."""
        return self._statistics()

    @property
    def step_label(self) -> str:
        """The description of the current step and of the model, which ranks compare."""
        step = self.label or f"step {self.steps}"
        if not self.label and self.updates > min(self.steps, 1):
            # This rank has skipped a step of other ranks, unless all ranks have several optimizers.
            step += f" ({self.updates} optimizer steps since its last averaged backward pass)"
        return f"{step} {self.weighing.model}".rstrip()

    @property
    def step_started(self) -> bool:
        """Whether a step has begun, which means that at least one tensor is ready."""
        return bool(self._ready_s)

    @property
    def missing(self) -> list[str]:
        """The names of the tensors that are not ready in this step."""
        return [name for name, bucket in self.home.items() if name in bucket.missing]

    def expects(self, name: str) -> bool:
        """Return whether a tensor must still be marked as written in this step."""
        return name in self.home[name].missing

    def ready(self, name: str) -> None:
        """Mark a tensor as written; send each bucket that is full if all earlier buckets are sent.

        Raises GradientError if the name is unknown, or was already marked in this step. Collective,
        over a step.
        """
        bucket = self.home.get(name) if isinstance(name, str) else None
        if bucket is None or name not in bucket.missing:
            self._refuse_name(name)
        if not self._ready_s:
            self._begin_step()
        bucket.missing.remove(name)
        if self.stream is not None:
            bucket.written.append(self.stream.mark())
        self._ready_s[name] = time.monotonic()
        while self._overlaps and len(self._handles) < len(self.buckets):
            bucket = self.buckets[len(self._handles)]
            if bucket.missing:
                break
            self._handles.append(self._send(bucket))
        if not self._comm.threaded:
            self._comm.poke()

    def _begin_step(self) -> None:
        # The GPU has means of the last step long before, since it has also computed this gradient.
        self._end_last_step()
        if self.compressors and self.loaded_order is not None:
            self._load_reducers()

    def _refuse_name(self, name: str) -> NoReturn:
        if isinstance(name, str) and name in self.home:
            raise GradientError(
                f"rank {self._comm.rank}: gradient {name!r} was marked ready twice; call wait() "
                f"after each backward pass, and ready() once per gradient between two waits")
        close = difflib.get_close_matches(str(name), self.home, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(self.home)}"
        raise GradientError(f"rank {self._comm.rank}: there is no gradient {name!r}; {hint}")

    def _send(self, bucket: Bucket) -> Handle[None] | None:
        self.nonfinite.check(bucket, last=bucket is self.buckets[-1])
        reduction = self.reductions[bucket.index]
        bucket.finite = None
        prepared = reduction.scatter if self.scatters else reduction.reduce
        detail = ", ".join(
            [f"{prepared.call.detail} in {self.step_label}", *self.compared.values()])
        call = Call("scatter" if self.scatters else "reduce", detail, bucket.label,
                    prepared.call.nbytes)
        if self._overlaps:
            return prepared.start(bucket.flat, None, call)
        prepared.run(bucket.flat, call, self.costs)
        return None

    def wait(self, elsewhere: Sequence[str] = (), *, finite: bool = True) -> None:
        """Wait until every tensor is the mean over ranks, and end the step. Collective, blocking.

        `elsewhere` names this rank's nonfinite gradients that are in no bucket; `finite` is false
        if any rank has such gradients. Raises GradientError if some tensors were not marked ready.
        """
        waited_s, missing = time.monotonic(), self.missing
        if missing:
            raise GradientError(
                f"rank {self._comm.rank}: wait() with {len(missing)} of {len(self.home)} "
                f"gradients missing: {', '.join(missing)}; call ready(name) for each, also for one "
                f"that is zero in this step")
        self._last = self._await_means(elsewhere, finite)
        if not self._last.is_queued:
            self._end_last_step()
        cost = Cost()
        for compressor in self.compressors:
            cost += compressor.take_cost()
            compressor.commit_step(self.finite)
        self._statistics = functools.partial(
            _statistics_of, self.costs, self._comm.size, cost, self.dense_bytes, self.reducers)
        self._comm.tunable.reducers.update(self.reducers)
        self.costs = []
        for bucket in self.buckets:
            bucket.expect_all()
        self.steps, self.updates, self._rescaled = self.steps + 1, 0, 1.0
        self.compared.pop("rescale", None)
        self._record_step(waited_s)
        if self._autotuner is not None and self._autotuner.end_step(
                self, fixed=self.scatters or bool(self.compressors)):
            self._autotuner = None

    def use(self, choice: Choice) -> None:
        # A rank with different settings would wait for messages that no rank sends.
        self.compared["choice"] = f"with {'/'.join(map(str, astuple(choice)))}"
        super().use(choice)

    def skip_report(self) -> None:
        """Do not report the last completed step, because the user has asked for its result."""
        self._last.is_known = True

    def _end_last_step(self) -> None:
        """Exchange the names of nonfinite gradients in the last step, unless this was done.

        Collective, blocking.
        """
        last = self._last
        if not last.is_ended:
            last.is_ended = True
            self.nonfinite.end_step(last)
            for overflows in last.uses:
                self._report_use(overflows)

    def note_use(self, overflows: Any = None) -> None:
        """Record that an optimizer is about to use the means; warn if they are not finite.

        If the means are queued on a GPU, the warning comes in the next step. An optimizer that
        `overflows`, a tensor or truth value, skips such a step.
        """
        if self._last.is_ended:
            self._report_use(overflows)
        else:
            self._last.uses.append(overflows)

    def _report_use(self, overflows: Any) -> None:
        # A tensor on a GPU is read only if necessary.
        if self.nonfinite.unreported and not overflows:
            self.nonfinite.report()

    def _await_means(self, elsewhere: Sequence[str], finite: bool) -> "StepMeans":
        """Wait for all means, which may then be queued on a GPU; for the arguments see `wait`."""
        queued: list[Any] = [
            handle for handle in self._handles if isinstance(handle, QueuedHandle)]
        if not queued and self.device is not None:
            queued = [handle for handle, reduction in zip(self._handles, self.reductions)
                      if handle is not None and self._tells_finite(handle, reduction)]
        if not queued or len(queued) < len(self.buckets) or (
                self.scatters or self.compressors or self.nonfinite.checks_all):
            is_finite, bad_means = self._checked_means()
            return StepMeans(self.steps, elsewhere, lambda: (is_finite and finite, bad_means))
        self._handles.clear()
        # The GPU does them in this order.
        queued[-1].wait()
        self.costs += [handle.flight for handle in queued]
        return StepMeans(self.steps, elsewhere, functools.partial(
            _queued_means, finite, [bucket.plan for bucket in self.buckets], queued),
            is_queued=True)

    def _tells_finite(self, handle: Handle[None], reduction: BucketReduction) -> bool:
        """Return whether an operation that was not queued at once tells of NaN and Inf."""
        if not self.queues(reduction.reducer):
            return False
        handle.wait()
        return handle.tells_finite

    def _checked_means(self) -> tuple[bool, list[str]]:
        """Return whether all means are finite, and the names of nonfinite means on this rank."""
        shares_check = self.scatters or sum(
            bucket.flat.nbytes for bucket in self.buckets) > _LONGEST_CHECK_BYTES
        rank, size = (self._comm.rank, self._comm.size) if shares_check else (0, 1)
        for bucket in self.buckets:
            if bucket.index == len(self._handles):
                self._handles.append(self._send(bucket))
            handle = self._handles[bucket.index]
            if handle is not None:
                handle.wait()
                self.costs.append(handle.flight)
            if isinstance(handle, QueuedHandle):
                bucket.finite = handle.has_finite_result()
            elif bucket.finite is None:
                # This overlaps with later buckets in flight.
                start, stop = bucket.bounds(size)[rank:rank + 2]
                bucket.finite = bucket.holds_finite(bucket.flat[start:stop])
            if self.scatters:
                bucket.mark_as_junk(but=self.own_slice(bucket))
        self._handles.clear()
        finite = all(bucket.finite for bucket in self.buckets)
        bad_means = [name for bucket in self.buckets if not bucket.finite
                     for name in bucket.nonfinite_names(*bucket.bounds(size)[rank:rank + 2])]
        if shares_check:
            bad = np.array([not finite])
            self._agreement.run(bad, Call("finite", self.step_label))
            finite = not bad[0]
        if self.scatters and not finite:
            for bucket in self.buckets:
                bucket.poison()
        return finite, bad_means

    def _record_step(self, waited_s: float) -> None:
        """Record the end of a step; in a new trace, also describe the tensors."""
        recorder = self._comm.recorder
        if recorder.trace is not None and recorder.trace is not self._described_in:
            self._described_in = recorder.trace
            recorder.trace.model(
                tensors=[[spec.name, list(spec.shape), dtype_name(spec.dtype)]
                         for spec in self.tensors.values()], overlap=self._overlaps,
                reducers=self.reducers, nodes=len(self._comm.memory_groups))
        recorder.end_step(waited_s, self.weighing.end_step(),
                          [self._ready_s[name] for name in self.tensors])
        self._ready_s.clear()

    # Between two steps

    def rescale(self, factor: float) -> None:
        """Multiply the state of Reducers by the ratio of the tensors' new scale to their old one.

        Raises ConfigError if the factor is not a finite number above 0.
        """
        factor = number(f"rank {self._comm.rank}: factor", factor,
                        lambda x: 0 < x < math.inf, "a finite number above 0")
        for compressor in self.compressors:
            compressor.rescale(factor)
        self._rescaled *= factor
        self.compared["rescale"] = f"rescaled by {self._rescaled:.15g}"

    def own_state_dict(self) -> dict[str, Any]:
        """Return this rank's own state: the order of the tensors, and the state of its Reducers."""
        return {"order": self.order,
                "reducers": [compressor.state_dict() for compressor in self.compressors]}

    def load_own_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the result of `own_state_dict` on this rank; other buckets may then be due.

        Raises ConfigError if the state belongs to another model or to other Reducers, and
        GradientError if a step has begun.
        """
        self._refuse_during_step("load_own_state_dict()")
        refuse_other_state(state, ("order", "reducers"), "of a DataParallel")
        states = state["reducers"]
        if len(states) != len(self.compressors):
            raise ConfigError(
                f"rank {self._comm.rank}: the state has {count(len(states), 'reducer')}, but the "
                f"model has {len(self.compressors)}; resume with the reducers that were saved")
        for compressor, reducer_state in zip(self.compressors, states):
            compressor.load_state_dict(reducer_state)
        if state["order"] is not None:
            self._demand(order=state["order"])

    def close(self) -> None:
        """Release the buckets and Reducers, which other buckets, also of another model, can use."""
        operations = self._comm.config.operations_in_flight
        if self.choice.operations != operations:
            self._comm.tunable.operations_in_flight = operations
        for compressor in self.compressors:
            compressor.release()
        self.buckets, self.reductions, self.views, self.home = [], [], {}, {}

    def _refuse_during_step(self, call: str) -> None:
        if self._ready_s:
            raise GradientError(f"rank {self._comm.rank}: {call} during a step; call it between "
                                f"wait() and the next ready()")

    # Slices

    def scatter(self) -> None:
        """From the next step on, give each rank the means of its slices only; see `own_slice`.

        After a step, the other elements of the buckets are undefined, with a NaN in each tensor
        that is not completely in the slices. If a slice of any rank contains NaN or Inf, all
        buckets of all ranks are filled with NaN. Tuning ends.

        Raises GradientError if a step has begun. Collective.
        """
        self._refuse_during_step("scatter()")
        if self._autotuner is not None and self._autotuner.first is not None:
            # The settings of a trial may be slow.
            self.use(self._autotuner.first)
            self._autotuner = None
        self.scatters = True

    def bounds(self, bucket: Bucket) -> Sequence[int]:
        """Return the offsets that cut a bucket into slices, one per rank.

        Without `scatter`, every rank has the complete bucket: [0, size].
        """
        return bucket.bounds(self._comm.size) if self.scatters else [0, bucket.plan.size]

    def own_slice(self, bucket: Bucket) -> slice:
        """Return the elements of a bucket that belong to this rank."""
        bounds, rank = self.bounds(bucket), self._comm.rank if self.scatters else 0
        return slice(bounds[rank], bounds[rank + 1])

    @property
    def optimizer(self) -> Any:
        """The optimizer that has claimed the tensors, while it exists; otherwise None."""
        return self._optimizer()

    def refuse_claim(self, *, scatters: bool) -> None:
        """Raise ConfigError if `claim` is not possible, and GradientError if a step has begun.

        It is not possible if another optimizer updates the tensors, or has done so with slices.
        """
        other = self.optimizer
        if other is not None:
            raise ConfigError(
                f"rank {self._comm.rank}: {other!r} updates this model already; give groups of "
                f"parameters separate settings by groups=, or delete that optimizer first")
        if self.scatters and not scatters:
            raise ConfigError(
                f"rank {self._comm.rank}: this model's gradients are scattered, for a sharded "
                f"optimizer; pass sharded=True, or wrap the model again")
        if scatters:
            self._refuse_during_step("scatter()")

    def claim(self, optimizer: object, *, scatters: bool) -> None:
        """Let one optimizer update the tensors, after `refuse_claim` has passed on all ranks.

        If it `scatters`, it updates slices; see `scatter`. Collective.
        """
        if scatters:
            self.scatter()
        if self.replicas is not None:
            self.replicas.by_optimizer = True
        self._optimizer = weakref.ref(optimizer)


def _statistics_of(flights: Sequence[Flight], ranks: int, cost: Cost, dense_bytes: int,
                   reducers: tuple[str, ...]) -> Statistics:
    return replace(statistics_of(flights, ranks), dense_bytes=dense_bytes, encode_s=cost.encode_s,
                   wire_s=cost.wire_s, decode_s=cost.decode_s, reducers=reducers)


class StepMeans:
    """The means of a completed step.

    Args:
        elsewhere: Names of this rank's nonfinite gradients that are in no bucket.
        check: Function that returns whether all means of all ranks are finite, and the names of
            nonfinite means on this rank. It may wait for a GPU.

    Attributes:
        number, elsewhere, is_queued: Arguments of the same names.
        is_ended: If true, ranks have exchanged the names of nonfinite gradients.
        is_known: If true, the user has asked whether the means are finite, or was told.
        uses: For each use by an optimizer, whether it overflowed; see Averager.note_use.
    """

    def __init__(self, number: int, elsewhere: Sequence[str],
                 check: Callable[[], tuple[bool, list[str]]], *, is_queued: bool = False) -> None:
        self.number, self.elsewhere, self.is_queued = number, elsewhere, is_queued
        self._check = check
        self.is_ended = self.is_known = False
        self.uses: list[Any] = []

    @functools.cached_property
    def _result(self) -> tuple[bool, list[str]]:
        return self._check()

    @property
    def finite(self) -> bool:
        """Whether all means of all ranks are finite."""
        return self._result[0]

    @property
    def bad_means(self) -> list[str]:
        """The names of nonfinite means on this rank."""
        return self._result[1]


def _queued_means(finite: bool, plans: Sequence[BucketPlan],
                  handles: Sequence[Handle[None]]) -> tuple[bool, list[str]]:
    """Return whether all means are finite, and the names of tensors in buckets with others."""
    names = [tensor.name for plan, handle in zip(plans, handles) if not handle.has_finite_result()
             for tensor in plan.tensors]
    return finite and not names, names


def _finite_means() -> tuple[bool, list[str]]:
    """Return the result of a check before the first step."""
    return True, []


def _no_optimizer() -> None:
    """Return None, like a weak reference to an optimizer that does not exist."""


class NonFinite:
    """Finds NaN and Inf in the gradients of all ranks before they are averaged.

    A NaN in one rank's gradient makes the mean NaN on all ranks, and the mean overwrites the
    gradient. In each step, each rank therefore checks the bucket that is sent last. In the ten
    steps after a step with nonfinite means, it checks all buckets. Ranks exchange names only if
    means are not finite.

    `by_rank` has the names of nonfinite gradients in the last completed step; the same on all
    ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        self.by_rank: Mapping[int, Sequence[str]] = {}
        self._comm = comm
        # Names of nonfinite gradients of this rank, and of nonfinite means.
        self._names: list[str] = []
        self._means: Sequence[str] = ()
        self._last = StepMeans(-1, (), _finite_means)
        self._steps_in_row = self._full_checks_left = 0
        self._is_reported = self._has_checked_all = False

    def check(self, bucket: Bucket, *, last: bool) -> None:
        """Check a bucket that is about to be sent, if it is the last one or all are checked.

        The last bucket on a GPU is an exception, since the check would wait for backward.
        """
        if self._full_checks_left or last and bucket.device is None:
            self._names += bucket.nonfinite_names(0, bucket.plan.size)

    @property
    def unreported(self) -> bool:
        """Whether `report` would log the last completed step; the same on all ranks."""
        return self._steps_in_row > 0 and not (self._is_reported or self._last.is_known)

    @property
    def checks_all(self) -> bool:
        """Whether all buckets of this step are checked before they are sent."""
        return self._full_checks_left > 0

    def end_step(self, means: "StepMeans") -> None:
        """Complete a step. Collective, blocking."""
        names, self._names = [*self._names, *means.elsewhere], []
        self._last = means
        if means.finite:
            self.by_rank, self._steps_in_row, self._is_reported = {}, 0, False
            self._full_checks_left = max(0, self._full_checks_left - 1)
            return
        ranks = self._comm.allgather_object((names, means.bad_means))
        self.by_rank = {rank: names for rank, (names, _) in enumerate(ranks) if names}
        self._means = sorted({name for _, bad_means in ranks for name in bad_means})
        self._has_checked_all = self._full_checks_left > 0
        self._full_checks_left = _FULL_CHECKS
        self._steps_in_row += 1
        if self._steps_in_row == HOPELESS_STEPS and not self._is_reported:
            self._warn(f"; it was the {HOPELESS_STEPS}th such step in a row, which no loss scale "
                       f"explains")

    def report(self) -> None:
        """Warn on rank 0 that nonfinite gradients are used, once for several steps in a row."""
        if self.unreported:
            self._warn()

    def _warn(self, more: str = "") -> None:
        # The next step checks all buckets; a second warning can then name a rank unknown now.
        self._last.is_known = True
        self._is_reported = bool(self.by_rank) or self._has_checked_all
        if self._comm.rank:
            return
        before = ("NaN or Inf in gradients before they were averaged, and so in the means of all "
                  "ranks")
        if self.by_rank:
            unseen = "" if self._has_checked_all else (
                " (of those that leave last: others were not looked at)")
            text = f"{before}: {_described(self.by_rank)}{unseen}"
        elif self._has_checked_all:
            text = (f"NaN or Inf in the means of {first_few(self._means, 3)}, although all ranks' "
                    f"gradients were finite: their sum exceeds the range of the dtype, or a "
                    f"Reducer writes NaN or Inf")
        else:
            text = (f"{before}, of {first_few(self._means, 3)} (of an unknown rank: these were not "
                    f"looked at before; in the next {_FULL_CHECKS} steps all are)")
        _log.warning("step %d: %s%s", self._last.number, text, more)


def _described(names_by_rank: Mapping[int, Sequence[str]]) -> str:
    """Return the ranks and names as a string, in which ranks with the same names are grouped."""
    ranks_by_names: dict[tuple[str, ...], list[str]] = {}
    for rank, names in names_by_rank.items():
        ranks_by_names.setdefault(tuple(names), []).append(str(rank))
    return first_few([
        f"rank{'s' * (len(ranks) > 1)} {first_few(ranks, 8)} in {first_few(names, 3)}"
        for names, ranks in ranks_by_names.items()], 4, "; ")
