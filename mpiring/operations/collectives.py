"""Builds the schedules of one operation, for the communicator and for Reducers."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ..collectives import (
    chain, direct, doubling, exchange, hierarchical, native, ring, shared)
from ..errors import ConfigError
from ..gpu.interface import Queued
from ..gpu.nccl import Nccl
from ..gpu.vectors import copy_to
from ..memory.arrays import Array, as_bytes, bounds_of, chunks_of, cut, slices
from ..memory.reduction import Combine, reduction
from ..transport.base import Channel, Members, Node, Request, Schedule, T
from ..transport.node_memory import Alone
from ..transport.windows import mapped_once
from .algorithms import (
    EAGER, EAGER_HALVES, NO_GPU, Algorithm, Case, choose, choose_halves, log_fallback)
from .resources import Resources

_MAX_CHOSEN = 4096


class Collectives:
    """The schedules of one operation, bound to its channel; Reducers build on them.

    An operation may run several schedules, one after another, in the same order on all ranks. They
    share its barriers, its staging slots and its channel. Schedules that run concurrently must be
    separate operations. The argument `op` is an op of Reduction; vectors have shape (n,). An op or
    an algorithm that does not support the dtype raises ConfigError.

    Attributes:
        node: Ranks of this node in this operation; `Alone` if this rank is alone on its node.
        preferred: Algorithm that "auto" stands for, if it supports the case.
        gpu: Name of the GPU that holds the vectors; "" for host memory.
        without_nccl: Reason why these operations cannot use NCCL; "" if they can.
        algorithm: Name of the algorithm of the last allreduce, if any.
        sent: List whose only number is the bytes that this rank has sent so far.
        ready: Requests for which the operation waits before it begins; its builder sets them.
    """

    gpu = ""
    without_nccl = NO_GPU
    __slots__ = ("rank", "size", "node", "sequence", "resources", "windows", "tuning",
                 "preferred", "algorithm", "sent", "ready", "_net", "_window_count")

    def __init__(self, resources: Resources, node: Node | None, sequence: int) -> None:
        transport = resources.transport
        self.rank, self.size = transport.rank, transport.size
        self.node: Node = Alone(self.rank) if node is None else node
        self.resources, self.sequence = resources, sequence
        self.windows, self.tuning = resources.windows, resources.tuning
        self.preferred, self.algorithm = resources.algorithm, ""
        self.sent = [0]
        self.ready: Sequence[Request] = ()
        self._net: Channel | None = None
        self._window_count = 0

    @property
    def net(self) -> Channel:
        """The channel of the operation."""
        if self._net is None:
            self._net = channel = self.resources.transport.channel(self.sequence)
            channel.sent = self.sent
        return self._net

    @property
    def nccl(self) -> Nccl:
        """NCCL's communicator, if the operation can use NCCL."""
        raise ConfigError(self.without_nccl)

    @property
    def ring(self) -> Channel:
        """The channel in node order."""
        return self.net if self.resources.in_order else Members(self.net, self.order)

    @property
    def order(self) -> Sequence[int]:
        """All ranks, node after node."""
        return self.resources.order

    @property
    def nodes(self) -> Sequence[Sequence[int]]:
        """List of ranks for each shared memory; one rank each without shared memory."""
        return self.resources.nodes

    @property
    def slices(self) -> int:
        """Number of ranks of the largest node, and of slices in exchanges between nodes."""
        return max(map(len, self.nodes))

    @property
    def own_slices(self) -> range:
        """Numbers of the slices that this rank exchanges."""
        return range(self.node.rank, self.slices, self.node.size)

    @property
    def _one_node(self) -> Node | None:
        """The ranks of the node, if all ranks are on it and there are several."""
        return self.node if self.node.size == self.size > 1 else None

    def borrow(self, n: int, dtype: DTypeLike) -> AbstractContextManager[Array]:
        """Return a context manager that lends scratch memory for n elements."""
        return self.resources.scratch.borrow(n, dtype)

    def combiner(self, op: str, dtype: "np.dtype[Any]", size: float) -> Combine:
        """Return the reduction for vectors in host memory; see Reduction."""
        # If the network is the bottleneck, loading compiled code is not worthwhile.
        return reduction(op, dtype, size, compiled=self.node.size > 1)

    # Combining

    def allreduce(self, x: Array, *, op: str = "sum", algorithm: str = "auto") -> Schedule[None]:
        """Return the schedule that combines the vector `x` over all ranks, in place.

        With algorithm "auto" or "native", call this when the operation is created, not from inside
        a running schedule. With "ring" it may be called anywhere.
        """
        combine = self.combiner(op, x.dtype, self.size)
        row = self.algorithm_of(x, op, algorithm)
        self.algorithm = row.name
        return nothing() if self.size == 1 else row.allreduce(self, x, op, combine)

    def algorithm_of(self, x: Array, op: str, algorithm: str = "auto") -> Algorithm:
        """Return the algorithm that `allreduce` uses; raise the same errors."""
        return self._cached_choice(choose, x, op, algorithm)

    def _cached_choice(self, choose: Callable[..., T], x: Array, op: str,
                       requested: str = "auto") -> T:
        # Programs make the same few calls many times.
        chosen = self.resources.chosen
        key = choose, x.nbytes, x.dtype, op, requested, self.preferred, self.gpu
        choice: T | None = chosen.get(key)
        if choice is None:
            if len(chosen) >= _MAX_CHOSEN:
                chosen.clear()
            choice = chosen[key] = self._choose(choose, x, op, requested)
        return choice

    def _choose(self, choose: Callable[..., T], x: Array, op: str, requested: str) -> T:
        algorithm, model = self.preferred, self.resources.model
        case = Case(x.nbytes, x.dtype, op, self.size, len(self.nodes), self.tuning, self.gpu,
                    self.without_nccl)
        if requested == "auto" and algorithm != "auto":
            try:
                return choose(case, algorithm, model)
            except ConfigError as error:
                if self.rank == 0:
                    log_fallback(str(error))
        return choose(case, requested, model)

    def reduce_scatter(self, x: Array, *, op: str = "sum",
                       bounds: Sequence[int] | None = None) -> Schedule[Array]:
        """Return the schedule that combines this rank's slice of the vector `x`, in place.

        The slice of rank r is `x[bounds[r]:bounds[r + 1]]`, with size + 1 offsets from 0 to n, the
        same on all ranks. By default slices are equally long; see `chunks_of`. The other slices may
        be overwritten.

        Returns:
            The slice, a view of `x`; bitwise identical to an `allreduce` with the same algorithm.
        """
        combine, bounds = self.combiner(op, x.dtype, self.size), bounds or self._equal_bounds(x)
        halves = self._cached_choice(choose_halves, x, op)
        schedule = (nothing() if self.size == 1 else
                    halves.reduce_scatter(self, x, bounds, op, combine))
        return returning(x[bounds[self.rank]:bounds[self.rank + 1]], schedule)

    def allgather(self, x: Array, *, bounds: Sequence[int] | None = None) -> Schedule[None]:
        """Return the schedule that copies every rank's slice (see `reduce_scatter`) to all."""
        bounds = bounds or self._equal_bounds(x)
        halves = self._cached_choice(choose_halves, x, "sum")
        return nothing() if self.size == 1 else halves.allgather(self, x, bounds)

    def allgather_once(self, x: Array, *, bounds: Sequence[int]) -> Schedule[None]:
        """Return the schedule that sends every rank's slice of `x` to all nodes.

        Nothing is copied within a node. Each node sends its slices once and receives the slices of
        other nodes once. This rank writes its slice before the call. Slices of other nodes are
        overwritten after all ranks of this node have started. At the end, the array on the node is
        complete.

        The array is from `node_array`, or a part of it. If one slice is all of `x`, this is a
        broadcast.
        """
        # Other ranks of this node may read the old values until they reach this barrier.
        yield (self.node.barrier(),)
        if len(self.nodes) > 1:
            yield from hierarchical.by_rings(
                self, x, bounds, [hierarchical.IntraNode()] * self.tuning.in_flight)

    def _equal_bounds(self, x: Array) -> list[int]:
        return bounds_of(x.size, self.size)

    def reduce_scatter_chunks(
        self, chunks: Sequence[Array], *, op: str = "sum",
    ) -> Schedule[None]:
        """Return the schedule that combines vector r of `chunks` of all ranks on rank r.

        The vectors are in any memory. This rank's is overwritten by the result; the others are only
        read.
        """
        combine = self.combiner(op, chunks[0].dtype, self.size)
        return self.confirmed(self._combine_directly(chunks, combine))

    def _combine_directly(self, chunks: Sequence[Array], combine: Combine) -> Schedule[None]:
        """Return the schedule that sends chunks directly to the ranks that combine them."""
        if self._one_node is not None:
            yield from shared.reduce_rows(
                self._one_node, chunks, combine, self.tuning.rows_bytes)
            return
        n, direct_bytes = self.size * max(map(len, chunks)), self.tuning.direct_bytes
        size = direct.inbox_size(n, self.size, chunks[0].itemsize, direct_bytes)
        with self.borrow(size, chunks[0].dtype) as inbox:
            yield from direct.reduce_scatter(self.net, chunks, inbox, combine, direct_bytes)

    def native_allreduce(self, x: Array, op: str) -> Schedule[None]:
        """Return the schedule that combines the vector `x` with `MPI_Iallreduce`, in place.

        Call this when the operation is created, not from inside a running schedule.
        """
        resources = self.resources
        turn = resources.turns.join(self.sequence)
        self.count_sent(2 * self.least_sent(x.nbytes))
        return native.allreduce(
            resources.transport.iallreduce, turn, x, reduction(op, x.dtype, self.size))

    def least_sent(self, nbytes: int) -> int:
        """Return the least bytes that each rank must send if data goes from one to all nodes.

        Libraries do not report how many bytes they send to other nodes.
        """
        nodes = len(self.nodes)
        return (nodes - 1) * nbytes // nodes // self.node.size

    def count_sent(self, nbytes: int) -> None:
        """Count bytes that a library sends to other nodes for this rank."""
        self.resources.transport.bytes_sent += nbytes
        self.sent[0] += nbytes

    def reduce(self, x: Array, root: int, *, op: str = "sum") -> Schedule[None]:
        """Return the schedule that combines the vectors `x` of all ranks on rank `root`.

        Each rank combines a chunk, and sends it to `root`. On other ranks `x` is only read.
        """
        combine = self.combiner(op, x.dtype, self.size)
        if self._one_node is not None and self.fits_slots(x):
            return shared.eager(self, x, op, combine, root)
        return self.confirmed(self._reduce(x, root, combine))

    def is_eager(self, kind: str, x: Array, op: str) -> bool:
        """Return whether a collective uses the staging slots, with a single barrier on the node.

        The kind is "allreduce", "reduce_scatter", "allgather", "broadcast" or "barrier".
        """
        if kind == "allreduce":
            return self.algorithm_of(x, op) is EAGER
        if kind in ("reduce_scatter", "allgather"):
            # As in `reduce_scatter` and `allgather`.
            return self._cached_choice(choose_halves, x, op or "sum") is EAGER_HALVES
        return len(self.nodes) == 1 < self.size and x.nbytes <= self.tuning.moved_bytes

    def fits_slots(self, x: Array) -> bool:
        """Return whether a vector is short enough to be combined from the staging slots."""
        return shared.is_short(x.nbytes, x.dtype, self.size, self.tuning.eager_bytes)

    def _reduce(self, x: Array, root: int, combine: Combine) -> Schedule[None]:
        chunks = chunks_of(x, self.size)
        if self.rank == root:
            yield from self._combine_directly(chunks, combine)
            yield from self._gather(chunks[root], chunks, root)
            return
        with self.borrow(chunks[self.rank].size, x.dtype) as combined:
            copy_to(combined, chunks[self.rank])
            chunks[self.rank] = combined
            yield from self._combine_directly(chunks, combine)
            yield from self._gather(combined, (), root)

    # For Reducers, between nodes

    def between_nodes(
        self, x: Array, bounds: Sequence[int], exchange: hierarchical.Exchange[bool],
    ) -> Schedule[bool]:
        """Return the schedule in which nodes exchange their means with the function `exchange`.

        The mean of a node is weighted by its number of ranks divided by the mean number of ranks.
        The plain mean over nodes is then the mean over all ranks.

        Args:
            x: Floating vector of shape (n,). On all ranks it is overwritten by the slices that
                `exchange` has written.
            bounds: Offsets of the `slices` slices, from 0 to n.
            exchange: Function of the channel between the ranks that have a slice, the slice, and
                its number. It returns a schedule that makes the slice bitwise identical on all
                nodes.

        Returns:
            True if all exchanges on this node have returned True.
        """
        within = self.combiner("mean", x.dtype, self.size / len(self.nodes))
        inside = yield from hierarchical.synchronize(self, x, within)
        answers = yield from hierarchical.by_slices(
            self, 0, inside[0], x, slices(bounds), exchange)
        # The vectors of all ranks are complete after this.
        return all(answer for answer, in (yield from self.node.share(int(all(answers)))))

    def allgather_on_node(self, x: Array, bounds: Sequence[int]) -> Schedule[None]:
        """Return the schedule that copies each rank's slices to its node; see `between_nodes`."""
        within = self.combiner("sum", x.dtype, self.size)
        inside = yield from hierarchical.synchronize(self, x, within)
        yield from inside[0].spread(slices(bounds))
        yield (self.node.barrier(),)

    # Copying

    def allgather_chunks(self, chunks: Sequence[Array]) -> Schedule[None]:
        """Return the schedule that copies vector r of `chunks` of rank r to all ranks.

        They are in any memory, of the same lengths on all ranks. All but this rank's are
        overwritten.
        """
        nbytes, is_local = sum(chunk.nbytes for chunk in chunks), self._one_node is not None
        if not self.gpu and (nbytes <= self.tuning.moved_bytes if is_local else
                             doubling.gathers(self, nbytes)):
            return self._allgather_short(chunks)
        if is_local:
            return shared.allgather_chunks(self, chunks)
        return ring.allgather(
            self.ring, [chunks[rank] for rank in self.order], self.tuning.ring_bytes)

    def _allgather_short(self, chunks: Sequence[Array]) -> Schedule[None]:
        bounds = [0, *itertools.accumulate(chunk.nbytes for chunk in chunks)]
        x = np.empty(bounds[-1], np.uint8)
        slices = cut(x, bounds)
        slices[self.rank][...] = as_bytes(chunks[self.rank])
        yield from (doubling.allgather(self, self.net, x, bounds) if self._one_node is None else
                    shared.eager_allgather(self, x, bounds))
        for rank, (chunk, content) in enumerate(zip(chunks, slices)):
            if rank != self.rank:
                as_bytes(chunk)[...] = content

    def all_to_all(self, sends: Sequence[Array], receives: Sequence[Array]) -> Schedule[None]:
        """Return the schedule that sends `sends[r]` to rank r, and fills `receives`."""
        return self.confirmed(self._exchange(dict(enumerate(sends)), dict(enumerate(receives))))

    def gather(self, x: Array, parts: Sequence[Array], root: int) -> Schedule[None]:
        """Return the schedule that copies `x` of each rank r to `parts[r]` of rank `root`.

        On other ranks, `parts` is ignored.

        Raises:
            BufferMismatchError: A rank sends a different number of bytes.
        """
        return self.confirmed(self._gather(x, parts, root))

    def _gather(self, x: Array, parts: Sequence[Array], root: int) -> Schedule[None]:
        return self._exchange({root: x}, dict(enumerate(parts)) if self.rank == root else {})

    def scatter(self, parts: Sequence[Array], x: Array, root: int) -> Schedule[None]:
        """Return the schedule that copies `parts[r]` of rank `root` to `x` of each rank r.

        On other ranks, `parts` is ignored. Raises the same errors as `gather`.
        """
        sends = dict(enumerate(parts)) if self.rank == root else {}
        return self.confirmed(self._exchange(sends, {root: x}))

    def _exchange(self, sends: Mapping[int, Array],
                  receives: Mapping[int, Array]) -> Schedule[None]:
        return exchange.exchange(self.net, sends, receives)

    def confirmed(self, schedule: Schedule[None]) -> Schedule[None]:
        """Run a schedule in which ranks exchange data with ranks other than their neighbors.

        It ends after all ranks have confirmed that they made the same call.
        """
        yield from schedule
        if len(self.nodes) > 1:
            # Between nodes, a rank has compared only the call of its left neighbor. A rank whose
            # call differs does not reach this barrier.
            yield from chain.barrier(self.net)

    def allgather_bytes(self, payload: Array) -> Schedule[list[Array]]:
        """Return the schedule that gathers a byte vector from every rank, in rank order."""
        lengths = np.zeros(self.size, np.int64)
        lengths[self.rank] = payload.size
        # Receives need the lengths.
        yield from self.allgather_chunks(chunks_of(lengths, self.size))
        gathered = [np.empty(length, np.uint8) for length in lengths]
        gathered[self.rank] = payload
        yield from self.allgather_chunks(gathered)
        return gathered

    def broadcast(self, x: Array, root: int) -> Schedule[None]:
        """Return the schedule that copies the vector `x` of rank `root` to all ranks."""
        if self._one_node is not None:
            if x.nbytes <= self.tuning.moved_bytes:
                return shared.eager_broadcast(self, x, root)
            return shared.broadcast(self, x, root)
        if len(self.nodes) > self.tuning.direct_nodes and x.nbytes <= self.tuning.short_bytes:
            return self.confirmed(doubling.broadcast(self.net, x, root))
        return chain.broadcast(
            self.ring, x, self.order.index(root), self.tuning.broadcast_bytes)

    def broadcast_bytes(self, payload: Array, root: int) -> Schedule[Array]:
        """Return the schedule that copies a byte vector of any length to all ranks."""
        length = np.array([payload.size], np.int64)
        yield from self.broadcast(length, root)
        if self.rank != root:
            payload = np.empty(length[0], np.uint8)
        yield from self.broadcast(payload, root)
        return payload

    def barrier(self) -> Schedule[None]:
        """Return the schedule that ends after all ranks have started it."""
        if len(self.nodes) > 1:
            yield from chain.barrier(self.net)
        # The lowest rank of a node reaches this barrier only if it agrees with the other nodes.
        yield (self.node.barrier(),)

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> Schedule[Array]:
        """Return the schedule that returns an array, in node-shared memory if available."""
        if self.node.size == 1:
            return returning(np.empty(shape, dtype), nothing())
        return self.windows.empty(self.node, shape, dtype, self.next_window())

    def node_array(self, n: int, dtype: DTypeLike) -> Schedule[Array]:
        """Return the schedule that returns n zeros, stored once per node.

        The ranks of a node share the memory. A rank can read the elements that another rank has
        written after a barrier.

        Raises:
            ConfigError: A node does not have enough memory; raised on all ranks of all nodes.
        """
        nbytes, problem, memory = n * np.dtype(dtype).itemsize, "", None
        if self.node.size > 1 and nbytes:
            memory, problem = yield from mapped_once(self.node, nbytes)
        problems = yield from self.allgather_bytes(np.frombuffer(problem.encode(), np.uint8))
        for rank, text in enumerate(problems):
            if text.size:
                raise ConfigError(
                    f"rank {self.rank}: rank {rank} cannot allocate {nbytes} bytes of memory that "
                    f"its node shares ({bytes(text).decode()}): give the job more memory, or do "
                    f"not share the weights of a node")
        return np.zeros(n, dtype) if memory is None else memory.view(dtype)

    def next_window(self) -> int:
        """Return a number for a window, the same on all ranks; 0 means no window."""
        # Each operation counts its windows, because operations may end in any order.
        self._window_count += 1
        return self.sequence << 16 | self._window_count


# Function that returns the schedule of an operation.
Build = Callable[[Collectives], Schedule[T]]


def nothing() -> Schedule[None]:
    """Return a schedule without work."""
    yield ()


def returning(x: T, schedule: Schedule[Any]) -> Schedule[Any]:
    """Return a schedule that runs another schedule and then returns `x`; Queued if that one is."""
    result = yield from schedule
    return replace(result, result=x) if isinstance(result, Queued) else x
