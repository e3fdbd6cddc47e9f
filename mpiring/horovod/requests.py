"""Operations that ranks submit by name: their terms, on which ranks must agree, and execution."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np

from .. import Communicator, Handle, MpiringError, OpName
from ..provisional import Array, Call, Collectives, Schedule, gpu, memory
from ..reducers import Adasum
from .ops import ADASUM, MEAN


# Kinds of operations. A step of an optimizer combines gradients by itself.
ALLREDUCE, BARRIER, JOIN, STEP = "allreduce", "barrier", "join", "step"
REDUCTIONS = ALLREDUCE, STEP
# Operations on rows.
_BY_ROWS = ("allgather", "reducescatter", "alltoall")
DTYPES = (*memory.FLOATING, *memory.COMPLEX, *memory.INTEGER, "bool")


class HorovodInternalError(MpiringError, RuntimeError):
    """An operation has failed: ranks used one name for different operations, or a rank has died."""


class HostsUpdatedInterrupt(RuntimeError):
    """Makes `elastic.run` call the function again although no rank has died; all ranks raise it.

    With `skip_sync`, all ranks already have the same state.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(f"skip_sync={skip_sync}")
        self.skip_sync = skip_sync


class RequestBuffers(Protocol):
    """Views arrays as vectors for one operation; `stream` is the user's on a GPU, or None."""

    stream: Any

    def numbers(self, x: Any, *, written: bool = False) -> Array:
        """Return an array's elements as a vector."""

    def raw(self, x: Any, *, written: bool = False) -> Array:
        """Return an array's bytes as a vector."""

    def settled(self, schedule: Schedule[Any]) -> Schedule[Any]:
        """Run a schedule, then copy results to the user's arrays."""


class ArrayPackage(Protocol):
    """Functions that operations need from an array package, NumPy or PyTorch."""

    def array(self, x: Any, *, written: bool = False) -> Any:
        """Return an argument as an array; if `written`, refuse one that cannot take a result."""

    def dtype_name(self, dtype: Any) -> str:
        """Return the name of a dtype, the same in all packages."""

    def device(self, x: Any) -> str:
        """Return "" for an array in host memory, otherwise the type of its device."""

    def copy(self, x: Any) -> Any:
        """Return a contiguous copy of an array."""

    def empty(self, shape: Sequence[int], like: Any) -> Any:
        """Return an array of another shape, with the dtype and device of `like`."""

    def zeros(self, dtype: str, shape: Sequence[int], device: str) -> Any:
        """Return zeros."""

    def scale(self, x: Any, factor: float, divisor: int = 1) -> None:
        """Multiply an array, in place, and divide it; integers are rounded toward zero."""

    def buffers(self, own_device: Callable[[Any], Any], *, staged: bool) -> RequestBuffers:
        """Return buffers for the arrays of one operation; if `staged`, copies in host memory.

        For `own_device`, see the method of Communicator.
        """

    def to_bytes(self, x: Any) -> Array:
        """Return an array's bytes, in host memory."""

    def from_bytes(self, raw: Array, shape: Sequence[int], like: Any) -> Any:
        """Return bytes as an array, with the dtype and device of `like`."""

    def splits(self, given: Any) -> list[int]:
        """Return the number of rows for each rank as a list."""

    def counts(self, rows: Array, given: Any) -> Any:
        """Return the number of rows from each rank, in the type of the user's splits."""

    def views(self, flat: Array, arrays: Sequence[Any]) -> Sequence[Any]:
        """Return views of consecutive parts of a vector, in the shapes of arrays."""

    def copy_all(self, outs: Sequence[Any], arrays: Sequence[Any]) -> None:
        """Copy arrays to other arrays."""


