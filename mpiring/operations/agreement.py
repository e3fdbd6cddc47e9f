"""Calls, and the comparison of ranks' calls before any rank uses another rank's data.

The ranks of a node compare their calls in shared memory. Between nodes, the lowest rank of each
node sends a short header to the lowest rank of the next node before its first message. It compares
the header that it receives from the previous node. If all neighbors agree, all ranks agree. A rank
that disagrees raises before it forwards anything, so no wrong result can spread.
"""

import functools
import hashlib
import math
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import BufferMismatchError, ConfigError
from ..gpu.interface import DeviceVector
from ..memory.arrays import dtype_name
from ..memory.reduction import OPS
from ..names import OP_ALIASES
from ..transport.base import HEADER_BYTES, Channel, Node, Request, Schedule, T
from .algorithms import NAMES

# Ops of mpi4py, and their names in mpiring. The logical ops equal the bitwise ops only on bool; on
# numbers, MPI returns 0 and 1.
_MPI_OPS = {"SUM": "sum", "PROD": "prod", "MAX": "max", "MIN": "min",
            "BAND": "band", "BOR": "bor", "BXOR": "bxor"}
_MPI_LOGICAL_OPS = {"LAND": "band", "LOR": "bor", "LXOR": "bxor"}

_REMEDY = ("every rank must call the same collectives in the same order with equal shape, dtype, "
           "op and root")


@dataclass(frozen=True)
class Call:
    """A rank's call of an operation; all ranks must make the same call.

    Attributes:
        detail: Everything that must agree: op, root, shape, dtype, algorithm.
        label: Names of bucket and parameters, if any.
        nbytes: Number of bytes of the array, for the record; 0 if unknown. It may differ between
            ranks.
        remedy: Advice to a user whose ranks have made different calls of this kind.
        prepares: True if the call sends none of the program's data: it compares arguments, or
            creates or closes something.
    """

    kind: str
    detail: str = ""
    label: str = ""
    nbytes: int = field(default=0, compare=False)
    remedy: str = field(default=_REMEDY, compare=False)
    prepares: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return " ".join(filter(None, (self.kind, self.detail, self.label)))

    @functools.cached_property
    def header(self) -> bytes:
        """HEADER_BYTES bytes, which differ if the calls differ."""
        header = str(self).encode()
        if len(header) > HEADER_BYTES:
            # Long texts may differ only in their tails.
            tail = f"… ({zlib.crc32(header):08x})".encode()
            header = header[:HEADER_BYTES - len(tail)] + tail
        return header.ljust(HEADER_BYTES)

    @functools.cached_property
    def digest(self) -> int:
        """63 bits, which differ if the headers differ."""
        hashed = hashlib.blake2b(self.header, digest_size=8).digest()
        return int.from_bytes(hashed, "little") >> 1


def op_named(op: Any, dtype: "np.dtype[Any]") -> str:
    """Return mpiring's name of an op, which may be an alias or an mpi4py op like `MPI.SUM`.

    Raises:
        ConfigError: The op is neither a string nor an mpi4py op with a name in mpiring.
    """
    if isinstance(op, str):
        return OP_ALIASES.get(op, op)
    # A program with such an op has imported mpi4py.
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and isinstance(op, mpi.Op):
        for mpi_name, name in (_MPI_OPS | _MPI_LOGICAL_OPS).items():
            if op == getattr(mpi, mpi_name):
                if mpi_name in _MPI_OPS or dtype.kind == "b":
                    return name
                raise ConfigError(f"op=MPI.{mpi_name} on {dtype_name(dtype)}: it supports only "
                                  f"bool; combine x != 0 with op={name!r}")
    raise ConfigError(f"op={op!r}: expected one of {', '.join(OPS)}, or one of mpi4py's "
                      f"MPI.{', MPI.'.join(_MPI_OPS)}")


def collective_call(kind: str, option: Any, x: Any, vector: Any, algorithm: str = "auto") -> Call:
    """Return the call of a collective on an array, and on its `vector_of`.

    The option is the op of mpiring, or the root; None if there is neither.

    Raises:
        ConfigError: The algorithm is no string.
    """
    if not isinstance(algorithm, str):
        raise ConfigError(f"algorithm={algorithm!r}: expected one of {', '.join(NAMES)}")
    return _collective_call(
        kind, option, vector.dtype, _shape(x, vector), _order_and_memory(x, vector), algorithm)


