"""The base of Reducers that compress messages between nodes and have state for each slice."""

import hashlib
import itertools
import logging
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ..arguments import refuse_other_state
from ..buckets.bucket import Bucket
from ..sharding.state import BucketState, BucketStates, SliceState, Wide
from ..errors import ConfigError
from ..gpu import vectors
from ..gpu.device import Device
from ..memory.arrays import CACHE_LINE_BYTES, Array, dtype_name
from ..operations.collectives import Collectives
from ..transport.base import Channel, Schedule

Between = Callable[["SliceExchange", Wide, Wide | None], Schedule[bool]]

_log = logging.getLogger("mpiring")

_FLOATING = ("float16", "bfloat16", "float32", "float64")
_EDITION = 2


@dataclass
class Cost:
    """Cost of compression on this rank.

    Attributes:
        encode_s, decode_s: Seconds of computation before and after messages; on a GPU, seconds to
            queue the computation.
        wire_s: Seconds of waiting for messages, added up over the buckets in flight.
    """

    encode_s: float = 0.0
    wire_s: float = 0.0
    decode_s: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.encode_s + other.encode_s, self.wire_s + other.wire_s,
                    self.decode_s + other.decode_s)


@dataclass(frozen=True)
class SliceExchange:
    """The exchange of one slice between nodes.
    One rank of each node has the slice, and `net` connects these ranks. `borrow` lends scratch
    memory, given the number of elements and their dtype. `step` counts the steps that were applied.

    `position` has the indices of the bucket, of the slice and of its parts. It is the same on all
    nodes and differs between parts, so that each part has different random numbers.
    """

    net: Channel
    state: SliceState
    borrow: Callable[[int, DTypeLike], AbstractContextManager[Array]]
    step: int
    position: tuple[int, ...]
    cost: Cost = field(default_factory=Cost)

    def seeded(self, seed: int) -> "SliceExchange":
        """Return the same exchange, with other random numbers."""
        return replace(self, position=(*self.position, seed))

    def key(self, *numbers: int) -> int:
        """Return 64 bits that depend on the step, the position, the rank, and `numbers`."""
        text = repr((self.step, self.position, self.net.rank, numbers)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

    @contextmanager
    def borrow_bytes(self, sizes: Sequence[int]) -> Iterator[list[Array]]:
        """Lend vectors of these sizes, each aligned to a cache line."""
        ends = list(itertools.accumulate(
            -(-size // CACHE_LINE_BYTES) * CACHE_LINE_BYTES for size in sizes))
        with self.borrow(ends[-1], np.uint8) as memory:
            yield [memory[start:start + size] for start, size in zip([0, *ends], sizes)]

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """Count the time within the block as encoding."""
        began = time.perf_counter()
        yield
        self.cost.encode_s += time.perf_counter() - began

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Count the time within the block as decoding."""
        began = time.perf_counter()
        yield
        self.cost.decode_s += time.perf_counter() - began


class Compressor(ABC):
    """A Reducer that compresses messages between nodes.

    Within a node, gradients are summed without compression. Each rank then has a slice of a bucket,
    and exchanges it with the ranks of other nodes that have the same slice. Subclasses define this
    exchange in `between`. On one node nothing is compressed, and the mean is plain.

    The state changes only with steps that are applied. A step is not applied if a gradient of any
    rank was not finite.

    One object serves one model.

    Attributes:
        feeds_back: If true, parts that were not sent are added to the next gradients.
        on_gpus: If true, gradients on a GPU are compressed there, and the state is on the GPU. If
            false, gradients are compressed in host memory, which also holds the state.
        whole_tensors: If true, buckets are cut into slices only between tensors.
        cost: Cost since the last call of `take_cost`.
    """

    feeds_back = on_gpus = whole_tensors = False

    def __init__(self) -> None:
        self.cost = Cost()
        self._states = BucketStates()
        self._loaded: Mapping[str, Any] | None = None
        self._order: list[str] = []
        self._world: tuple[int, int, Sequence[Sequence[int]]] = (0, 1, ((0,),))
        self._user: weakref.ref[Any] | None = None

    # Methods that subclasses define

    @abstractmethod
    def between(self, exchange: SliceExchange, x: Wide, lost: Wide | None) -> Schedule[bool]:
        """Return the schedule that replaces a slice by its mean over nodes.

        Args:
            exchange: The ranks, and this rank's state of the slice.
            x: Shape (n,); may be empty. Overwritten by the same bits on all nodes.
            lost: Shape (n,), or None if not needed. Overwritten by the part of this rank's `x` that
                the result lacks. The mean over nodes of result + lost is the mean of `x`.

        Returns:
            Whether the contributions of all nodes were finite. If false, the result is not finite
            either. Always true on a GPU, because a check would synchronize with the GPU.
        """

    def compresses(self, nodes: int, step: int) -> bool:
        """Return whether a step is compressed, the same on all ranks; if not, the mean is plain.

        Args:
            nodes: Number of nodes.
            step: Number of steps that were applied.
        """
        return nodes > 1

    def prepare(self, device: Device | None) -> None:
        """Do slow work, such as compilation, before the first gradients are sent.

        Args:
            device: The GPU that holds the gradients; None for host memory.
        """

    # Methods that an Averager calls

    def reduce(self, collectives: Collectives, bucket: Bucket) -> Schedule[None]:
        """Return the schedule that replaces a bucket by its mean over ranks.

        Args:
            collectives: Collectives of the operation.
            bucket: Bucket of gradients; see `attach_buckets`.

        Raises:
            ConfigError: The bucket was not attached.
        """
        state = self._states.of(bucket)
        if state is None:
            raise ConfigError(f"{self!r} does not know {bucket.label}; call attach_buckets before")
        if not self.compresses(len(collectives.nodes), state.steps):
            return collectives.allreduce(bucket.vector, op="mean")
        return self._reduce(collectives, bucket, state)

    def _reduce(self, collectives: Collectives, bucket: Bucket,
                state: BucketState) -> Schedule[None]:
        def average(net: Channel, x: Array, j: int) -> Schedule[bool]:
            exchange = SliceExchange(net, state.slices[j], collectives.borrow, state.steps,
                                     (bucket.index, j), self.cost)
            return self._in_float32(exchange, x)

        bucket.clear_padding()
        finite = yield from collectives.between_nodes(bucket.vector, state.bounds, average)
        # The result of `between` has no meaning on a GPU.
        bucket.finite = finite if bucket.device is None else None

    def _in_float32(self, exchange: SliceExchange, x: Array) -> Schedule[bool]:
        cost, began = exchange.cost, time.perf_counter()
        computed_s = cost.encode_s + cost.decode_s
        if x.dtype == np.float32:
            finite = yield from self.between(exchange, x, None)
        else:
            with exchange.borrow(x.size, np.float32) as wide:
                vectors.convert(wide, x)
                finite = yield from self.between(exchange, wide, None)
                vectors.convert(x, wide)
        computed_s = cost.encode_s + cost.decode_s - computed_s
        cost.wire_s += time.perf_counter() - began - computed_s
        return finite

    def serve(self, user: object) -> None:
        """Start serving a model.

        Args:
            user: Object that uses the Reducer for the model.

        Raises:
            ConfigError: The Reducer still serves another model.
        """
        served = None if self._user is None else self._user()
        if served is not None and served is not user:
            raise ConfigError(
                f"this {self!r} serves another model already, whose residuals it keeps; make one "
                f"Reducer for each model")
        if self._user is not None and served is None:
            # The model is gone; its residuals do not concern the next one.
            self._states = BucketStates()
        self._user = weakref.ref(user)

    def release(self) -> None:
        """Stop serving a model, so that another model or new buckets can use the Reducer."""
        self._user = None

    def take_cost(self) -> Cost:
        """Return the cost since the last call."""
        cost, self.cost = self.cost, Cost()
        return cost

    @property
    def loaded_order(self) -> Sequence[str] | None:
        """Order of gradients in a loaded state that was not applied yet; None if there is none."""
        return None if self._loaded is None else list(self._loaded["order"])

    def attach_buckets(self, collectives: Collectives, buckets: Sequence[Bucket],
                       order: Sequence[str]) -> Schedule[None]:
        """Return the schedule that moves the state, or a loaded state, to new buckets.

        `order` has the names of all gradients of the model, in the order in which they are fused.

        Raises:
            ConfigError: The dtype of a bucket cannot be compressed, or the loaded state does not
                fit.
        """
        for bucket in buckets:
            kind = dtype_name(bucket.plan.dtype)
            if kind not in _FLOATING:
                raise ConfigError(
                    f"{self!r} cannot compress {kind}, of {bucket.label}; map these names to "
                    f"Mean(): reducer={{'name': Mean(), '*': {self!r}}}")
        nodes = tuple(map(tuple, collectives.nodes))
        if len(nodes) > 1 and buckets:
            self.prepare(buckets[0].device)
        self._world, self._order = (collectives.rank, collectives.size, nodes), list(order)
        if self._loaded is not None:
            self._refuse_other_ranks(self._loaded)
            self._refuse_other_tensors(self._loaded, buckets)
            self._states.load_state_dict(self._loaded["tensors"])
            self._loaded = None
        yield from self._states.rebuild(
            buckets, lambda plan: dict.fromkeys(self.vector_names, np.float32),
            lambda bucket: _bounds(bucket, collectives.slices, self.whole_tensors),
            collectives.own_slices, collectives.allgather_on_node)

    @property
    def vector_names(self) -> tuple[str, ...]:
        """Names of the vectors in its state, the same on all ranks."""
        return ("residual",) if self.feeds_back else ()

    def commit_step(self, applied: bool) -> None:
        """End a step; rank 0 logs the end of a warm-up, during which means are plain.

        Args:
            applied: If true, all ranks applied the step; otherwise, the state does not change.
        """
        before = self._states.steps
        self._states.commit_step(applied)
        rank, _, nodes = self._world
        if rank == 0 and self.compresses(len(nodes), self._states.steps) and not self.compresses(
                len(nodes), before):
            _log.warning("%r: after %d steps with plain means, gradients are compressed between "
                         "nodes from now on", self, self._states.steps)

    def rescale(self, factor: float) -> None:
        """Multiply the state, because the scale of the loss has changed.

        Args:
            factor: New scale divided by the old scale.
        """
        self._states.multiply(factor)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of this rank's state: numbers, strings and arrays.

        Call it between steps; every rank saves its own state. A run that loads it on the same
        number of ranks continues with bitwise identical results.
        """
        rank, size, nodes = self._world
        return {
            "edition": _EDITION, "reducer": repr(self), "rank": rank, "size": size,
            "nodes": [list(ranks) for ranks in nodes], "order": list(self._order),
            "tensors": self._states.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict` of this rank; call it on all ranks.

        At the next step, or when a model is wrapped, gradients move to the buckets of the saved
        state.

        Args:
            state: The state of this rank.

        Raises:
            ConfigError: `state` does not come from `state_dict` of a Reducer with these settings.
                If it comes from another rank, or from another number of ranks or nodes, the next
                step raises ConfigError.
        """
        refuse_other_state(state, ("edition", "reducer"), f"of {self!r}")
        if state["edition"] != _EDITION:
            raise ConfigError(
                f"the state of {self!r} has edition {state['edition']!r}, expected {_EDITION}: "
                f"load it with the mpiring that saved it")
        if state["reducer"] != repr(self):
            raise ConfigError(
                f"the state is of {state['reducer']}, but this is {self!r}; resume with the "
                f"settings that it was saved with")
        self._loaded = state

    def _refuse_other_ranks(self, state: Mapping[str, Any]) -> None:
        saved = state["rank"], state["size"], tuple(map(tuple, state["nodes"]))
        if saved != self._world:
            rank, size, nodes = self._world
            raise ConfigError(
                f"rank {rank} of {size} on {len(nodes)} node(s): the state that was loaded is of "
                f"rank {saved[0]} of {saved[1]} on {len(saved[2])} node(s). The "
                f"residuals of a rank cannot be redistributed; resume on the same ranks and nodes, "
                f"or start with a new Reducer, which loses only the residuals")

    def _refuse_other_tensors(self, state: Mapping[str, Any], buckets: Sequence[Bucket]) -> None:
        reduced = {name for bucket in buckets for name in bucket.views}
        # The order also includes tensors that were frozen when the state was saved.
        saved = {name for name in state["order"] if name in state["tensors"]}
        if reduced != saved:
            raise ConfigError(
                f"rank {self._world[0]}: {self!r} is to reduce {', '.join(sorted(reduced))}, but "
                f"the state that was loaded is of {', '.join(sorted(saved))}; resume with the same "
                f"model and reducers")


def _bounds(bucket: Bucket, slices: int, whole_tensors: bool) -> list[int]:
    size = bucket.plan.size
    bounds = [i * size // slices for i in range(slices + 1)]
    if whole_tensors:
        ends = [0, *itertools.accumulate(tensor.padded_size for tensor in bucket.plan.tensors)]
        inner = [i * size / slices for i in range(1, slices)]
        bounds[1:-1] = [min(ends, key=lambda end: abs(end - bound)) for bound in inner]
    return bounds


def with_feedback(
    exchange: SliceExchange, x: Wide, lost: Wide | None, between: Between,
) -> Schedule[bool]:
    """Return the schedule that averages a slice plus its residual; the loss is the next residual.

    `lost` is set to zero, because feedback loses nothing.

    Source: Karimireddy et al., ICML 2019, algorithm 2.
    """
    if lost is not None:
        vectors.clear(lost)
    with exchange.encoding():
        vectors.add(x, exchange.state.vector("residual"))
    return between(exchange, x, exchange.state.next("residual"))


class ErrorFeedback(Compressor):
    """Adds to the next gradients the parts that another Reducer did not send.

    Over time, the sum of all means is the sum of all gradients, except for one residual. The state
    takes twice the memory of this rank's slices of the gradients (float32): one half is needed to
    discard steps that are not applied.

    Args:
        reducer: Compressor, such as Cast or Int8. A Compressor that already feeds back its errors
            is used unchanged.

    Raises:
        ConfigError: The reducer does not compress.

    Source: Seide et al., Interspeech 2014. Karimireddy et al., ICML 2019.
    """

    feeds_back = True

    def __init__(self, reducer: Compressor) -> None:
        super().__init__()
        if not isinstance(reducer, Compressor):
            raise ConfigError(
                f"ErrorFeedback({reducer!r}): expected a Reducer that compresses, such as Int8(); "
                f"a plain mean has no errors")
        self.reducer = reducer
        self.on_gpus, self.whole_tensors = reducer.on_gpus, reducer.whole_tensors

    def __repr__(self) -> str:
        return f"ErrorFeedback({self.reducer!r})"

    @property
    def vector_names(self) -> tuple[str, ...]:
        """Names of the vectors in its state, the same on all ranks."""
        return self.reducer.vector_names if self.reducer.feeds_back else ("residual",)

    def compresses(self, nodes: int, step: int) -> bool:
        """Return whether a step is compressed."""
        return self.reducer.compresses(nodes, step)

    def prepare(self, device: Device | None) -> None:
        """Let the inner Reducer compile its code."""
        self.reducer.prepare(device)

    def between(self, exchange: SliceExchange, x: Wide, lost: Wide | None) -> Schedule[bool]:
        """Return the schedule that replaces a slice by its mean over nodes."""
        if self.reducer.feeds_back:
            return self.reducer.between(exchange, x, lost)
        return with_feedback(exchange, x, lost, self.reducer.between)