# Compared by identity, because a cache ensures that equal terms are one object.
@dataclass(frozen=True, eq=False)
class Terms:
    """The terms of an operation, on which ranks must agree, except for the number of bytes.

    Attributes:
        kind: "allreduce", "allgather", ...
        shapes: Shapes of its arrays, without first dimensions that may differ between ranks.
        op: Name of the reduction in mpiring.
        root: Global rank that broadcasts; -1 for other operations.
        factors: Prescale and postscale factor.
        device: Type of the device; "" for host memory.
    """

    kind: str
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    op: str = ""
    root: int = -1
    factors: tuple[float, float] = (1.0, 1.0)
    device: str = ""
    nbytes: int = 0

    @functools.cached_property
    def text(self) -> str:
        """Text with all terms on which ranks must agree."""
        return repr((self.kind, self.dtypes, self.shapes, self.op, self.root, self.factors,
                     self.device))

    @functools.cached_property
    def fused(self) -> tuple[Any, ...] | None:
        """Common terms of operations that are fused into one vector; None if not possible."""
        if self.kind != ALLREDUCE or self.op == ADASUM or self.device or len(
                set(self.dtypes)) != 1:
            return None
        return self.dtypes[0], self.op, self.factors

    @property
    def is_arrival(self) -> bool:
        """Whether ranks wait for each other at this point of the program; see ProcessSet.arrive."""
        return self.kind not in _KINDS and self.kind != JOIN

    def difference(self, other: "Terms") -> str:
        """Return the difference from the terms of another rank, in Horovod's words."""
        pairs: list[tuple[str, str, Any, Any]] = [
            ("data types", "had type", a, b) for a, b in zip(self.dtypes, other.dtypes)]
        pairs += [(f"{self.kind} tensor shapes", "sent a tensor of shape", list(a), list(b))
                  for a, b in zip(self.shapes, other.shapes)]
        pairs += [("numbers of tensors", "sent", len(self.shapes), len(other.shapes)),
                  ("reduction operation", "sent reduction op", self.op, other.op),
                  ("prescale and/or postscale factors", "sent factors", self.factors,
                   other.factors),
                  (f"{self.kind} root ranks", "specified root rank", self.root, other.root),
                  (f"{self.kind} CPU/GPU device selection", "specified device",
                   self.device or "CPU", other.device or "CPU")]
        title, verb, a, b = next(pair for pair in pairs if pair[2] != pair[3])
        return f"Mismatched {title}: One rank {verb} {a}, but another rank {verb} {b}."


@functools.lru_cache(maxsize=4096)
def terms_of(arrays: ArrayPackage, kind: str, dtypes: tuple[Any, ...], shapes: tuple[Any, ...],
             op: str, root: int, factors: tuple[float, float], device: str) -> Terms:
    """Return the terms of an operation; cached, because programs repeat operations."""
    names = tuple(map(arrays.dtype_name, dtypes))
    for name in names if op else ():
        # This raises an error if the op is undefined for the dtype.
        memory.Reduction("sum" if op in (MEAN, ADASUM) else op, memory.dtype_named(name, DTYPES), 1)
    nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes))
    first = 1 if kind in ("allgather", "alltoall") else 0
    if kind in _BY_ROWS and not all(shapes):
        raise HorovodInternalError(f"One rank tried to {kind} a rank-zero tensor, which has no "
                                   f"rows: pass one with a dimension, as x.reshape(1)")
    if kind == "reducescatter" and op == ADASUM:
        raise HorovodInternalError("reducescatter with op=Adasum: use allreduce, of which each "
                                   "rank takes its rows")
    if op == ADASUM and not all(name in memory.FLOATING for name in names):
        raise ValueError(f"Adasum of {names}: expected floating-point numbers")
    return Terms(kind, names, tuple(tuple(shape)[first:] for shape in shapes), op, root, factors,
                 device, nbytes)


