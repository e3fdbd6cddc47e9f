"""Fuses named tensors into buckets, and chooses how each bucket is averaged."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..buckets.bucket import (
    Bucket, BucketPlan, TensorSpec, backward_order, owners_by_cost, plan, usual_bytes,
)
from ..communicator import Communicator
from ..errors import ConfigError, GradientError, MpiringError
from ..gpu.device import Device
from ..gpu.interface import UserStream, await_event
from ..memory.arrays import Array
from ..names import nearest
from ..operations.agreement import Call
from ..operations.collectives import Collectives
from ..engine.prepared import Pattern, Prepared
from ..operations.queue import ALARMS
from ..reducers.reducer import (
    Mean, Reducer, ReducerSpec, compressors, reduce_of, reducers_of, scatter_of)
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
        deterministic: If true, autotune is off.
        order: Names in the order in which to fuse them; None for `backward_order`.
        autotune: If true, find the fastest settings in the first steps; None for Config's setting.
        costs: For tensors that one rank each updates alone, the costs of their updates, by name.
    """

    bucket_bytes: int | None = None
    reducer: ReducerSpec = None
    deterministic: bool = False
    order: Sequence[str] | None = None
    autotune: bool | None = False
    costs: Mapping[str, float] = field(default_factory=dict, kw_only=True)


@dataclass(frozen=True)
class Placement:
    """The memory of an adapter's tensors, on a GPU or, if `device` is None, in host memory.

    The GPU writes tensors, and uses their means, on `stream`; by default, CuPy's current stream.
    """

    device: Device | None = None
    stream: UserStream | None = None


class Views(Mapping[str, Array]):
    """Tensors by name, which can be changed in place, but not replaced.

    The mapping that is passed may change later. `holder` is the name of this mapping in messages.
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

        Raises GradientError if another array is assigned, which would not be used. For master
        weights, the error is a ConfigError.
        """
        if value is not self._views.get(name):
            view = f"{self._holder}[{name!r}]"
            raise self._error(f"{view}{self._reason} cannot be replaced; write into it: "
                              f"{view}[...] = ...")


@dataclass(frozen=True)
class BucketReduction:
    """The method by which a bucket is averaged, prepared when the bucket is built.

    Attributes:
        bucket: Bucket that the Reducer averages; it may be a copy in host memory.
        reduce: Operation that averages the bucket.
        scatter: Like `reduce`, but each rank needs its own slice only.
    """

    reducer: Reducer
    bucket: Bucket
    reduce: Prepared
    scatter: Prepared


