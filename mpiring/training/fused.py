"""Fuses named tensors into buckets, and moves them when buckets are built again."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..buckets.bucket import Bucket, BucketPlan, TensorSpec, plan, usual_bytes
from ..communicator import Communicator
from ..engine.group import Build
from ..errors import ConfigError, GradientError, MpiringError
from ..gpu.device import Device, DeviceVector, Event, await_event
from ..memory.arrays import Array
from ..names import nearest
from ..operations.agreement import Call
from ..operations.operation import Collectives
from ..reducers.reducer import Reducer, ReducerSpec, compressors, reduce_of, reducers_of, scatter_of
from ..reducers.compressor import Compressor
from ..text import first_few
from ..transport.base import Schedule
from .search import Choice

# So many names are told where one is unknown.
_MOST_NAMES = 8


@dataclass(frozen=True)
class Fusion:
    """How tensors are fused into buckets, and how these are averaged: what users choose.

    Attributes:
        bucket_bytes: Size of a bucket; None for `usual_bytes`.
        reducer: How a bucket becomes its mean; or a mapping from names and patterns.
        deterministic: Keep the first plan, so that results do not depend on the order
            in which tensors became ready.
        order: As `order` was when a state was saved, to go on from it with the same buckets.
        autotune: Find the fastest settings in the first steps; None: if Config says so.
    """

    bucket_bytes: int | None = None
    reducer: ReducerSpec = None
    deterministic: bool = False
    order: Sequence[str] | None = None
    autotune: bool | None = False


@dataclass(frozen=True)
class Placement:
    """Where an adapter's tensors are, and how it learns that they have moved.

    Attributes:
        device: The GPU that tensors are to lie on; in host memory by default.
        mark: Returns when a tensor that is ready on that GPU will have been written; a mark on
            CuPy's stream by default.
        moved: Called with a name when its view has moved to a new bucket, to let go of the old
            view: an old bucket's memory is free once all its views have moved. Without it, old
            buckets are filled with NaN, so that a view of them that is still used is noticed.
    """

    device: Device | None = None
    mark: Callable[[], Event] | None = None
    moved: Callable[[str], None] | None = None


class Views(Mapping[str, Array]):
    """Tensors by name, which can be written into, but not replaced.

    Args:
        views: The tensors; may change.
        holder: What the user calls this mapping, for messages.
    """

    _error: type[MpiringError] = GradientError
    _reason = " lies in a bucket and"

    def __init__(self, views: Mapping[str, Array], holder: str) -> None:
        self._views, self._holder = views, holder

    def __getitem__(self, name: str) -> Array:
        try:
            return self._views[name]
        except KeyError:
            known = first_few(nearest(str(name), self._views), _MOST_NAMES)
            raise KeyError(f"no parameter is called {name!r}; {self._holder} has {known}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def __setitem__(self, name: str, value: object) -> None:
        """Accept the end of `views[name] += value`, which has written in place already.

        Raises:
            GradientError, or ConfigError for masters: Another array is assigned, which would not
                be used.
        """
        if value is not self._views.get(name):
            view = f"{self._holder}[{name!r}]"
            raise self._error(f"{view}{self._reason} cannot be replaced; write into it: "
                              f"{view}[...] = ...")


@dataclass(frozen=True)
class BucketReduction:
    """How a bucket becomes its mean, decided when the bucket is built.

    Attributes:
        reducer: Its Reducer.
        bucket: The bucket that the Reducer knows: perhaps a copy in host memory.
        reduce: Returns the schedule, given collectives.
        scatter: The same where each rank needs its own slice only.
        device: The GPU on whose memory the schedule works; None for host memory.
    """

    reducer: Reducer
    bucket: Bucket
    reduce: Build[None]
    scatter: Build[None]
    device: Device | None

    @functools.cached_property
    def text(self) -> str:
        """Reducer and vector, for messages."""
        plan = self.bucket.plan
        return f"{self.reducer!r} of {plan.dtype.name} ({plan.size},)"


class FusedTensors:
    """Tensors as views into buckets, which are built again when a better order is known.

    At first, tensors are fused in the reverse of their order, which is that of most backward
    passes.

    Args:
        tensors: The same, in the same order, on every rank.
        comm: The ranks to average over.
        fusion: How they are fused.
        placement: Where they are.

    Attributes:
        tensors: By name, in the given order.
        views: By name; replaced by new views when buckets are built again.
        buckets: In the order in which they leave.
        version: Number of times that buckets were built.
        reductions: How each of them becomes its mean.
        home: The bucket of each tensor.
        compressors: The Reducers that have a state.
        mark: As in the placement.
        choice: The length of buckets, and other settings of speed.
        is_final: Whether the order stays as it is.
        dense_bytes: What this rank sends to other nodes in a step without compression.

    Raises:
        ConfigError: A reducer is none, or does not suit; a pattern fits no name; an order is of
            other names.

    Collective: yes. Blocking: yes.
    """

    def __init__(self, tensors: Sequence[TensorSpec], comm: Communicator, fusion: Fusion,
                 placement: Placement) -> None:
        self.tensors = {tensor.name: tensor for tensor in tensors}
        self._comm, self._moved = comm, placement.moved
        self._device, self.mark = placement.device, placement.mark
        if self._device is not None and self.mark is None:
            self.mark = self._device.gpu.mark
        self._reducers = reducers_of(self.tensors, fusion.reducer)
        self.compressors = compressors(self._reducers.values())
        self.choice = Choice(
            usual_bytes(len(comm.memory_groups)) if fusion.bucket_bytes is None
            else fusion.bucket_bytes, comm.config.operations_in_flight)
        self._arrays: dict[str, Array] = {}
        self.views = Views(self._arrays, "grads")
        self.home: dict[str, Bucket] = {}
        self.buckets: list[Bucket] = []
        self.version = 0
        self.reductions: list[BucketReduction] = []
        # Buckets that were replaced, and that views of the user's may still show.
        self._retired: list[Bucket] = []
        self.is_final = fusion.deterministic or fusion.order is not None
        for compressor in self.compressors:
            compressor.serve(self)
        if not self._resume():
            self._fused = (list(tensors[::-1]) if fusion.order is None else
                           self._ordered(fusion.order))
            self._rebuild()

    @property
    def order(self) -> list[str] | None:
        """The names in the order in which they are fused; None while that may change."""
        return [tensor.name for tensor in self._fused] if self.is_final else None

    def _begin_step(self) -> None:
        """Follow a state that a Reducer has loaded; give up the buckets that were replaced.

        Collective: if there is such a state. Blocking: then.
        """
        self._resume()
        for bucket in self._retired:
            bucket.poison()
        self._retired = []

    def _end_step(self, ready: Sequence[str]) -> None:
        """Expect all tensors again; after the first step, fuse them as rank 0's became ready.

        Args:
            ready: The names in this rank's order.

        Collective: yes, after the first step. Blocking: then.
        """
        if not self.is_final:
            self.is_final = True
            self.fuse(self._comm.broadcast_object(list(ready), root=0))
        for bucket in self.buckets:
            bucket.expect_all()

    def fuse(self, order: Sequence[str]) -> None:
        """Fuse the tensors in another order; values move along.

        Args:
            order: All names.

        Collective: yes. Blocking: yes.
        """
        self._fused = [self.tensors[name] for name in order]
        self._follow_plan()

    def use(self, choice: Choice) -> None:
        """Use other settings from the next step on; values move along.

        Collective: yes. Blocking: yes.
        """
        self.choice, self._comm.tunable.operations_in_flight = choice, choice.operations
        self._follow_plan()

    def _follow_plan(self) -> None:
        """Build other buckets if tensors are to be fused otherwise."""
        if self.plan(self.choice.bucket_bytes) != tuple(bucket.plan for bucket in self.buckets):
            self._rebuild()

    def _resume(self) -> bool:
        """Build the buckets as they were when the state was saved that a Reducer has loaded."""
        orders = [compressor.loaded_order for compressor in self.compressors
                  if compressor.loaded_order is not None]
        if not orders:
            return False
        self._fused = [self._ordered(order) for order in orders][0]
        # A rank that has not loaded anything finds out here.
        self._comm.submit(Call("load", "the states of all ranks' reducers"),
                          lambda collectives: collectives.barrier()).wait()
        self.is_final = True
        self._rebuild()
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

    def plan(self, bucket_bytes: int) -> tuple[BucketPlan, ...]:
        """Return how tensors would be fused into buckets of another length."""
        return plan(self._fused, bucket_bytes, lambda tensor: id(self._reducers[tensor.name]))

    @property
    def gpu(self) -> str:
        """The GPU on which the buckets lie, in words; "" for host memory."""
        return "" if self._device is None else str(self._device)

    def _rebuild(self) -> None:
        """Build buckets, one after the other, and move the tensors into them."""
        if self._moved is None:
            self._retired += self.buckets
        self.buckets, self.reductions = [], []
        self.version += 1
        self.home.clear()
        empty = functools.partial(self._comm.empty, device=self._device or "cpu")
        if self._arrays and self.mark is not None:
            # What is to be moved may have been written a moment ago.
            await_event(self.mark())
        for index, bucket_plan in enumerate(self.plan(self.choice.bucket_bytes)):
            bucket = Bucket(index, bucket_plan, empty, self._device)
            self.buckets.append(bucket)
            self._move_into(bucket)
            self.reductions.append(self._reduction_of(bucket))
        if self._device is not None:
            # Others than CuPy may write on streams of their own.
            await_event(self._device.gpu.mark())
        order = [tensor.name for tensor in self._fused]
        for compressor in self.compressors:
            buckets = [reduction.bucket for reduction in self.reductions
                       if reduction.reducer is compressor]
            self._comm.submit(
                Call("attach buckets", f"{len(buckets)} buckets of {compressor!r}"),
                functools.partial(compressor.attach_buckets, buckets=buckets, order=order)).wait()
        for bucket in self._retired:
            bucket.retire()
        nodes = self._comm.memory_groups
        (local,) = [len(ranks) for ranks in nodes if self._comm.rank in ranks]
        self.dense_bytes = sum(2 * (len(nodes) - 1) * bucket.flat.nbytes // len(nodes) // local
                               for bucket in self.buckets)

    def _move_into(self, bucket: Bucket) -> None:
        for name, view in bucket.views.items():
            old = self._arrays.get(name)
            self._arrays[name] = view
            self.home[name] = bucket
            if old is not None:
                view[...] = old
                del old
                if self._moved is not None:
                    self._moved(name)

    def _reduction_of(self, bucket: Bucket) -> BucketReduction:
        reducer = self._reducers[bucket.plan.tensors[0].name]
        if self._device is not None and (
                not getattr(reducer, "on_gpus", True)
                or isinstance(reducer, Compressor) and not self._device.gpu.programmable):
            return _on_host(bucket, self._device, self._comm, reducer)
        reduce, scatter = (functools.partial(build, reducer, bucket=bucket)
                           for build in (reduce_of, scatter_of))
        return BucketReduction(reducer, bucket, reduce, scatter, self._device)


def _on_host(bucket: Bucket, device: Device, comm: Communicator,
             reducer: Reducer) -> BucketReduction:
    """Return how a Reducer averages a bucket on a GPU in a copy in pinned host memory."""
    def pinned(n: int, dtype: "np.dtype[Any]") -> Array:
        return device.gpu.pinned(n * dtype.itemsize).view(dtype)

    # What the node's ranks share can be pinned, too; other memory begins anywhere.
    shared = comm.local_size > 1
    copy = Bucket(bucket.index, bucket.plan, comm.empty if shared else pinned)
    if shared:
        device.gpu.pin(copy.flat)

    def reduce(collectives: Collectives) -> Schedule[None]:
        copy.finite = None
        return between_copies(bucket.vector, reducer.reduce(collectives, copy))

    def between_copies(vector: DeviceVector, schedule: Schedule[None]) -> Schedule[None]:
        yield bucket.written
        yield (device.to_host(vector, copy.flat),)
        yield from schedule
        bucket.finite = copy.finite
        yield (device.to_device(copy.flat, vector),)

    return BucketReduction(reducer, copy, reduce, reduce, None)
