"""Averages named tensors in buckets, each of which leaves once it is full, in an agreed order."""

import difflib
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..arguments import number, whole_number
from ..buckets.bucket import Bucket, BucketPlan, TensorSpec, plan
from ..communicator import Communicator
from ..engine.group import Build
from ..engine.handle import Handle
from ..errors import ConfigError, GradientError
from ..gpu.device import Device, Event, await_event
from ..operations.agreement import Call
from ..reducers.reducer import ReducerSpec, compressors, reducers_of
from ..reducers.compressor import Compressor
from ..reducers.reducer import Reducer, reduce_of, scatter_of
from .host_copy import HostCopy
from .views import Views


# Each rank checks this many bytes of means for NaN and Inf in 30 to 140 µs. Of longer ones, each
# rank checks its slices, and a short message makes the result known.
_LONGEST_CHECK_BYTES = 1 << 20


class Operations(Protocol):
    """Begins operations, or runs them; a Communicator, or what counts those of a step."""

    def submit(self, call: Call, build: Build[None], *, device: Device | None,
               ready: Sequence[Event]) -> Handle[None]:
        """Begin an operation; see Communicator.submit."""

    def run(self, call: Call, build: Build[None], *, device: Device | None,
            ready: Sequence[Event]) -> None:
        """Run an operation; see Communicator.run."""


@dataclass(frozen=True)
class _Reduction:
    """How a bucket becomes its mean, decided when the bucket is built.

    Attributes:
        reducer: Its Reducer.
        bucket: The bucket that the Reducer knows: perhaps the copy in host memory.
        reduce: Returns the schedule, given collectives.
        scatter: The same where each rank needs its own slice only.
        device: The GPU on whose memory the schedule works; None for host memory.
        text: Reducer and vector, for messages.
    """

    reducer: Reducer
    bucket: Bucket
    reduce: Build[None]
    scatter: Build[None]
    device: Device | None
    text: str


