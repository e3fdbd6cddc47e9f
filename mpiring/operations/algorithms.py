"""The table of algorithms: their abilities, their schedules, and the choice of "auto"."""

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import numpy as np

from ..collectives import direct, doubling, hierarchical, native, nccl, ring, shared
from ..collectives.operation import Operation, Tuning
from ..errors import ConfigError
from ..memory.arrays import Array, cut, dtype_name
from ..memory.reduction import Combine, widens
from ..names import AlgorithmName
from ..transport import compiled
from ..transport.base import Schedule
from .model import Model

_log = logging.getLogger("mpiring")

NO_GPU = "NCCL combines only vectors of GPUs"


# A tuple, because tuples are hashed fastest.
class Case(NamedTuple):
    """The properties of an allreduce that determine its algorithm.

    Attributes:
        nbytes, dtype: Length and dtype of each rank's vector.
        nodes: Number of memories that the ranks share.
        gpu: Description of the GPU that holds the vector; "" for host memory.
        without_nccl: Reason why NCCL cannot be used for such vectors; "" if it can.
    """

    nbytes: int
    dtype: np.dtype[Any]
    op: str
    ranks: int
    nodes: int
    tuning: Tuning
    gpu: str = ""
    without_nccl: str = NO_GPU


# Function of the operation, its vector, the op's name, and the op's implementation. Call it when
# the operation is created, not from inside a running schedule.
Allreduce = Callable[[Operation, Array, str, Combine], Schedule[None]]
# Function of the operation, its vector, the bounds of the ranks' slices, the op's name, and the
# op's implementation.
ReduceScatter = Callable[[Operation, Array, Sequence[int], str, Combine], Schedule[None]]
# Function of the operation, its vector, and the bounds of the ranks' slices.
Allgather = Callable[[Operation, Array, Sequence[int]], Schedule[None]]


class Halves(NamedTuple):
    """The two halves of an allreduce, between which each rank has its own slice.

    If `is_short` returns true for a case, the halves `short` replace these.
    """

    reduce_scatter: ReduceScatter
    allgather: Allgather
    short: "Halves | None" = None
    is_short: Callable[[Case], bool] = lambda case: False


@dataclass(frozen=True)
class Algorithm:
    """A method to combine vectors over all ranks; a row of the table.

    Attributes:
        halves: The two halves of the allreduce; None if it cannot be halved.
        refusal: Function that returns why a case is impossible; "" if it is possible.
        is_measured: Function that returns whether the algorithm is worth measuring, given the
            number of nodes.
        keeps_float32: If true, 16-bit numbers are added in float32, and rounded at most once on
            each level.
        short: Algorithm that replaces this one if `is_short` returns true for a case.
    """

    name: str
    allreduce: Allreduce
    halves: Halves | None = None
    refusal: Callable[[Case], str] = lambda case: ""
    is_measured: Callable[[int], bool] = lambda nodes: False
    keeps_float32: bool = False
    short: "Algorithm | None" = None
    is_short: Callable[[Case], bool] = lambda case: False

    def variant(self, case: Case) -> "Algorithm":
        """Return the algorithm that runs a case: a replacement, or this one."""
        return self.short if self.short is not None and self.is_short(case) else self


# Builders. In addition to the operation's channel, a schedule needs scratch memory.

def _ring(operation: Operation, x: Array, op: str, combine: Combine) -> Schedule[None]:
    piece_bytes = operation.tuning.ring_bytes
    size = ring.inbox_size(x.size, operation.size, x.itemsize, piece_bytes)
    with operation.borrow(size, x.dtype) as inbox:
        yield from ring.allreduce(operation.ring, x, inbox, combine, piece_bytes)


def _ring_reduce_scatter(operation: Operation, x: Array, bounds: Sequence[int], op: str,
                         combine: Combine) -> Schedule[None]:
    slices, piece_bytes = cut(x, bounds), operation.tuning.ring_bytes
    n = operation.size * max(map(len, slices))
    size = ring.inbox_size(n, operation.size, x.itemsize, piece_bytes)
    with operation.borrow(size, x.dtype) as inbox:
        yield from ring.reduce_scatter(
            operation.ring, [slices[rank] for rank in operation.order], inbox, combine, piece_bytes)


