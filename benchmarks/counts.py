"""Counts messages, bytes and memory per rank of each operation, on a simulated network."""

import contextlib
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mpiring.provisional import Array, Channel, Collectives, Schedule, memory, operations, transport
from mpiring.simulated.network import SimulatedNetwork, SymmetricNetwork, cyclic
from mpiring.simulated.prices import NoCombine, ghost
from mpiring.tools.arguments import listed, positive
from mpiring.tools.table import Column

from . import main, report

SHORT_BYTES, LONG_BYTES = 4 << 10, 16 << 20
# Function of the collectives of an operation and a vector. In OPERATIONS, the last value is true if
# all ranks do the same in a circle, so that one rank represents all.
Program = Callable[[Collectives, Array], Schedule[Any]]
OPERATIONS: dict[str, tuple[Program, int, bool]] = {
    "allreduce, short": (lambda c, x: c.allreduce(x, algorithm="ring"), SHORT_BYTES, False),
    "allreduce, long": (lambda c, x: c.allreduce(x, algorithm="ring"), LONG_BYTES, True),
    "reduce_scatter, long": (lambda c, x: c.reduce_scatter(x), LONG_BYTES, True),
    "allgather, short": (lambda c, x: c.allgather(x), SHORT_BYTES, True),
    "allgather, long": (lambda c, x: c.allgather(x), LONG_BYTES, True),
    "broadcast, short": (lambda c, x: c.broadcast(x, 0), SHORT_BYTES, False),
    "broadcast, long": (lambda c, x: c.broadcast(x, 0), LONG_BYTES, False),
    "barrier": (lambda c, x: c.barrier(), 0, True)}
_COLUMNS = [Column("operation", -20), Column("ranks", 6), Column("messages", 9, 1),
            Column("bytes", 12, 1), Column("memory", 12, 1)]


@dataclass(frozen=True)
class Cost:
    """Largest cost of an operation on any rank: messages sent, bytes sent, memory borrowed.

    The header by which ranks compare their calls also counts as a message.
    """

    messages: int
    bytes: int
    memory: int


class _Counted(Collectives):
    """The schedules of an operation on vectors without memory; records borrowed memory."""

    def __init__(self, net: Channel, nodes: Sequence[Sequence[int]]) -> None:
        super().__init__(operations.alone(net, nodes, algorithm="ring"), None, 0)
        self.borrowed = 0

    def borrow(self, n: int, dtype: DTypeLike) -> AbstractContextManager[Array]:
        self.borrowed += n * np.dtype(dtype).itemsize
        return contextlib.nullcontext(ghost(n, dtype))

    def combiner(self, op: str, dtype: "np.dtype[Any]", size: float) -> memory.Combine:
        return NoCombine()


def count(operation: str, p: int) -> Cost:
    """Return the cost of an operation on p nodes with one rank each.

    Args:
        operation: Name in OPERATIONS.
        p: Number of ranks.
    """
    program, nbytes, circular = OPERATIONS[operation]
    network = SymmetricNetwork(p, 1, cyclic) if circular else SimulatedNetwork(p, payload=False)
    nodes, made = [range(rank, rank + 1) for rank in range(p)], []

    def run(net: Channel) -> Schedule[Any]:
        collectives = _Counted(net, nodes)
        made.append(collectives)
        header = ghost(transport.HEADER_BYTES, np.uint8)
        yield net.irecv(header, (net.rank - 1) % p), net.isend(header, (net.rank + 1) % p)
        yield from program(collectives, ghost(nbytes // 4, np.float32))

    network.run(run)
    ranks = network.stepped
    return Cost(max(network.messages_sent[rank] for rank in ranks),
                max(network.bytes_sent[rank] for rank in ranks),
                max(collectives.borrowed for collectives in made))


def declare(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--ranks", type=listed(positive), default=[4, 64, 1024, 4096],
                        metavar="A,B", help="numbers of ranks (default: 4,64,1024,4096)")
    parser.set_defaults(action=_run, json=None)


def _run(options: Namespace) -> int:
    return report("counts", options, _COLUMNS, lambda: (
        f"of the rank with the most; short: {SHORT_BYTES} bytes, long: {LONG_BYTES} bytes", {},
        ({"operation": operation, "ranks": p, **vars(count(operation, p))}
         for operation in OPERATIONS for p in options.ranks)))


if __name__ == "__main__":
    sys.exit(main("counts", declare))