class FusedTensors:
    """Tensors that are fused into buckets, once.

    Tensors are the same and in the same order on every rank. Raises ConfigError if a reducer is
    invalid or unsuitable, a pattern matches no name, or an order has other names. Collective,
    blocking.

    Attributes:
        buckets: Buckets in the order in which they are sent.
        home: Bucket of each tensor.
        compressors: Reducers that have a state.
        gpu: Description of the GPU that holds the buckets; "" for host memory.
        choice: Settings that change the speed; see `due` for the length of buckets.
        order: Names in the order in which the tensors are fused.
        dense_bytes: Number of bytes that this rank would send to other nodes in a step without
            compression.
    """

    def __init__(self, tensors: Sequence[TensorSpec], comm: Communicator, fusion: Fusion,
                 placement: Placement) -> None:
        self.tensors = {tensor.name: tensor for tensor in tensors}
        self.device: Device | None = None
        self.stream, self._comm = placement.stream, comm
        self.gpu = "" if placement.device is None else str(placement.device)
        if placement.device is not None:
            self.device = comm.own_device(placement.device)
            self.stream = self.stream or self.device.gpu
        self._reducers = reducers_of(self.tensors, fusion.reducer)
        self.compressors = compressors(self._reducers.values())
        self.choice = Choice(
            usual_bytes(len(comm.memory_groups)) if fusion.bucket_bytes is None
            else fusion.bucket_bytes, comm.config.operations_in_flight)
        for compressor in self.compressors:
            compressor.serve(self)
        order = self.loaded_order or fusion.order
        self.order = [tensor.name for tensor in (
            backward_order(tensors) if order is None else self._ordered(order))]
        self._fusion = replace(fusion, bucket_bytes=self.choice.bucket_bytes, order=self.order)
        self._due: Fusion | None = None
        self.buckets: list[Bucket] = []
        self.reductions: list[BucketReduction] = []
        empty = functools.partial(comm.empty, device=self.device or "cpu")
        plans = self.plan(self.choice.bucket_bytes)
        # A step may also send weights in as many operations.
        self._queues = len(plans) <= ALARMS // 4
        for index, bucket_plan in enumerate(plans):
            self.buckets.append(Bucket(index, bucket_plan, empty, self.device))
            self.reductions.append(self._reduction_of(self.buckets[-1]))
        if self.device is not None:
            # Packages other than CuPy may write on other streams.
            await_event(self.device.gpu.mark())
        self.views = {name: view for bucket in self.buckets for name, view in bucket.views.items()}
        self.home = {name: bucket for bucket in self.buckets for name in bucket.views}
        self._load_reducers()
        nodes = comm.memory_groups
        (local,) = [len(ranks) for ranks in nodes if comm.rank in ranks]
        self.dense_bytes = sum(2 * (len(nodes) - 1) * bucket.flat.nbytes // len(nodes) // local
                               for bucket in self.buckets)

    @functools.cached_property
    def reducers(self) -> tuple[str, ...]:
        """The Reducers with their settings, in alphabetical order."""
        return tuple(sorted({repr(reducer) for reducer in self._reducers.values()}))

    @property
    def loaded_order(self) -> Sequence[str] | None:
        """The order in a state that the user has loaded into a Reducer, until it is applied."""
        return next((compressor.loaded_order for compressor in self.compressors
                     if compressor.loaded_order is not None), None)

    def use(self, choice: Choice) -> None:
        """Use other settings from the next step on; other buckets may then be due."""
        self._apply(choice)
        self._demand(bucket_bytes=choice.bucket_bytes)

    def _apply(self, choice: Choice) -> None:
        self.choice, self._comm.tunable.operations_in_flight = choice, choice.operations
        for reduction in self.reductions:
            for prepared in (reduction.reduce, reduction.scatter):
                prepared.adjust = choice.adjustment(reduction.bucket.plan.nbytes)
                prepared.forget()

    def demand_owners(self, costs: Mapping[str, float]) -> None:
        """Demand buckets in which tensors with these costs have owners; see Fusion."""
        self._demand(costs=costs)

    @property
    def due(self) -> Fusion | None:
        """The settings of the buckets that are to replace these; None while these are right."""
        if self.loaded_order is not None:
            self._demand(order=self.loaded_order)
        return self._due

    def _demand(self, **settings: Any) -> None:
        """Demand buckets with other settings; raise ConfigError if an order is of another model."""
        due = replace(self._due or self._fusion, **settings)
        plans = tuple(bucket.plan for bucket in self.buckets)
        self._due = None if self._plan(due) == plans else due

    def _load_reducers(self) -> None:
        """Give the Reducers their buckets, and apply the states that the user has loaded."""
        for compressor in self.compressors:
            buckets = [reduction.bucket for reduction in self.reductions
                       if reduction.reducer is compressor]
            # This call fails unless all ranks have loaded a state, or none has.
            state = "" if compressor.loaded_order is None else " and a loaded state"
            self._comm.submit(
                Call("attach buckets", f"{len(buckets)} buckets of {compressor!r}{state}"),
                functools.partial(compressor.attach_buckets, buckets=buckets, order=self.order),
            ).wait()

    def _ordered(self, order: Any) -> list[TensorSpec]:
        """Return tensors in a saved order; raise ConfigError if it belongs to another model."""
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
        return self._plan(replace(self._fusion, bucket_bytes=bucket_bytes))

    def _plan(self, fusion: Any) -> tuple[BucketPlan, ...]:
        tensors = self._ordered(fusion.order)
        costs = {tensor.name: fusion.costs[tensor.name]
                 for tensor in tensors if tensor.name in fusion.costs}
        return plan(tensors, fusion.bucket_bytes, lambda tensor: id(self._reducers[tensor.name]),
                    owners_by_cost(costs, self._comm.size))

    def queues(self, reducer: Reducer) -> bool:
        """Return whether a Reducer only queues work, and NaN and Inf give the alarm."""
        return self._queues and getattr(reducer, "queues", False)

    def _reduction_of(self, bucket: Bucket) -> BucketReduction:
        reducer = self._reducers[bucket.plan.tensors[0].name]
        if self.device is not None and (
                not getattr(reducer, "on_gpus", True)
                or isinstance(reducer, Compressor) and not self.device.gpu.programmable):
            return _on_host(bucket, self.device, self._comm, reducer)
        if type(reducer) is Mean and self.device is None:
            form, bounds = ("mean", bucket.plan.dtype, bucket.plan.size), bucket.bounds(
                self._comm.size)
            operations = [
                self._comm.prepared(_call(reducer, bucket), pattern)
                for pattern in (Pattern("allreduce", *form),
                                Pattern("reduce_scatter", *form, bounds=bounds))]
        else:
            operations = [
                self._comm.prepared(
                    _call(reducer, bucket), build=functools.partial(build, reducer, bucket=bucket),
                    device=self.device, ready=lambda: bucket.written, stream=self.stream,
                    is_agreed=self.queues(reducer))
                for build in (reduce_of, scatter_of)]
        return BucketReduction(reducer, bucket, *operations)


def _call(reducer: Reducer, bucket: Bucket) -> Call:
    plan = bucket.plan
    return Call("reduce", f"{reducer!r} of {plan.dtype.name} ({plan.size},)", bucket.label,
                plan.nbytes)


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

    def between_copies(vector: Any, schedule: Schedule[None]) -> Schedule[None]:
        yield bucket.written
        yield (device.to_host(vector, copy.flat),)
        yield from schedule
        bucket.finite = copy.finite
        yield (device.to_device(copy.flat, vector),)

    operation = comm.prepared(_call(reducer, bucket), build=reduce)
    return BucketReduction(reducer, copy, operation, operation)