class Averager:
    """Tensors as views into buckets, averaged over ranks while others are still being written.

    A step: write tensors into `views`, mark each with `ready`, and `wait`. Buckets leave in one
    order, the same on all ranks; `arrived` shows each one when its means are there.

    At first, tensors are fused in the reverse of their order, which is that of most backward
    passes. After the first step the buckets are built anew, once, in the order in which rank 0's
    tensors really became ready.

    Args:
        tensors: The same, in the same order, on every rank.
        comm: The ranks to average over.
        bucket_bytes: Size of a bucket.
        reducer: How a bucket becomes its mean; or a mapping from names and patterns.
        deterministic: Keep the first plan, so that results do not depend on the order
            in which tensors became ready.
        order: As `order` was when a state was saved, to go on from it with the same buckets.
        steps: Steps that were complete before, in other buckets.
        moved: Called with a name when its view has moved to a new bucket, to let go of the old
            view: an old bucket's memory is free once all its views have moved. Without it, old
            buckets are filled with NaN, so that a view of them that is still used is noticed.
        device: The GPU that tensors are to lie on; in host memory by default.
        mark: Returns when a tensor that is ready on that GPU will have been written; a mark on
            CuPy's stream by default.
        operations: Begins the operations that average, or runs them; `comm` by default.
        hides_nothing: Buckets leave in `wait` or `arrived`, one after the other, since ranks
            compute on all cores until then; the same on all ranks.

    Attributes:
        views: By name; replaced by new views when buckets are built anew.
        buckets: In the order in which they leave.
        tensors: By name, in the given order.
        steps: Steps that are complete.
        updates: Steps of optimizers since the last of these; counted by the adapter.
        compressors: The Reducers that have a state.
        compared: Texts by source, such as what an optimizer has done with the means of the last
            step. Ranks compare them when the next buckets are sent.
        scatters: Means are left in this rank's slices of the buckets only; see `scatter`.
        finite: Whether all means of the last complete step are finite; the same on all ranks. True
            before the first step.

    Raises:
        ConfigError: A reducer is none, or does not suit; a pattern fits no name; an order is of
            other names.

    Collective: yes. Blocking: yes.
    """

    # Words of messages: what the tensors are, what the user calls `views`, what a step is.
    noun, holder, cycle = "tensor", "views", "step"

    def __init__(self, tensors: Sequence[TensorSpec], comm: Communicator, *,
                 bucket_bytes: int, reducer: ReducerSpec = None, deterministic: bool = False,
                 order: Sequence[str] | None = None, steps: int = 0,
                 moved: Callable[[str], None] | None = None, device: Device | None = None,
                 mark: Callable[[], Event] | None = None, operations: Operations | None = None,
                 hides_nothing: bool = False) -> None:
        self._device = device
        self._mark = device.gpu.mark if device is not None and mark is None else mark
        self._comm, self._operations = comm, operations or comm
        self.tensors = {tensor.name: tensor for tensor in tensors}
        self._reducers = reducers_of(self.tensors, reducer)
        self.compressors = compressors(self._reducers.values())
        self._bucket_bytes = bucket_bytes
        self._moved = moved
        self._hides_nothing = hides_nothing
        self.compared: dict[str, str] = {}
        self._views: dict[str, NDArray[Any]] = {}
        self.views = Views(self._views, self.holder)
        self.buckets: list[Bucket] = []
        self._home: dict[str, Bucket] = {}
        self._reductions: list[_Reduction] = []
        # As they are fused.
        self._fused: list[TensorSpec] = []
        self._is_final = deterministic or order is not None
        self._retired: list[Bucket] = []
        self.steps, self.updates, self.scatters, self.finite = steps, 0, False, True
        # Of the present step: the tensors that are ready, since when there are any, and the
        # reductions of the buckets that have left; None for one that was waited for at once.
        self._order: list[str] = []
        self._began_s = 0.0
        self._handles: list[Handle[None] | None] = []
        # By what tensors are scaled otherwise than in the step before.
        self._rescaled = 1.0
        # Names of the means of the last complete step in which this rank has seen NaN or Inf.
        self._bad_means: list[str] = []
        for compressor in self.compressors:
            compressor.serve(self)
        if not self._resume():
            self._build(tensors[::-1] if order is None else self._ordered(order))
        comm.prepare()

    def ready(self, name: str) -> None:
        """Mark a tensor as written; send its bucket if it and all earlier ones are full.

        Raises:
            GradientError: The name is unknown, or was marked in this step already.

        Collective: yes, over a step. Blocking: no.
        """
        bucket = self._home.get(name) if isinstance(name, str) else None
        if bucket is None:
            close = difflib.get_close_matches(str(name), self._home, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(self._home)}"
            raise GradientError(
                f"rank {self._comm.rank}: there is no {self.noun} {name!r}; {hint}")
        if name not in bucket.missing:
            raise GradientError(
                f"rank {self._comm.rank}: {self.noun} {name!r} was marked ready twice; call wait() "
                f"after each {self.cycle}, and ready() once per {self.noun} between two waits")
        if self._retired:
            self._drop_retired()
        if not self._order:
            self._began_s = time.monotonic()
            if self._resume():
                bucket = self._home[name]
        bucket.missing.remove(name)
        if self._mark is not None:
            bucket.written.append(self._mark())
        self._order.append(name)
        while len(self._handles) < len(self.buckets) and not self._hides_nothing:
            bucket = self.buckets[len(self._handles)]
            if bucket.missing:
                break
            self._handles.append(self._send(bucket))
        self._comm.poke()

    def _send(self, bucket: Bucket) -> Handle[None] | None:
        reduction = self._reductions[bucket.index]
        bucket.finite = None
        detail = ", ".join([f"{reduction.text} in {self.moment}", *self.compared.values()])
        call = Call("scatter" if self.scatters else "reduce", detail, bucket.label,
                    bucket.flat.nbytes)
        # What is in other buckets soon is needed whole.
        build = reduction.scatter if self.scatters and self._is_final else reduction.reduce
        if self._hides_nothing:
            self._operations.run(call, build, device=reduction.device, ready=bucket.written)
            return None
        return self._operations.submit(
            call, build, device=reduction.device, ready=bucket.written)

    @property
    def moment(self) -> str:
        """The present step in words; compared across ranks."""
        # A rank has skipped a step of the others, unless all ranks have several optimizers.
        more = (f" ({self.updates} optimizer steps since its last averaged backward pass)"
                if self.updates > min(self.steps, 1) else "")
        return f"step {self.steps}{more}"

    def expects(self, name: str) -> bool:
        """Return whether a tensor is yet to be marked as written in this step."""
        return name in self._home[name].missing

    @property
    def under_way(self) -> bool:
        """Whether a step has begun: some tensor is ready."""
        return bool(self._order)

    @property
    def missing(self) -> list[str]:
        """The names of the tensors that are not ready in this step."""
        return [name for name, bucket in self._home.items() if name in bucket.missing]

    def arrived(self) -> Iterator[Bucket]:
        """Yield each bucket when it holds means, in the order in which they leave.

        To be called when all tensors are ready; `wait` has to end the step afterwards.

        Raises:
            GradientError: Some tensors were not marked ready; names them.

        Collective: no. Blocking: yes.
        """
        self._refuse_missing("arrived()")
        yield from self._arriving()

    def wait(self) -> None:
        """Return when every tensor is the mean over ranks, and end the step.

        Raises:
            GradientError: Some tensors were not marked ready; names them.

        Collective: yes. Blocking: yes.
        """
        self._end_step(self._await_means())

    def _await_means(self) -> bool:
        """Return whether the means are finite, once they have arrived; the same on all ranks.

        Collective: yes. Blocking: yes.
        """
        self._refuse_missing("wait()")
        shares_check = self.scatters or sum(
            bucket.flat.nbytes for bucket in self.buckets) > _LONGEST_CHECK_BYTES
        rank, size = (self._comm.rank, self._comm.size) if shares_check else (0, 1)
        for bucket in self._arriving():
            if bucket.finite is None:
                # While later buckets are in flight.
                start, stop = bucket.bounds(size)[rank:rank + 2]
                bucket.finite = bucket.holds_finite(bucket.flat[start:stop])
            if self.scatters and self._is_final:
                bucket.mark_as_junk(but=self.own(bucket))
        self._handles.clear()
        finite = all(bucket.finite for bucket in self.buckets)
        self._bad_means = [name for bucket in self.buckets if not bucket.finite
                           for name in bucket.not_finite(*bucket.bounds(size)[rank:rank + 2])]
        if shares_check:
            finite = not self._comm.allreduce(np.array([not finite]), op="max")[0]
        if self.scatters and not finite:
            for bucket in self.buckets:
                bucket.poison()
        return finite

    def _arriving(self) -> Iterator[Bucket]:
        """Yield each bucket when it holds means; those leave that have not."""
        for bucket in self.buckets:
            if bucket.index == len(self._handles):
                self._handles.append(self._send(bucket))
            handle = self._handles[bucket.index]
            if handle is not None:
                handle.wait()
            yield bucket

    def _refuse_missing(self, where: str) -> None:
        missing = self.missing
        if missing:
            raise GradientError(
                f"rank {self._comm.rank}: {where} with {len(missing)} of {len(self._home)} "
                f"{self.noun}s missing: {', '.join(missing)}; call ready(name) for each, also for "
                f"one that is zero in this step")

    def _end_step(self, finite: bool) -> None:
        """Let Reducers know whether the step counts, and get ready for the next one.

        Args:
            finite: Whether the means and what else belongs to the step are finite.
        """
        self.finite = finite
        for compressor in self.compressors:
            compressor.settle(finite)
        self._expect_all()
        if not self._is_final:
            self._fuse_as_ready()
        self._order.clear()
        self.steps, self.updates, self._rescaled = self.steps + 1, 0, 1.0
        self.compared.pop("rescale", None)

    def _expect_all(self) -> None:
        # In `_end_step`, the loop's variable would keep a bucket while others are built.
        for bucket in self.buckets:
            bucket.expect_all()

    @property
    def order(self) -> list[str] | None:
        """The names in the order in which they are fused; None while that may change."""
        return [tensor.name for tensor in self._fused] if self._is_final else None

    def rescale(self, factor: float) -> None:
        """Multiply what Reducers remember: the tensors are scaled otherwise from now on.

        Raises:
            ConfigError: The factor is no finite number above 0.
        """
        factor = number(f"rank {self._comm.rank}: factor", factor,
                        lambda x: 0 < x < math.inf, "a finite number above 0")
        for compressor in self.compressors:
            compressor.rescale(factor)
        self._rescaled *= factor
        self.compared["rescale"] = f"rescaled by {self._rescaled:.15g}"

    def scatter(self) -> None:
        """Leave, from the next step on, each rank the means of its own slices only; see `own`.

        The rest of the buckets holds junk after a step, and a NaN in each tensor that is not in
        the slices as a whole; what is not taken from the slices before buckets are built anew is
        lost. Where NaN or Inf is in a slice of any rank, all buckets of all ranks hold NaN.

        Raises:
            GradientError: A step has begun.

        Collective: yes. Blocking: no.
        """
        self._refuse_amid("scatter()")
        self.scatters = True

    def bounds(self, bucket: Bucket) -> list[int]:
        """Return the offsets that cut a bucket into slices, one for each rank.

        Without `scatter` every rank has all of it: [0, size].
        """
        return bucket.bounds(self._comm.size) if self.scatters else [0, bucket.plan.size]

    def own(self, bucket: Bucket) -> slice:
        """Return which elements of a bucket are this rank's."""
        bounds, rank = self.bounds(bucket), self._comm.rank if self.scatters else 0
        return slice(bounds[rank], bounds[rank + 1])

    def replan(self, *, bucket_bytes: int) -> None:
        """Fuse the tensors, in their present order, into buckets of another size, between steps.

        Their values move along, and what Reducers remember of them.

        Raises:
            ConfigError: `bucket_bytes` is not positive.
            GradientError: A step has begun.

        Collective: yes. Blocking: yes.
        """
        self._refuse_amid("replan()")
        self._bucket_bytes = whole_number("bucket_bytes", bucket_bytes, 1)
        self._fuse(self._fused)

    def _refuse_amid(self, what: str) -> None:
        if self._order:
            raise GradientError(f"rank {self._comm.rank}: {what} amid a step; call it between "
                                f"wait() and the next ready()")

    def close(self) -> None:
        """Let Reducers serve another model, or these tensors in other buckets."""
        for compressor in self.compressors:
            compressor.release()

    # Building buckets

    def _fuse_as_ready(self) -> None:
        """Fuse the tensors in the order in which rank 0's became ready."""
        self._is_final = True
        order = self._comm.broadcast_object(list(self._order), root=0)
        self._fuse([self.tensors[name] for name in order])

    def _fuse(self, tensors: Sequence[TensorSpec]) -> None:
        """Build the buckets anew if they are to be others."""
        self._fused = list(tensors)
        if self._plan(tensors) != tuple(bucket.plan for bucket in self.buckets):
            self._rebuild(tensors)

    def _resume(self) -> bool:
        """Build the buckets as they were when the state was saved that a Reducer has loaded."""
        orders = [compressor.loaded_order for compressor in self.compressors
                  if compressor.loaded_order is not None]
        if not orders:
            return False
        tensors = [self._ordered(order) for order in orders][0]
        # A rank that has not loaded anything finds out here.
        self._comm.submit(Call("load", "the states of all ranks' reducers"),
                          lambda collectives: collectives.barrier()).wait()
        self._is_final = True
        self._rebuild(tensors)
        return True

    def _ordered(self, order: Sequence[str]) -> list[TensorSpec]:
        """Return the tensors in the order that a saved state has.

        Raises:
            ConfigError: It is of another model.
        """
        if not isinstance(order, Sequence) or not all(isinstance(name, str) for name in order):
            raise ConfigError(f"order={order!r:.200}: expected a list of names, as the attribute "
                              f"`order` was")
        if sorted(order) != sorted(self.tensors):
            raise ConfigError(
                f"rank {self._comm.rank}: the state to go on from is of another model: it has "
                f"{', '.join(order)}; this one has {', '.join(self.tensors)}")
        return [self.tensors[name] for name in order]

    def _rebuild(self, tensors: Sequence[TensorSpec]) -> None:
        """Build the buckets anew; the present ones are not to be used any more."""
        if self._moved is None:
            self._retired += self.buckets
        self._build(tensors)
        for old in self._retired:
            old.retire()

    def _drop_retired(self) -> None:
        """Give up buckets that were replaced: views of them that a user kept read NaN."""
        for bucket in self._retired:
            bucket.poison()
        self._retired = []

    def _plan(self, tensors: Sequence[TensorSpec]) -> tuple[BucketPlan, ...]:
        return plan(tensors, self._bucket_bytes, lambda tensor: id(self._reducers[tensor.name]))

    def _build(self, tensors: Sequence[TensorSpec]) -> None:
        """Build buckets, one after the other, and move what there is into them."""
        self._fused, self.buckets, self._reductions = list(tensors), [], []
        self._home.clear()
        empty = functools.partial(self._comm.empty, device=self._device or "cpu")
        if self._views and self._mark is not None:
            # What is to be moved may have been written a moment ago.
            await_event(self._mark())
        for index, bucket_plan in enumerate(self._plan(tensors)):
            bucket = Bucket(index, bucket_plan, empty, self._device)
            self.buckets.append(bucket)
            self._move_into(bucket)
            self._reductions.append(self._reduction_of(bucket))
        if self._device is not None:
            # Others than CuPy may write on streams of their own.
            await_event(self._device.gpu.mark())
        order = [tensor.name for tensor in tensors]
        for compressor in self.compressors:
            known = [reduction.bucket for reduction in self._reductions
                     if reduction.reducer is compressor]
            self._comm.submit(
                Call("take over", f"{len(known)} buckets of {compressor!r}"),
                functools.partial(compressor.take_over, buckets=known, order=order)).wait()

    def _move_into(self, bucket: Bucket) -> None:
        for name, view in bucket.views.items():
            old = self._views.get(name)
            self._views[name] = view
            self._home[name] = bucket
            if old is not None:
                view[...] = old
                del old
                if self._moved is not None:
                    self._moved(name)

    def _reduction_of(self, bucket: Bucket) -> _Reduction:
        reducer = self._reducers[bucket.plan.tensors[0].name]
        text = f"{reducer!r} of {bucket.plan.dtype.name} ({bucket.plan.size},)"
        if self._device is not None and isinstance(reducer, Compressor) and not (
                reducer.on_gpus and self._device.gpu.programmable):
            copy = HostCopy(bucket, self._device, self._comm, reducer)
            return _Reduction(reducer, copy.host, copy.reduce, copy.reduce, None, text)
        return _Reduction(reducer, bucket,
                          lambda collectives: reduce_of(reducer, collectives, bucket),
                          lambda collectives: scatter_of(reducer, collectives, bucket),
                          self._device, text)
