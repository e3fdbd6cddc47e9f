"""Keeps an adapter's gradients in buckets, and sends each bucket once it is full."""

import difflib
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from ..arguments import number
from ..buckets.bucket import Bucket, BucketPlan, TensorSpec, plan
from ..communicator import Communicator
from ..engine.handle import Handle
from ..errors import BufferMismatchError, ConfigError, GradientError
from ..gpu.base import Event, await_event
from ..gpu.device import Device
from ..operations.agreement import Call
from ..operations.operation import Collectives
from ..record.statistics import Statistics
from ..reducers.by_name import Wish, compressors, reducers_of
from ..reducers.compressor import Compressor
from ..reducers.exchange import Cost
from ..transport.base import Schedule
from .host_copy import HostCopy
from .nonfinite import NonFinite
from .tally import Tally


class Views(Mapping[str, NDArray[Any]]):
    """Gradients by name, which can be written into, but not replaced."""

    def __init__(self, views: Mapping[str, NDArray[Any]]) -> None:
        self._views = views

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def __setitem__(self, name: str, value: object) -> None:
        """Accept the end of `grads[name] += value`, which has written in place already.

        Raises:
            GradientError: Another array is assigned, which no bucket would hold.
        """
        if value is not self._views.get(name):
            raise GradientError(f"grads[{name!r}] lies in a bucket and cannot be replaced; write "
                                f"into it: grads[{name!r}][...] = ...")


