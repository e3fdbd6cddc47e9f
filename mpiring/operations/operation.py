"""Builds the schedules of one operation: what the communicator calls, and Reducers build on."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ..collectives import direct, hierarchical, native, node_copies, ring, shared
from ..errors import ConfigError
from ..gpu.vectors import copy_to
from ..memory.arrays import Array, chunks_of
from ..memory.reduction import Combine, reduction, widens
from ..transport.alone import Alone
from ..transport.base import Node, Schedule
from .copies import Copies
from .select import choose, say_fallback
from .windows import NOWHERE


class Collectives(Copies):
    """The schedules of one operation, bound to its channel: what Reducers build on.

    An operation may run several, but one after the other, in the same order on all ranks:
    they share its barriers, its slots and its channel. What shall run at once must be
    operations of their own.

    Attributes: see Copies.
    """

    __slots__ = ()

    # Length of slices (see hierarchical) and pieces: of the shortest and longest, where two.
    slice_bytes: int | None = None
    ring_bytes = ring.PIECE_BYTES
    direct_bytes = direct.PIECE_BYTES

    @property
    def nodes(self) -> Sequence[Sequence[int]]:
        """The ranks that share a memory, for each memory; without shared memory, one each."""
        return self._own.nodes

    @property
    def slices(self) -> int:
        """How many ranks the largest node has: what they exchange is cut into as many parts."""
        return max(map(len, self._own.nodes))

    @property
    def own_slices(self) -> range:
        """The numbers of those slices that this rank exchanges."""
        node = self.node or Alone(self.rank)
        return range(node.rank, self.slices, node.size)

    def dense_bytes(self, nbytes: int) -> int:
        """Return how many bytes this rank has to send to other nodes to combine so many."""
        nodes, sharers = len(self._own.nodes), 1 if self.node is None else self.node.size
        return 2 * (nodes - 1) * nbytes // nodes // sharers

    def combiner(self, op: str, dtype: "np.dtype[Any]", size: float) -> Combine:
        """Return what combines vectors where they lie; see Reduction."""
        return reduction(op, dtype, size)

    def allreduce(self, x: Array, *, op: str = "sum", algorithm: str = "auto") -> Schedule[None]:
        """Return the schedule that combines the vector `x` over all ranks, in place.

        With algorithm "auto" or "native" this must be called when the operation
        is made, not from inside a running schedule; "ring" can be called anywhere.

        Raises:
            ConfigError: The op or the algorithm does not suit the dtype.
        """
        own = self._own
        combine = self.combiner(op, x.dtype, self.size)
        if algorithm == "auto" and own.algorithm != "auto":
            algorithm = self._preferred(x, op)
        self.algorithm = algorithm = self._choose(x, op, algorithm)
        if self.size == 1:
            return _nothing()
        if algorithm == "eager" and self.node is not None:
            return shared.eager(self.node, x, combine)
        if algorithm == "shared" and self.node is not None:
            return self._shared(self.node, x, op, combine)
        if algorithm == "direct":
            return self._direct(x, combine)
        if algorithm == "hierarchical":
            return self._hierarchical(self.node or Alone(self.rank), x, op)
        if algorithm == "short":
            return self._short(self.node or Alone(self.rank), x, op)
        if algorithm == "native":
            turn = own.turns.join(self.sequence)
            # What MPI really sends, it does not tell.
            nbytes = self.dense_bytes(x.nbytes)
            own.transport.bytes_sent += nbytes
            self._native_bytes += nbytes
            return native.allreduce(own.transport, turn, x, reduction(op, x.dtype, self.size))
        return self._ring(x, combine)

    def _preferred(self, x: Array, op: str) -> str:
        """Return the configured algorithm, or "auto" where it cannot be used."""
        wish = self._own.algorithm
        if wish != "auto":
            try:
                self._choose(x, op, wish)
            except ConfigError as error:
                if self.rank == 0:
                    say_fallback(str(error))
                return "auto"
        return wish

    def _choose(self, x: Array, op: str, wish: str) -> str:
        own = self._own
        return choose(x.nbytes, x.dtype, op, wish, self.size, len(own.nodes), own.model)

    def _shared(self, node: Node, x: Array, op: str, combine: Combine) -> Schedule[None]:
        windows = self._own.windows
        place = windows.position_of(x)
        short = shared.is_short(x.nbytes, x.dtype, node.size, shared.EAGER_PRIVATE_BYTES)
        if short and node.met:
            yield (node.barrier(),)
        if short and place == NOWHERE:
            # The others' vectors are probably private, too.
            copies = shared.laid_out(node, x)
        places = yield from node.share(*place)
        slices = windows.slices(node, places, x)
        if slices is not None:
            yield from shared.in_place(node, slices, combine)
        elif short and all(other == NOWHERE for other in places):
            combine.combine(copies, x)
        else:
            yield from shared.staged(node, x, combine)

    def _inside(
        self, node: Node, x: Array, within: Combine,
    ) -> Schedule[Sequence[hierarchical.Inside]]:
        """Meet the ranks of the node; return how they combine their vectors."""
        windows = self._own.windows
        places = yield from node.share(*windows.position_of(x))
        vectors = [x] if node.size == 1 else windows.vectors(places, x)
        return (hierarchical.by_slots(node, x, within) if vectors is None
                else hierarchical.in_windows(node, vectors, within))

    def between_nodes(
        self, x: Array, bounds: Sequence[int], exchange: hierarchical.Exchange[bool],
    ) -> Schedule[bool]:
        """Return the schedule that lets nodes exchange their means as they like.

        The means are weighted: a node's is that of its ranks times their number over the
        mean number, so that the plain mean of all nodes' is that of all ranks.

        Args:
            x: Shape (n,), floating. Overwritten by what `exchange` leaves, on all ranks.
            bounds: Where it is cut into `slices` slices; from 0 to n.
            exchange: Is given the ranks that have a slice, the slice, which is to become the
                same bits on all nodes, and its number.

        Returns:
            Whether all exchanges on this node have returned True.
        """
        own, node = self._own, self.node or Alone(self.rank)
        within = self.combiner("mean", x.dtype, self.size / len(own.nodes))
        inside = yield from self._inside(node, x, within)
        piece = [slice(start, stop) for start, stop in zip(bounds, bounds[1:])]
        answers = yield from hierarchical.by_slices(
            self.net, own.nodes, inside[0], node, x, piece, exchange)
        # Nobody's vector is complete before.
        return all(one for one, in (yield from node.share(int(all(answers)))))

    def handed_out(self, x: Array, bounds: Sequence[int]) -> Schedule[None]:
        """Return the schedule that copies each rank's slices of `x` to the others of its node.

        Args:
            x: Shape (n,).
            bounds: As for `between_nodes`.
        """
        node = self.node or Alone(self.rank)
        inside = yield from self._inside(node, x, self.combiner("sum", x.dtype, self.size))
        yield from inside[0].spread([slice(*pair) for pair in zip(bounds, bounds[1:])])
        yield (node.barrier(),)

    def _hierarchical(self, node: Node, x: Array, op: str) -> Schedule[None]:
        levels = self._levels(op, x)
        inside = yield from self._inside(node, x, levels.within)
        yield from self._by_levels(node, x, levels, inside)

    def _levels(self, op: str, x: Array) -> hierarchical.Levels:
        return hierarchical.Levels.of(op, x.dtype, self._own.nodes, self.combiner)

    def _by_levels(self, node: Node, x: Array, levels: hierarchical.Levels,
                   inside: Sequence[hierarchical.Inside]) -> Schedule[None]:
        nodes = self._own.nodes
        size = hierarchical.inbox_size(x.size, x.itemsize, nodes, levels, self.slice_bytes)
        with self.borrow(size, x.dtype) as inbox:
            yield from hierarchical.allreduce(
                self.net, nodes, inside, node, x, inbox, levels, self.slice_bytes)

    def _short(self, node: Node, x: Array, op: str) -> Schedule[None]:
        nodes, levels = self._own.nodes, self._levels(op, x)
        with self.borrow((len(nodes) - 1) * x.size, x.dtype) as inbox:
            yield from hierarchical.short(self.net, nodes, node, x, inbox, levels)

    def _ring(self, x: Array, combine: Combine) -> Schedule[None]:
        with self._inbox(x) as inbox:
            yield from ring.allreduce(self.ring, x, inbox, combine, self.ring_bytes)

    def _direct(self, x: Array, combine: Combine) -> Schedule[None]:
        with self._direct_inbox(x.size, x) as inbox:
            yield from direct.allreduce(
                self.net, x, inbox, combine, self.direct_bytes, self.ring_bytes)

    def _direct_inbox(self, n: int, x: Array) -> AbstractContextManager[Array]:
        return self.borrow(
            direct.inbox_size(n, self.size, x.itemsize, self.direct_bytes), x.dtype)

    def reduce_scatter(self, x: Array, *, op: str = "sum") -> Schedule[Array]:
        """Return the schedule that leaves this rank's combined chunk of the vector `x`.

        Raises:
            ConfigError: The op does not suit the dtype.
        """
        return self._reduce_scatter(x, op, self.combiner(op, x.dtype, self.size))

    def _reduce_scatter(self, x: Array, op: str, combine: Combine) -> Schedule[Array]:
        if self._whole is not None or widens(x.dtype, op) and self.size > 1:
            chunks = chunks_of(x, self.size)
            yield from self._confirmed(self._direct_chunks(chunks, combine))
            return chunks[self.rank]
        with self._inbox(x) as inbox:
            return (yield from ring.reduce_scatter(
                self.ring, self._chunks(x), inbox, combine, self.ring_bytes))

    def reduce_scatter_chunks(
        self, chunks: Sequence[Array], *, op: str = "sum",
    ) -> Schedule[None]:
        """Return the schedule that combines vector r of `chunks` of all ranks on rank r.

        Args:
            chunks: Per rank a vector, all equally long, in any memory. This rank's own is
                overwritten by the result, the others are only read.

        Raises:
            ConfigError: The op does not suit the dtype.
        """
        combine = self.combiner(op, chunks[0].dtype, self.size)
        return self._confirmed(self._direct_chunks(chunks, combine))

    def _direct_chunks(self, chunks: Sequence[Array], combine: Combine) -> Schedule[None]:
        if self._whole is not None:
            yield from node_copies.reduce_scatter(self._whole, chunks, combine)
            return
        n = max(chunk.size for chunk in chunks)
        with self._direct_inbox(n * self.size, chunks[0]) as inbox:
            yield from direct.reduce_scatter(self.net, chunks, inbox, combine, self.direct_bytes)

    def reduce(self, x: Array, root: int, *, op: str = "sum") -> Schedule[None]:
        """Return the schedule that combines the vector `x` of all ranks into that of `root`.

        Each rank combines a chunk, and sends it to `root`. Elsewhere `x` is only read.

        Raises:
            ConfigError: The op does not suit the dtype.
        """
        combine, node = self.combiner(op, x.dtype, self.size), self._whole
        if node is not None and shared.is_short(
                x.nbytes, x.dtype, self.size, shared.EAGER_PRIVATE_BYTES):
            return shared.eager(node, x, combine, root)
        return self._confirmed(self._reduce(x, root, combine))

    def _reduce(self, x: Array, root: int, combine: Combine) -> Schedule[None]:
        chunks = chunks_of(x, self.size)
        if self.rank == root:
            yield from self._direct_chunks(chunks, combine)
            yield from self._gather(chunks[root], chunks, root)
            return
        own = chunks[self.rank]
        with self.borrow(own.size, x.dtype) as mine:
            copy_to(mine, own)
            chunks[self.rank] = mine
            yield from self._direct_chunks(chunks, combine)
            yield from self._gather(mine, (), root)

    def _inbox(self, x: Array) -> AbstractContextManager[Array]:
        size = ring.inbox_size(x.size, self.size, x.itemsize, self.ring_bytes)
        return self.borrow(size, x.dtype)

    def _chunks(self, x: Array) -> list[Array]:
        """Cut `x` into chunks such that rank r's is chunk r, wherever it stands on the ring."""
        chunks = chunks_of(x, self.size)
        return [chunks[rank] for rank in self._own.order]


def _nothing() -> Schedule[None]:
    yield ()