def _allgather(operation: Operation, x: Array, bounds: Sequence[int]) -> Schedule[None]:
    if doubling.gathers(operation, x.nbytes):
        return doubling.allgather(operation, operation.net, x, bounds)
    slices = cut(x, bounds)
    return ring.allgather(operation.ring, [slices[rank] for rank in operation.order],
                          operation.tuning.ring_bytes)


def _direct(operation: Operation, x: Array, op: str, combine: Combine) -> Schedule[None]:
    tuning = operation.tuning
    size = direct.inbox_size(x.size, operation.size, x.itemsize, tuning.direct_bytes)
    with operation.borrow(size, x.dtype) as inbox:
        yield from direct.allreduce(
            operation.net, x, inbox, combine, tuning.direct_bytes, tuning.ring_bytes)


def _direct_reduce_scatter(operation: Operation, x: Array, bounds: Sequence[int], op: str,
                           combine: Combine) -> Schedule[None]:
    return operation.reduce_scatter_chunks(cut(x, bounds), op=op)


def _doubling(operation: Operation, x: Array, op: str, combine: Combine) -> Schedule[None]:
    return doubling.allreduce(operation, operation.net, x, op, combine.divisor)


def _doubling_reduce_scatter(operation: Operation, x: Array, bounds: Sequence[int], op: str,
                             combine: Combine) -> Schedule[None]:
    return _doubling(operation, x, op, combine)


def _native(operation: Operation, x: Array, op: str, combine: Combine) -> Schedule[None]:
    return operation.native_allreduce(x, op)


# Refusals.

def _unless_one_node(case: Case) -> str:
    return "" if case.nodes == 1 else "not all ranks share one node's memory"


def _unless_nodes_of_several(case: Case) -> str:
    return "" if 1 < case.nodes < case.ranks else (
        f"expected several nodes, and several ranks on one of them that share its memory; here "
        f"are {case.ranks} ranks and {case.nodes} node(s)")


def _unless_mpi_can(case: Case) -> str:
    if case.gpu:
        return f"MPI's nonblocking collectives take no memory of a GPU, as {case.gpu} has"
    return "" if native.supports(case.dtype, case.op) else (
        f"MPI's own {case.op} is wrong or missing for {dtype_name(case.dtype)}")


def _is_short_on_node(case: Case) -> bool:
    """Return whether each rank of a node combines all vectors, with one barrier less."""
    tuning = case.tuning
    compiles = tuning.compiles and compiled.is_compilable(
        case.op, dtype_name(case.dtype), case.ranks)
    return shared.is_short(case.nbytes, case.dtype, case.ranks,
                           tuning.compiled_eager_bytes if compiles else tuning.eager_bytes)


def _is_short_for_many(case: Case) -> bool:
    """Return whether many nodes combine few bytes: log2 p messages are then faster than p - 1."""
    return (case.nodes > case.tuning.direct_nodes and case.nbytes <= case.tuning.short_bytes
            # See shared.is_short.
            and case.dtype.char not in "gG")


# For few bytes between many nodes. It does not replace "direct", whose sums are in rank order.
DOUBLING = Algorithm(
    "doubling", _doubling, Halves(_doubling_reduce_scatter, _allgather), keeps_float32=True)
