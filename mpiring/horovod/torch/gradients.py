"""Counts backward passes, and averages the gradients that an optimizer will use."""

import contextlib
import functools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter

from ... import BufferMismatchError, Communicator, GradientError
from ...provisional import adapter, first_few, launch, same_on_all, training
from ...reducers import Reducer
from ...torch import share_cores
from ..lending import Loan, give_back
from ..ops import OP_NAMES, Average, Sum
from ..process_sets import ProcessSet
from ..reducing import reducer_for
from ..requests import STEP
from ..world import world

GradientBuckets = adapter.gradients.GradientBuckets


@dataclass(frozen=True)
class Combination:
    """Settings of the combination of gradients over ranks.

    Attributes:
        op, compression, predivide: Arguments of `reducer_for`.
        groups: Groups of parameters that are sent together, or their number, or None.
        sparse_as_dense: If true, sparse gradients are sent as dense gradients.
        eager: If true, gradients are sent when complete; otherwise, at the end of the step.
    """

    op: int
    compression: Any
    predivide: float
    groups: Sequence[Sequence[torch.Tensor]] | int | None
    sparse_as_dense: bool
    eager: bool

    def reducer(self, comm: Communicator | None = None) -> Reducer:
        """Return a Reducer for gradients that the ranks of a communicator average."""
        return reducer_for(self.op, self.compression, self.predivide, comm)

    def gathers(self, gradient: torch.Tensor | None) -> bool:
        """Return whether a gradient is sent in sparse form."""
        return (gradient is not None and gradient.layout is torch.sparse_coo
                and self.op in (Average, Sum) and not self.sparse_as_dense)

    def grouped(self, parameters: Mapping[str, Parameter]) -> list[list[str]]:
        """Return the names of each group; parameters without a group come last, each alone."""
        names = list(parameters)
        if self.groups is None:
            return [names]
        if isinstance(self.groups, int):
            ends = [i * len(names) // self.groups for i in range(self.groups + 1)]
            return [names[start:end] for start, end in zip(ends, ends[1:]) if start < end]
        name_of = {p: name for name, p in parameters.items()}
        groups = [[name_of.pop(p) for p in group if p in name_of] for group in self.groups]
        return [group for group in groups if group] + [[name] for name in name_of.values()]


class SumWeighing(training.Weighing):
    """Weighs each gradient by the number of ranks, so that the mean is the sum."""

    @property
    def factor(self) -> float:
        """The number of ranks."""
        return float(self._comm.size)


class StepGradients:
    """The gradients of an optimizer, counted and averaged.

    A complete gradient is withheld from its parameter until all ranks' gradients are averaged, even
    if it has not been sent yet. A program that changes gradients thus gets the same error on one
    node and on many nodes. A gradient can be read if it will only be sent in `finish`.

    The gradients of a parameter are averaged from the first step in which all ranks have the
    parameter. Gradients of ranks outside of the process set remain unchanged. `passes` backward
    passes complete a gradient; `counts` has those of this step. Steps have the same name on all
    ranks.
    """

    def __init__(self, names: Mapping[Parameter, str], process_set: ProcessSet,
                 combination: Combination, passes: int, name: str) -> None:
        self.passes, self._name = passes, name
        self.counts: dict[Parameter, int] = {}
        self.names, self._process_set = dict(names), process_set
        self._combination = combination
        self._base: Communicator | None = None
        self._buckets: list[GradientBuckets] = []
        self._buckets_of: dict[Parameter, GradientBuckets] = {}
        # Number of sparse dimensions of gradients that are averaged in dense form.
        self._sparse_dims: dict[Parameter, int] = {}
        self._hooked: set[Parameter] = set()
        self._withheld = adapter.withheld.WithheldGradients(
            functools.partial(_refusal, process_set))
        self._hooks = contextlib.ExitStack()
        self._hooks.callback(self._withheld.release)
        self._loans: list[Loan] = []
        self._hooks.callback(give_back, self._loans, self.counts)
        weakref.finalize(self, self._hooks.close).atexit = False
        self._hook(names)

    @property
    def comm(self) -> Communicator | None:
        """Communicator of the ranks, or None if this rank does not average with other ranks."""
        if self._process_set.included() is False:
            return None
        comm = self._process_set.comm
        return comm if comm.size > 1 else None

    def _hook(self, parameters: Iterable[Parameter]) -> None:
        for p in parameters:
            if p.requires_grad and p not in self._hooked:
                self._hooked.add(p)
                self._hooks.enter_context(
                    p.register_post_accumulate_grad_hook(
                        adapter.modules.weak_hook(self._count_pass)))

    def _count_pass(self, p: Parameter) -> None:
        """Count a backward pass; send the gradient after the last pass."""
        comm = self.comm
        if comm is None:
            return
        count = self.counts.get(p, 0) + 1
        if count > self.passes:
            raise _too_many_passes(comm.rank, self.names[p])
        self.counts[p] = count
        if not self._combination.eager:
            return
        # After an elastic restart, ranks have another communicator from the next step on.
        buckets = self._buckets_of.get(p) if comm is self._base else None
        if buckets is not None:
            self._put(buckets, self.names[p], complete=count == self.passes)
        if count == self.passes:
            # In a bucket, it may be in flight, or be multiplied for a sum.
            self._withheld.withhold(
                self.names[p], p, readable=self._combination.op != Sum and not (
                    buckets is not None and buckets.sends_early))

    def _put(self, buckets: GradientBuckets, name: str, *, complete: bool) -> None:
        """Put a gradient into its bucket; a sparse one may have to be averaged in dense form."""
        p = buckets.dense.get(name)
        if p is not None and p.grad is not None and p.grad.layout is torch.sparse_coo:
            self._sparse_dims[p] = p.grad.sparse_dim()
            p.grad = p.grad.to_dense()
        buckets.put(name, complete=complete)

    def forget(self) -> None:
        """Forget the passes of an incomplete step; its gradients are on this rank only."""
        if self.counts:
            # Operations of this step may be in flight.
            self._loans.clear()
        self.counts.clear()
        self._withheld.release()

    def refuse_step(self) -> None:
        """Raise GradientError if there are gradients that `finish` has not averaged."""
        self._refuse("a step in skip_synchronize()", self._withheld.names)

    def _refuse(self, use: str, names: Sequence[str]) -> None:
        if names:
            raise _refusal(self._process_set, first_few(names, 3), use)

    def finish(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Return when gradients are averaged over the process set's ranks. Collective, blocking.

        Raises BufferMismatchError if trained parameters or the combination differ between ranks,
        and GradientError if a gradient was replaced or written to after it was complete.
        """
        self._refuse("a change", self._withheld.release())
        if self.comm is not None:
            self._process_set.arrive(STEP, self._name, OP_NAMES.get(self._combination.op, ""))
            for buckets in self._complete(groups):
                buckets.wait()
                self._give(buckets)
        self.counts.clear()

    def step_without_batch(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take part in a step for which only other ranks have gradients; keep this rank's own.

        Gradients that this rank has already sent also count. Collective, blocking.
        """
        self._withheld.release()
        incomplete = {p: None if p.grad is None else p.grad.clone() for group in groups
                      for p in group["params"] if self.counts.get(p) != self.passes}
        for p in incomplete:
            p.grad = None
        for buckets in self._complete(groups):
            buckets.wait()
            self._give(buckets)
        for p, gradient in incomplete.items():
            p.grad = gradient
        for p in self.counts.keys() - incomplete.keys():
            del self.counts[p]

    def _complete(self, groups: Sequence[Mapping[str, Any]]) -> list[GradientBuckets]:
        """Complete this rank's step, for which other ranks arrived or joined; return the buckets.

        Collective, blocking.
        """
        comm = self.comm
        if comm is None:
            return []
        if comm is not self._base:
            self._base, self._buckets, self._buckets_of, self._sparse_dims = comm, [], {}, {}
        trained = [(i, j, p) for i, group in enumerate(groups)
                   for j, p in enumerate(group["params"]) if p.requires_grad]
        new = [p for *_, p in trained if p not in self._buckets_of]
        if new:
            for i, j, p in trained:
                self.names.setdefault(p, noname(i, j))
            self._begin(comm, {self.names[p]: p for p in new})
            self._hook(new)
        # The gradients that backward passes have reached are sent first.
        order = {self.names[p]: i for i, p in enumerate(self.counts)}
        for buckets in self._buckets:
            for name in sorted(buckets.missing, key=lambda name: order.get(name, len(order))):
                self._put(buckets, name, complete=True)
        return self._buckets

    def _give(self, buckets: GradientBuckets) -> None:
        """Give parameters the averages that have arrived."""
        for name, p in buckets.dense.items():
            view, dims = buckets.views[name], self._sparse_dims.get(p)
            p.grad = view if dims is None else view.to_sparse(dims)

    def _begin(self, comm: Communicator, parameters: Mapping[str, Parameter]) -> None:
        """Begin to average more parameters, separately for each device. Collective, blocking."""
        share_cores(comm)
        launch.keep_freed_memory()
        combination, bucket_bytes = self._combination, world().settings.bucket_bytes
        order = comm.broadcast_object(list(parameters), root=0)
        with same_on_all(comm, "DistributedOptimizer", error=BufferMismatchError,
                         remedy="pass the same, and freeze the same parameters, on every rank",
                         ) as same:
            same["named_parameters"] = {
                name: adapter.tensors.described(parameters[name]) for name in sorted(parameters)}
            parts = _by_device({name: parameters[name] for name in order if name in parameters})
            same.update(op=combination.op, reducer=repr(combination.reducer(comm)),
                        bucket_bytes=bucket_bytes, sparse_as_dense=combination.sparse_as_dense,
                        groups=[combination.grouped(part) for part in parts])
        sparse: set[str] = set().union(*comm.allgather_object(
            {name for name, p in parameters.items() if combination.gathers(p.grad)}))
        for part in parts:
            loan = self._process_set.lender.lend()
            self._loans.append(loan)
            reducers = {name: reducer for group in combination.grouped(
                {name: p for name, p in part.items() if name not in sparse})
                for reducer in [combination.reducer(comm)] for name in group}
            weighing = SumWeighing if combination.op == Sum else training.Weighing
            buckets = GradientBuckets(
                part, {p for name, p in part.items() if name in sparse}, loan.comm,
                weighing(loan.comm), training.Fusion(bucket_bytes, reducers))
            self._buckets.append(buckets)
            self._buckets_of.update(dict.fromkeys(part.values(), buckets))


def _by_device(parameters: Mapping[str, Parameter]) -> list[dict[str, Parameter]]:
    parts: dict[torch.device, dict[str, Parameter]] = {}
    for name, p in parameters.items():
        parts.setdefault(p.device, {})[name] = p
    return list(parts.values())


def noname(group: int, index: int) -> str:
    """Return the name of an unnamed parameter."""
    return f"allreduce.noname.{group}.{index}"


def _too_many_passes(rank: int, name: str) -> AssertionError:
    return AssertionError(
        f"rank {rank}: {name}: Gradients were computed more than backward_passes_per_step times "
        f"before call to step(). Increase backward_passes_per_step to accumulate gradients "
        f"locally; hooks must not use a gradient after it is complete.")


def _refusal(process_set: ProcessSet, name: str, function: str) -> Exception:
    rank = process_set.comm.rank
    if adapter.withheld.in_backward():
        return _too_many_passes(rank, name)
    return GradientError(
        f"rank {rank}: {function} of the gradient of {name} while it was being averaged; call "
        f"optimizer.synchronize() before gradients are read, clipped, unscaled or written to, and "
        f"then optimizer.step() in optimizer.skip_synchronize()")