# Cached, because a program makes the same few calls many times.
@functools.lru_cache(maxsize=4096)
def _collective_call(kind: str, option: Any, dtype: np.dtype[Any], shape: tuple[int, ...],
                     order_and_memory: str, algorithm: str) -> Call:
    array = f"{dtype_name(dtype)} {shape}{order_and_memory}"
    details = {"allreduce": f"{option} of {array}, algorithm {algorithm}",
               "reduce_scatter": f"{option} of {array}",
               "broadcast": f"of {array} from root {option}"}
    return Call(kind, details.get(kind, array), nbytes=dtype.itemsize * math.prod(shape))


def part_of(x: Any, vector: Any, part: slice) -> Any:
    """Return a part of the elements of `x`, in memory order, as an array of the same package.

    It is a one-dimensional view of `x`; a CuPy array if the package of `x` is unknown.
    """
    if isinstance(x, np.ndarray | DeviceVector):
        return vector[part]
    if not hasattr(x, "reshape"):
        chunk = vector[part]
        return chunk.device.gpu.array(chunk, chunk.shape)
    return (x.T if _is_fortran(x) else x).reshape(-1)[part]


def _shape(x: Any, vector: Any) -> tuple[int, ...]:
    # Bare memory, like a buffer of RAPIDS, has no shape.
    return tuple((x if hasattr(x, "shape") else vector).shape)


def _order_and_memory(x: Any, vector: Any) -> str:
    order = " in Fortran order" if x is not vector and _is_fortran(x) else ""
    return order + " on a GPU" if isinstance(vector, DeviceVector) else order


def _is_fortran(x: Any) -> bool:
    # Arrays without the flags of NumPy and CuPy are accepted in C order only.
    return not getattr(getattr(x, "flags", None), "c_contiguous", True)


def agreed(
    net: Callable[[], Channel], node: Node | None, neighbors: tuple[int, int] | None,
    call: Call, schedule: Schedule[T], ready: Sequence[Request] = (),
) -> Schedule[T]:
    """Run `schedule`, but stop after its first step if another rank made a different call.

    Args:
        net: Function that returns the operation's channel.
        node: Node of the rank; None if the rank is alone on it.
        neighbors: Lowest ranks of the previous and the next node, for the lowest rank of a node;
            None for other ranks, and on a single node.
        schedule: Schedule of the operation. Its first yield must precede any use of received data;
            it may be the node's first barrier.
        ready: Requests to wait for before the schedule's first step.

    Raises:
        BufferMismatchError: Another rank made a different call; the message names both ranks and
            both calls.
    """
    header = call.header
    if ready:
        yield ready
    if node is not None and not node.test():
        yield (node,)
    if neighbors is not None:
        before, after = neighbors
        other_header = np.empty(HEADER_BYTES, np.uint8)
        receive = net().irecv(other_header, before)
        send = net().isend(np.frombuffer(header, np.uint8), after)
    try:
        first = next(schedule)
    except StopIteration as stop:
        first, schedule = (), _finished(stop.value)
    # The data is already in flight; only its use must wait for the headers.
    if node is not None:
        if node.has_arrived:
            yield first
            first = ()
        else:
            yield (node.barrier(),)
        if not node.agrees():
            refuse_others(call, node)
    if neighbors is not None:
        yield (receive,)
        if bytes(other_header) != header:
            refuse(net().rank, call, before, bytes(other_header))
        first = (send, *first)
    if first:
        yield first
    result = yield from schedule
    if node is not None:
        node.leave()
    return result


def refuse_others(call: Call, node: Node) -> None:
    """After the first barrier, raise BufferMismatchError if a rank made a different call."""
    for rank, other in node.headers():
        if other != call.header:
            refuse(node.ranks[node.rank], call, rank, other)


def refuse(rank: int, call: Call, other: int, header: bytes) -> None:
    """Raise BufferMismatchError: another rank made a call with another header."""
    call_text, other_text = (
        text.decode(errors="replace").strip() for text in (call.header, header))
    remedy = call.remedy if other_text.startswith(f"{call.kind} ") else _REMEDY
    raise BufferMismatchError(
        f"rank {rank} called {call_text}, but rank {other} called {other_text}; {remedy}")


def _finished(value: T) -> Schedule[T]:
    """Return `value` without a step."""
    return value
    yield ()
