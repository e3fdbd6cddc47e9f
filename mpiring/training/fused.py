"""Fuses named tensors into buckets, and moves them when buckets are rebuilt."""

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


@dataclass(frozen=True)
class Fusion:
    """The user's choices of how tensors are fused into buckets, and how buckets are averaged.

    Attributes:
        bucket_bytes: Length of a bucket; None for `usual_bytes`.
        reducer: Reducer that averages buckets; or a mapping from names and patterns to Reducers.
        deterministic: If true, keep the first plan, so that results do not depend on the order in
            which tensors became ready.
        order: Value of `order` in a saved state, to continue with the same buckets.
        autotune: If true, find the fastest settings in the first steps; None for Config's setting.
    """

    bucket_bytes: int | None = None
    reducer: ReducerSpec = None
    deterministic: bool = False
    order: Sequence[str] | None = None
    autotune: bool | None = False


@dataclass(frozen=True)
class Placement:
    """The memory of an adapter's tensors, and the function to call when tensors have moved.

    Attributes:
        device: GPU that holds the tensors; None for host memory.
        mark: Function that returns the event after which the GPU has written a ready tensor; by
            default, it marks CuPy's stream.
        moved: Function to call with a tensor's name when its view has moved to a new bucket. It
            must drop the old view, because an old bucket's memory is freed once all its views have
            moved. Without this function, old buckets are filled with NaN, to reveal the use of an
            old view.
    """

    device: Device | None = None
    mark: Callable[[], Event] | None = None
    moved: Callable[[str], None] | None = None