class Gradients:
    """Gradients as views into buckets, reduced in one agreed order while others are computed.

    At first, tensors are fused in the reverse of their order, which is that of
    most backward passes. After the first step the buckets are built anew, once,
    in the order in which rank 0's gradients really became ready.

    Args:
        tensors: The same, in the same order, on every rank.
        comm: The ranks to average over.
        bucket_bytes: Size of a bucket.
        reducer: How a bucket becomes its mean; or a mapping from names and patterns.
        deterministic: Keep the first plan, so that results do not depend on the order
            in which gradients became ready.
        order: As `order` was when a state was saved, to go on from it with the same buckets.
        moved: Called with a name when its view has moved to a new bucket, so that nobody
            holds the old one, whose memory is free once all its views have moved. Without it,
            buckets that were given up are filled with NaN, for whoever kept a view of them.
        steps: How many were complete before, in other buckets.
        device: The GPU that gradients are to lie on; in host memory by default.
        mark: Returns when a gradient that is ready on that GPU will have been written; a mark on
            CuPy's stream by default.

    Attributes:
        views: By name; replaced by new views when buckets are built anew.
        statistics: What the operations of the last complete step cost; no others.
        tally: Counts those of a step. (Gradients that lie elsewhere may belong to it as well.)
        steps: How many are complete.
        order: The names in the order in which they are fused; None while that may change.
        nonfinite: Whose own gradients held NaN or Inf.

    Raises:
        ConfigError: A reducer is none, or does not suit; a pattern fits no name; an order is of
            other names.
    """

    def __init__(self, tensors: Sequence[TensorSpec], comm: Communicator, *,
                 bucket_bytes: int, reducer: Wish, deterministic: bool,
                 order: Sequence[str] | None = None, steps: int = 0,
                 moved: Callable[[str], None] | None = None, device: Device | None = None,
                 mark: Callable[[], Event] | None = None) -> None:
        self._device = device
        self._mark = device.gpu.mark if device is not None and mark is None else mark
        self._host_copies: dict[int, HostCopy] = {}
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._comm = comm
        self._reducers = reducers_of(self._tensors, reducer)
        self._compressors = compressors(self._reducers.values())
        self._bucket_bytes = bucket_bytes
        self._moved = moved
        self._views: dict[str, NDArray[Any]] = {}
        self._home: dict[str, Bucket] = {}
        self._buckets: list[Bucket] = []
        self._retired: list[Bucket] = []
        self.steps = steps
        self._handles: list[Handle[None]] = []
        self._order: list[str] = []
        self._settled = deterministic or order is not None
        self.order: list[str] | None = None
        # When the first gradient of a step became ready.
        self._began_s = 0.0
        self._finite: bool | None = True
        self._dense_bytes = 0
        self.tally = Tally(comm)
        self.nonfinite = NonFinite(comm)
        self.views = Views(self._views)
        self.statistics = Statistics()
        for one in self._compressors:
            one.serve(self)
        if not self._resume():
            self._build(tensors[::-1] if order is None else self._ordered(order))
        comm.prepare()
        self._before = self._reducers_cost

    def ready(self, name: str) -> None:
        """Mark a gradient as written; send its bucket if it and all earlier ones are full.

        Raises:
            GradientError: The name is unknown, or was marked in this step already.

        Collective: yes, over a step. Blocking: no.
        """
        bucket = self._home.get(name) if isinstance(name, str) else None
        if bucket is None:
            close = difflib.get_close_matches(str(name), self._home, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(self._home)}"
            raise GradientError(f"rank {self._comm.rank}: there is no gradient {name!r}; {hint}")
        if name not in bucket.missing:
            raise GradientError(
                f"rank {self._comm.rank}: gradient {name!r} was marked ready twice; call wait() "
                f"after each backward pass, and ready() once per gradient between two waits")
        self._drop_retired()
        if not self._order:
            self._began_s = time.monotonic()
            if self._resume():
                bucket = self._home[name]
        bucket.missing.remove(name)
        if self._mark is not None:
            bucket.written.append(self._mark())
        self._order.append(name)
        while len(self._handles) < len(self._buckets):
            bucket = self._buckets[len(self._handles)]
            if bucket.missing:
                break
            self._handles.append(self._send(bucket))
        self._comm.poke()

    def expects(self, name: str) -> bool:
        """Return whether a gradient is yet to be marked as written in this step."""
        return name in self._home[name].missing

    def wait(self, beside: Sequence[str] = (), *, finite: bool = True) -> None:
        """Return when every gradient is the mean over ranks.

        Args:
            beside: Names of gradients of this rank that are in no bucket, and not finite.
            finite: Whether there are none of that kind, on all ranks.

        Raises:
            GradientError: Some gradients were not marked ready; names them.

        Collective: yes. Blocking: yes.
        """
        missing = self.missing
        if missing:
            raise GradientError(
                f"rank {self._comm.rank}: wait() with {len(missing)} of {len(self._home)} "
                f"gradients missing: {', '.join(missing)}; call ready(name) for each, also for "
                f"one that is zero in this step")
        waited_s = time.monotonic()
        for handle in self._handles:
            handle.wait()
        self._handles.clear()
        finite = self.nonfinite.settle(self.steps, self._buckets, beside, finite=finite)
        # Of the other buckets few ask.
        self._finite = None if finite and not self._compressors else finite and self._are_finite()
        for one in self._compressors:
            one.settle(self._finite is True)
        self._expect_all()
        now = self._reducers_cost
        self.statistics, self._before = self.tally.take() + (now - self._before), now
        if not self._settled:
            self._settle()
        self._order.clear()
        self.steps += 1
        self._comm.recorder.end_step(self._began_s, waited_s)

    @property
    def finite(self) -> bool:
        """Whether all means of the last complete step are finite; True before the first one.

        The same on all ranks, without a message: their bits are.

        Raises:
            GradientError: The next step has begun, so that gradients are this rank's own.
        """
        if self._finite is None:
            if self._order:
                raise GradientError(
                    f"rank {self._comm.rank}: whether gradients are finite can be told between "
                    f"wait() and the next ready(); ask earlier")
            self._finite = self._are_finite()
        return self._finite

    def _are_finite(self) -> bool:
        return all([bucket.is_finite() for bucket in self._buckets])

    def rescale(self, factor: float) -> None:
        """Multiply what reducers remember: the loss is scaled otherwise from now on.

        Raises:
            ConfigError: The factor is no finite number above 0.
        """
        factor = number("factor", factor, lambda x: 0 < x < math.inf, "a finite number above 0")
        for one in self._compressors:
            one.rescale(factor)

    def close(self) -> None:
        """Let reducers serve another model, or these gradients in other buckets."""
        for one in self._compressors:
            one.release()

    @property
    def _reducers_cost(self) -> Statistics:
        """What reducing has cost so far, and would have without compression."""
        costs = [one.cost for one in self._compressors] or [Cost()]
        return Statistics(
            dense_bytes=self._dense_bytes, encode_s=sum(one.encode_s for one in costs),
            wire_s=sum(one.wire_s for one in costs),
            decode_s=sum(one.decode_s for one in costs))

    def _expect_all(self) -> None:
        """Begin a step. (In `wait`, the loop's variable would keep a bucket in memory.)"""
        for bucket in self._buckets:
            bucket.expect_all()

    @property
    def missing(self) -> list[str]:
        """The names of the gradients that are not ready in this step."""
        return [name for name, bucket in self._home.items() if name in bucket.missing]

    def _send(self, bucket: Bucket) -> Handle[None]:
        reducer = self._reducers[bucket.plan.tensors[0].name]
        bucket.finite = None
        self.nonfinite.look_at(bucket, last=bucket is self._buckets[-1])
        detail = (f"{reducer!r} of {bucket.flat.dtype.name} {bucket.flat.shape} "
                  f"in step {self.steps}")

        def reduce(collectives: Collectives) -> Schedule[None]:
            self._dense_bytes += collectives.dense_bytes(bucket.flat.nbytes)
            host_copy = self._host_copies.get(bucket.index)
            if host_copy is not None:
                return host_copy.reduce(collectives, reducer)
            return reducer.reduce(collectives, bucket)

        device = None if bucket.index in self._host_copies else self._device
        return self.tally.submit(
            Call("reduce", detail, bucket.label, bucket.flat.nbytes), reduce,
            device=device, ready=bucket.written)

    def _settle(self) -> None:
        """Build the buckets anew in the order in which rank 0's gradients became ready."""
        self._settled = True
        order = self._comm.broadcast_object(list(self._order), root=0)
        tensors = [self._tensors[name] for name in order]
        if self._plan(tensors) != tuple(bucket.plan for bucket in self._buckets):
            self._rebuild(tensors)
        self.order = order

    def _resume(self) -> bool:
        """Build the buckets as they were when the state was saved that a reducer has loaded."""
        orders = [one.loaded_order for one in self._compressors if one.loaded_order is not None]
        if not orders:
            return False
        tensors = [self._ordered(order) for order in orders][0]
        # Whoever has not loaded anything is told so.
        self._comm.submit(Call("load", "the states of all ranks' reducers"),
                          lambda collectives: collectives.barrier()).wait()
        self._settled = True
        self._rebuild(tensors)
        return True

    def _ordered(self, order: Sequence[str]) -> list[TensorSpec]:
        """Return the tensors in the order that a saved state has.

        Raises:
            ConfigError: It is of another model.
        """
        if not isinstance(order, Sequence) or not all(isinstance(one, str) for one in order):
            raise ConfigError(f"order={order!r:.200}: expected a list of names, as the attribute "
                              f"`order` was")
        if sorted(order) != sorted(self._tensors):
            raise ConfigError(
                f"rank {self._comm.rank}: the state to go on from is of another model: it has "
                f"{', '.join(order)}; this one has {', '.join(self._tensors)}")
        return [self._tensors[name] for name in order]

    def _rebuild(self, tensors: Sequence[TensorSpec]) -> None:
        """Build the buckets anew; the first ones are not to be used any more."""
        if self._moved is None:
            self._retired = self._buckets
        self._build(tensors)
        for old in self._retired:
            old.retire()

    def _plan(self, tensors: Sequence[TensorSpec]) -> tuple[BucketPlan, ...]:
        return plan(tensors, self._bucket_bytes, lambda tensor: id(self._reducers[tensor.name]))

    def _build(self, tensors: Sequence[TensorSpec]) -> None:
        """Build buckets, one after the other, and move what there is into them."""
        self._buckets = []
        self._home.clear()
        self._fill_buckets(tensors)
        order = [tensor.name for tensor in tensors]
        self.order = order if self._settled else None
        for one in self._compressors:
            mine = [self._known(bucket, one) for bucket in self._buckets
                    if self._reducers[bucket.plan.tensors[0].name] is one]
            self._comm.submit(
                Call("take over", f"{len(mine)} buckets of {one!r}"),
                functools.partial(one.take_over, buckets=mine, order=order)).wait()

    def _known(self, bucket: Bucket, one: Compressor) -> Bucket:
        """Return the bucket that a reducer is to know: perhaps a copy on the host."""
        if self._device is None or one.on_gpus:
            return bucket
        host_copy = self._host_copies[bucket.index] = HostCopy(bucket, self._device, self._comm)
        return host_copy.host

    def _fill_buckets(self, tensors: Sequence[TensorSpec]) -> None:
        empty = functools.partial(self._comm.empty, device=self._device or "cpu")
        self._host_copies.clear()
        if self._views and self._mark is not None:
            # What is to be moved may have been written a moment ago.
            await_event(self._mark())
        for index, bucket_plan in enumerate(self._plan(tensors)):
            bucket = Bucket(index, bucket_plan, empty, self._device)
            self._buckets.append(bucket)
            for name, view in bucket.views.items():
                old = self._views.get(name)
                self._views[name] = view
                self._home[name] = bucket
                if old is not None:
                    view[...] = old
                    del old
                    if self._moved is not None:
                        self._moved(name)
        if self._device is not None:
            # Others than CuPy may write on streams of their own.
            await_event(self._device.gpu.mark())

    def _drop_retired(self) -> None:
        """Give up the first buckets: whoever kept a view of them shall see NaN."""
        for bucket in self._retired:
            bucket.poison()
        self._retired = []


def refuse_different(comm: Communicator, kind: str, mine: Sequence[str]) -> None:
    """Compare what the parts of this rank's model are with rank 0's.

    Args:
        comm: The ranks.
        kind: What the parts are, in the singular.
        mine: A description of each part, in order.

    Raises:
        BufferMismatchError: The models differ, on all ranks; names the first difference.

    Collective: yes. Blocking: yes.
    """
    theirs, problem = comm.broadcast_object(list(mine), root=0), ""
    for place in range(max(len(mine), len(theirs))):
        here = mine[place] if place < len(mine) else "nothing"
        there = theirs[place] if place < len(theirs) else "nothing"
        if here != there:
            problem = (f"rank {comm.rank}: {kind} {place} is {here}, but on rank 0 it is {there}; "
                       f"build the same model, in the same order, on every rank")
            break
    for text in comm.allgather_object(problem):
        if text:
            raise BufferMismatchError(text)