# For few bytes on a node.
EAGER = Algorithm("eager", shared.eager)
EAGER_HALVES = Halves(shared.eager_reduce_scatter, shared.eager_allgather)
# The last measured algorithm sends the fewest bytes. For 16 bits, "auto" uses the first algorithm
# that keeps float32. The first one is always used if it is possible.
TABLE = (
    Algorithm("nccl", nccl.allreduce, Halves(nccl.reduce_scatter, nccl.allgather),
              lambda case: case.without_nccl, keeps_float32=True),
    Algorithm("shared", shared.allreduce,
              Halves(shared.reduce_scatter, shared.allgather, EAGER_HALVES,
                     lambda case: case.nbytes <= case.tuning.moved_bytes),
              _unless_one_node, is_measured=lambda nodes: True, keeps_float32=True,
              short=EAGER, is_short=_is_short_on_node),
    Algorithm("native", _native, refusal=_unless_mpi_can, is_measured=lambda nodes: True),
    Algorithm("ring", _ring, Halves(_ring_reduce_scatter, _allgather, DOUBLING.halves,
                                    _is_short_for_many),
              is_measured=lambda nodes: nodes > 1, short=DOUBLING, is_short=_is_short_for_many),
    Algorithm("hierarchical", hierarchical.allreduce,
              Halves(hierarchical.reduce_scatter, hierarchical.allgather),
              _unless_nodes_of_several,
              is_measured=lambda nodes: True, keeps_float32=True,
              short=Algorithm("short", hierarchical.short),
              is_short=lambda case: case.nbytes <= case.tuning.short_bytes
              # See shared.is_short.
              and case.dtype.char not in "gG"),
    Algorithm("direct", _direct, Halves(_direct_reduce_scatter, _allgather),
              keeps_float32=True),
)
NAMES: tuple[AlgorithmName, ...] = get_args(AlgorithmName)


def named(name: str) -> Algorithm | None:
    """Return a row of the table; None for "auto". Raise ConfigError if there is no such algorithm.
    """
    if name not in NAMES:
        raise ConfigError(f"algorithm={name!r}: expected one of {', '.join(NAMES)}")
    return next((row for row in TABLE if row.name == name), None)


def candidates(ranks: int, nodes: int,
               dtypes: Iterable["np.dtype[Any]"] = (np.dtype(np.float32),),
               gpu: str = "") -> tuple[str, ...]:
    """Return the algorithms that are worth measuring, for means or sums of these dtypes."""
    cases = [Case(0, dtype, "mean", ranks, nodes, Tuning(), gpu) for dtype in dtypes]
    return tuple(
        row.name for row in TABLE if row.is_measured(nodes) and all(
            not row.refusal(case) and (row.keeps_float32 or not widens(case.dtype, case.op))
            for case in cases))


def choose(case: Case, requested: str = "auto", model: Model | None = None) -> Algorithm:
    """Return the algorithm for an allreduce, the same on every rank.

    The user `requested` an algorithm or "auto". The model is None if nothing was measured.

    Raises:
        ConfigError: The algorithm is unknown, or impossible here.
    """
    return _row(case, requested, model, TABLE).variant(case)


def choose_halves(case: Case, requested: str = "auto", model: Model | None = None) -> Halves:
    """Return the halves of an allreduce, the same on every rank; see `choose`.

    A requested algorithm that cannot be halved counts as "auto".
    """
    halves = {row: row.halves for row in (*TABLE, DOUBLING) if row.halves is not None}
    chosen = halves[_row(case, requested, model, [row for row in TABLE if row in halves])]
    return chosen.short if chosen.short is not None and chosen.is_short(case) else chosen


def _row(case: Case, requested: str, model: Model | None, rows: Sequence[Algorithm]) -> Algorithm:
    """Return the row that the user chose, or the best of `rows` if it is not among them."""
    row = named(requested)
    if row is None or row not in rows:
        return _best(case, model, [row for row in rows if not row.refusal(case)])
    if problem := row.refusal(case):
        raise ConfigError(f"algorithm={requested!r}: {problem}; use algorithm='auto'")
    return row


def _best(case: Case, model: Model | None, rows: Sequence[Algorithm]) -> Algorithm:
    """Return the row that "auto" uses; all rows are possible for the case."""
    if case.nodes == 1 or rows[0] is TABLE[0]:
        return rows[0]
    if widens(case.dtype, case.op):
        # A ring would round at every hop.
        row = next(row for row in rows if row.keeps_float32)
        return DOUBLING if row.name == "direct" and _is_short_for_many(case) else row
    measured = {row.name: row for row in rows if row.is_measured(case.nodes)}
    if model is not None:
        return measured[model.best(case.nbytes, measured)]
    if "native" in measured and case.nbytes < case.tuning.native_below_bytes:
        return measured["native"]
    return list(measured.values())[-1]


@functools.cache
def log_fallback(reason: str) -> None:
    """Log, once, that the configured algorithm cannot be used."""
    _log.warning('the configured algorithm cannot be used, "auto" is used instead: %s', reason)