class Views(Mapping[str, Array]):
    """Tensors by name, which can be changed in place, but not replaced.

    Args:
        views: The tensors; the mapping may change later.
        holder: Name of this mapping in messages.
    """

    _error: type[MpiringError] = GradientError
    _reason = " lies in a bucket and"

    def __init__(self, views: Mapping[str, Array], holder: str) -> None:
        self._views, self._holder = views, holder

    def __getitem__(self, name: str) -> Array:
        try:
            return self._views[name]
        except KeyError:
            known = first_few(nearest(str(name), self._views), 8)
            raise KeyError(f"no parameter is called {name!r}; {self._holder} has {known}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def __setitem__(self, name: str, value: object) -> None:
        """Accept the end of `views[name] += value`, which has already written in place.

        Raises:
            GradientError: Another array is assigned, which would not be used. For master weights,
                the error is a ConfigError.
        """
        if value is not self._views.get(name):
            view = f"{self._holder}[{name!r}]"
            raise self._error(f"{view}{self._reason} cannot be replaced; write into it: "
                              f"{view}[...] = ...")


@dataclass(frozen=True)
class BucketReduction:
    """The method by which a bucket is averaged, chosen when the bucket is built.

    Attributes:
        reducer: Reducer of the bucket.
        bucket: Bucket that the Reducer averages; it may be a copy in host memory.
        reduce: Function that returns the schedule, given collectives.
        scatter: Like `reduce`, but each rank needs its own slice only.
        device: GPU on whose memory the schedule works; None for host memory.
    """

    reducer: Reducer
    bucket: Bucket
    reduce: Build[None]
    scatter: Build[None]
    device: Device | None

    @functools.cached_property
    def text(self) -> str:
        """The Reducer and the vector, for messages."""
        plan = self.bucket.plan
        return f"{self.reducer!r} of {plan.dtype.name} ({plan.size},)"


class FusedTensors:
    """Fuses tensors into buckets, which are rebuilt when a better order is known.

    At first, tensors are fused in reverse order, which is the order of most backward passes.

    Args:
        tensors: Tensors, the same and in the same order on every rank.
        comm: Communicator of the ranks to average over.
        fusion: Settings by which tensors are fused.
        placement: Memory of the tensors.

    Attributes:
        tensors: Tensors by name, in the given order.
        views: Views by name; replaced by new views when buckets are rebuilt.
        buckets: Buckets in the order in which they are sent.
        version: Number of times that buckets were built.
        reductions: Reduction of each bucket.
        home: Bucket of each tensor.
        compressors: Reducers that have a state.
        mark: Function `mark` of the placement.
        gpu: Description of the GPU that holds the buckets; "" for host memory.
        choice: Length of buckets, and other settings that change the speed.
        is_final: Whether the order is final.
        dense_bytes: Number of bytes that this rank would send to other nodes in a step without
            compression.

    Raises:
        ConfigError: A reducer is invalid or unsuitable, a pattern matches no name, or an order has
            other names.

    Collective: yes. Blocking: yes.
    """

    def __init__(self, tensors: Sequence[TensorSpec], comm: Communicator, fusion: Fusion,
                 placement: Placement) -> None:
        self.tensors = {tensor.name: tensor for tensor in tensors}
        self._comm, self._moved = comm, placement.moved
        self._device, self.mark = placement.device, placement.mark
        self.gpu = "" if self._device is None else str(self._device)
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
        # Replaced buckets; the user may still have views into them.
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
        """The names in the order in which they are fused; None while it may change."""
        return [tensor.name for tensor in self._fused] if self.is_final else None

    def _begin_step(self) -> None:
        """Apply a state that a Reducer has loaded, and discard the buckets that were replaced.

        Collective: if there is such a state. Blocking: if there is.
        """
        self._resume()
        for bucket in self._retired:
            bucket.poison()
        self._retired = []

    def _end_step(self, ready: Sequence[str]) -> None:
        """Mark all tensors as missing; after the first step, fuse them in rank 0's order.

        Args:
            ready: Names in the order in which this rank's tensors became ready.

        Collective: yes, after the first step. Blocking: after the first step.
        """
        if not self.is_final:
            self.is_final = True
            self.fuse(self._comm.broadcast_object(list(ready), root=0))
        for bucket in self.buckets:
            bucket.expect_all()

    def fuse(self, order: Sequence[str]) -> None:
        """Fuse the tensors in another order; values are moved.

        Args:
            order: All names.

        Collective: yes. Blocking: yes.
        """
        self._fused = [self.tensors[name] for name in order]
        self._follow_plan()

    def use(self, choice: Choice) -> None:
        """Use other settings from the next step on; values are moved.

        Args:
            choice: The settings.

        Collective: yes. Blocking: yes.
        """
        self.choice, self._comm.tunable.operations_in_flight = choice, choice.operations
        self._follow_plan()

    def _follow_plan(self) -> None:
        """Rebuild the buckets if the plan has changed."""
        if self.plan(self.choice.bucket_bytes) != tuple(bucket.plan for bucket in self.buckets):
            self._rebuild()

    def _resume(self) -> bool:
        """Build the buckets of the state that a Reducer has loaded; return whether there is one."""
        orders = [compressor.loaded_order for compressor in self.compressors
                  if compressor.loaded_order is not None]
        if not orders:
            return False
        self._fused = [self._ordered(order) for order in orders][0]
        # This call fails unless all ranks have loaded a state.
        self._comm.submit(Call("load", "the states of all ranks' reducers"),
                          lambda collectives: collectives.barrier()).wait()
        self.is_final = True
        self._rebuild()
        return True

    def _ordered(self, order: Sequence[str]) -> list[TensorSpec]:
        """Return the tensors in the order of a saved state.

        Raises:
            ConfigError: The state belongs to another model.
        """
        if not isinstance(order, Sequence) or not all(isinstance(name, str) for name in order):
            raise ConfigError(f"order={order!r:.200}: expected a list of names, as the attribute "
                              f"`order` was")
        if sorted(order) != sorted(self.tensors):
            raise ConfigError(
                f"rank {self._comm.rank}: the loaded state is of another model: it has "
                f"{', '.join(order)}; this one has {', '.join(self.tensors)}")
        return [self.tensors[name] for name in order]

    def plan(self, bucket_bytes: int) -> tuple[BucketPlan, ...]:
        """Return the plans of the buckets for another bucket length."""
        return plan(self._fused, bucket_bytes, lambda tensor: id(self._reducers[tensor.name]))

    def _rebuild(self) -> None:
        """Build buckets, one after another, and move the tensors into them."""
        if self._moved is None:
            self._retired += self.buckets
        self.buckets, self.reductions = [], []
        self.version += 1
        self.home.clear()
        empty = functools.partial(self._comm.empty, device=self._device or "cpu")
        if self._arrays and self.mark is not None:
            # The GPU may not have written the tensors that are moved.
            await_event(self.mark())
        for index, bucket_plan in enumerate(self.plan(self.choice.bucket_bytes)):
            bucket = Bucket(index, bucket_plan, empty, self._device)
            self.buckets.append(bucket)
            self._move_into(bucket)
            self.reductions.append(self._reduction_of(bucket))
        if self._device is not None:
            # Packages other than CuPy may write on other streams.
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
    """Return a reduction of a bucket on a GPU that uses a copy in pinned host memory."""
    def pinned(n: int, dtype: "np.dtype[Any]") -> Array:
        return device.gpu.pinned(n * dtype.itemsize).view(dtype)

    # Memory that a node's ranks share begins at a page, so that `pin` can lock it.
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