class NamedRequest:
    """An operation that a rank has submitted; Horovod's handle.

    If `in_place`, results are written to `tensors`. If `single`, the result is not a list. `splits`
    has the numbers of rows that an alltoall sends to each rank, as a list and as passed.

    Attributes:
        error: Error that has ended it.
        start: Function that starts a prepared operation, once all ranks have submitted it.
        settle: Function that sets the results once the operation is complete.
        rows: Number of rows from each rank, for each array of an allgather.
        batch: Number of its batch; see Matcher.
        submitted_s, started_s: Times of `time.monotonic()`; `started_s` is set only for traces.
        matcher: Matcher to which it was submitted.
    """

    handle: Handle[Any] | None = None
    error: Exception | None = None
    start: Callable[[], None] | None = None
    settle: Callable[[], None] | None = None
    results: Any = None
    rows: Sequence[Any] = ()
    batch = 0
    submitted_s = started_s = 0.0

    def __init__(self, arrays: ArrayPackage, name: str, terms: Terms, tensors: Sequence[Any],
                 in_place: bool = False, single: bool = True, splits: Any = None) -> None:
        self.arrays, self.name, self.terms, self.tensors = arrays, name, terms, tensors
        self.in_place, self.single, self.splits = in_place, single, splits
        self.matcher: Any = None

    @property
    def started(self) -> bool:
        """Whether all ranks have submitted it."""
        return self.settle is not None or self.results is not None or self.error is not None

    @property
    def ended(self) -> bool:
        """Whether it is complete, or has failed."""
        return self.error is not None or self.started and (
            self.handle is None or self.handle.done)

    def complete(self) -> None:
        """Wait for the results of a started operation; raise HorovodInternalError if it failed."""
        if self.error is not None:
            raise self.error
        if self.settle is not None:
            self.settle()
        # Programs keep handles in lists, so this frees the memory early.
        self.start = self.settle = self.handle = None
        self.tensors = ()

    def prepare(self, comm: Communicator, ranks: Sequence[int]) -> None:
        """Set `start`, for an operation that is not fused. The ranks are global.

        The operation reads the arrays as they are now on the user's stream. Raises ConfigError if
        an array cannot be sent.
        """
        if self.terms.is_arrival:
            # The operation is complete when all ranks have arrived.
            self.start = self._arrive
            return
        # Adasum works in host memory.
        staged = self.terms.op == ADASUM
        buffers = self.arrays.buffers(comm.own_device, staged=staged)
        build, results = _KINDS[self.terms.kind](self, buffers, comm, ranks)
        call = Call(self.terms.kind, self.terms.text, self.name, self.terms.nbytes)
        stream = None if staged else buffers.stream
        where = {} if stream is None else {
            "device": stream.device(), "ready": [stream.mark()], "stream": stream}

        def start() -> None:
            self.handle = handle = comm.submit(
                call, lambda collectives: buffers.settled(build(collectives)), **where)

            def settle() -> None:
                handle.wait()
                self.results = results()

            self.settle = settle

        self.start = start

    def _arrive(self) -> None:
        self.results = [None]

    # Kinds of operations. Each returns two functions: the first builds the schedule, the second
    # returns the results.

    def _allreduce(self, buffers: RequestBuffers, comm: Communicator, _: Any) -> Any:
        outs, (op, divisor) = self._scaled(copy=not self.in_place), combined(self.terms, comm.size)
        vectors = [buffers.numbers(out, written=True) for out in outs]
        return lambda collectives: _sequence(
            [Adasum.schedule_for(collectives, x, [0, x.size]) if op == ADASUM else
             collectives.allreduce(x, op=op) for x in vectors]), self._after(outs, divisor)

    def _broadcast(self, buffers: RequestBuffers, comm: Communicator, ranks: Sequence[int]) -> Any:
        outs, root = self._scaled(copy=not self.in_place), ranks.index(self.terms.root)
        vectors = [buffers.raw(out, written=comm.rank != root) for out in outs]
        return lambda collectives: _sequence(
            [collectives.broadcast(x, root) for x in vectors]), lambda: outs

    def _reducescatter(self, buffers: RequestBuffers, comm: Communicator, _: Any) -> Any:
        outs, rows = [], []
        for x in self._scaled(copy=self.terms.factors[0] != 1):
            least, more = divmod(x.shape[0], comm.size)
            counts = [least + (rank < more) for rank in range(comm.size)]
            out = self.arrays.empty((counts[comm.rank], *x.shape[1:]), x)
            bounds = np.cumsum([0, *counts]) * math.prod(x.shape[1:])
            rows.append((buffers.numbers(out, written=True),
                         memory.cut(buffers.numbers(x), bounds.tolist())))
            outs.append(out)
        op, divisor = combined(self.terms, comm.size)
        return lambda collectives: _sequence(
            [_scattered(collectives, out, chunks, op) for out, chunks in rows]), self._after(
                outs, divisor)

    def _allgather(self, _: RequestBuffers, comm: Communicator, __: Any) -> Any:
        parts = [self.arrays.to_bytes(x) for x in self.tensors]
        gathered: list[tuple[int, Array]] = []
        self.rows = counts = []

        def results() -> Sequence[Any]:
            return [self.arrays.from_bytes(raw, (rows, *x.shape[1:]), x)
                    for (rows, raw), x in zip(gathered, self.tensors)]

        def build(collectives: Collectives) -> Schedule[None]:
            for x, part in zip(self.tensors, parts):
                rows = np.zeros(comm.size, np.int64)
                rows[comm.rank] = x.shape[0]
                yield from collectives.allgather_chunks(memory.chunks_of(rows, comm.size))
                raw, chunks = _memory_for(rows, x)
                gpu.copy_to(chunks[comm.rank], part)
                yield from collectives.allgather_chunks(chunks)
                counts.append(rows.tolist())
                gathered.append((int(rows.sum()), raw))

        return build, results

    def _alltoall(self, _: RequestBuffers, comm: Communicator, __: Any) -> Any:
        (x,), (splits, given) = self.tensors, self.splits
        rows, received = np.empty(comm.size, np.int64), np.empty(0, np.uint8)
        sends = memory.cut(self.arrays.to_bytes(x), _bounds(splits, x))

        def results() -> Sequence[Any]:
            shape = (int(rows.sum()), *x.shape[1:])
            return [(self.arrays.from_bytes(received, shape, x),
                     self.arrays.counts(rows, given))]

        def build(collectives: Collectives) -> Schedule[None]:
            nonlocal received
            yield from collectives.all_to_all(
                memory.chunks_of(np.array(splits, np.int64), comm.size),
                memory.chunks_of(rows, comm.size))
            received, chunks = _memory_for(rows, x)
            yield from collectives.all_to_all(sends, chunks)

        return build, results

    def _barrier(self, *_: Any) -> Any:
        return lambda collectives: collectives.barrier(), lambda: [None]

    def _scaled(self, *, copy: bool) -> Sequence[Any]:
        """Return the arrays, or copies of them, multiplied by the prescale factor in place."""
        results = [*map(self.arrays.copy, self.tensors)] if copy else self.tensors
        for x in results:
            self.arrays.scale(x, self.terms.factors[0])
        return results

    def _after(self, outs: Sequence[Any], divisor: int) -> Callable[[], Sequence[Any]]:
        """Return a function that scales results by the postscale factor and returns them."""
        def results() -> Sequence[Any]:
            for out in outs:
                self.arrays.scale(out, self.terms.factors[1], divisor)
            return outs

        return results


_KINDS = {ALLREDUCE: NamedRequest._allreduce, "broadcast": NamedRequest._broadcast,
          "reducescatter": NamedRequest._reducescatter, "allgather": NamedRequest._allgather,
          "alltoall": NamedRequest._alltoall, BARRIER: NamedRequest._barrier}


def combined(terms: Terms, size: int) -> tuple[OpName, int]:
    """Return the op for the contributions, and the divisor of the result."""
    # A mean of integers is a sum that is divided and rounded toward zero.
    if terms.op == MEAN and terms.dtypes[0].startswith(("int", "uint")):
        return "sum", size
    return cast(OpName, terms.op), 1


def _sequence(schedules: Iterable[Schedule[Any]]) -> Schedule[None]:
    for schedule in schedules:
        yield from schedule


def _scattered(collectives: Collectives, out: Array, chunks: Sequence[Array],
               op: str) -> Schedule[None]:
    """Combine the chunks of all ranks; rank r writes chunk r of the result to `out`."""
    rank = collectives.rank
    gpu.copy_to(out, chunks[rank])
    yield from collectives.reduce_scatter_chunks(
        [*chunks[:rank], out, *chunks[rank + 1:]], op=op)


def _bounds(rows: Any, like: Any) -> list[int]:
    """Return the byte offsets of the rows of each rank, given the numbers of rows."""
    bounds: list[int] = (np.cumsum([0, *rows]) * math.prod(like.shape[1:])
                         * like.dtype.itemsize).tolist()
    return bounds


def _memory_for(rows: Any, like: Any) -> tuple[Array, list[Array]]:
    """Return memory for the rows of all ranks, as one vector and as one chunk for each rank."""
    bounds = _bounds(rows, like)
    raw = np.empty(bounds[-1], np.uint8)
    return raw, memory.cut(raw, bounds)
