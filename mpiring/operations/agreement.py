"""Lets ranks compare what they were asked to do before any of them uses the other's data.

The ranks of a node compare in their shared memory. Between nodes, the lowest rank of
each sends a short header to that of the next node before its first message, and
compares the one from the node before. If all neighbours agree, all ranks agree; a rank
that does not raises before it has passed anything on, so no wrong result can spread.
"""

import functools
import hashlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..errors import BufferMismatchError
from ..transport.base import HEADER_BYTES, Channel, Node, Schedule, T


@dataclass(frozen=True)
class Call:
    """What one rank was asked to do; all ranks must be asked the same.

    Attributes:
        kind: "allreduce", "broadcast", …
        detail: op, root, shape, dtype, algorithm: everything that must agree.
        label: Bucket and parameter names, where there are any.
        nbytes: Of the array, for the record; 0 where it is not known. Need not agree.
    """

    kind: str
    detail: str = ""
    label: str = ""
    nbytes: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return " ".join(text for text in (self.kind, self.detail, self.label) if text)

    @functools.cached_property
    def header(self) -> bytes:
        """HEADER_BYTES bytes that differ when the calls differ."""
        text = str(self).encode()
        if len(text) > HEADER_BYTES:
            # The checksum still tells long texts apart that differ only in their tails.
            tail = f"… ({zlib.crc32(text):08x})".encode()
            text = text[:HEADER_BYTES - len(tail)] + tail
        return text.ljust(HEADER_BYTES)

    @functools.cached_property
    def digest(self) -> int:
        """63 bits that differ when the headers differ."""
        return int.from_bytes(hashlib.blake2b(self.header, digest_size=8).digest(), "little") >> 1


def agreed(
    net: Callable[[], Channel], node: Node | None, neighbours: tuple[int, int] | None,
    call: Call, schedule: Schedule[T],
) -> Schedule[T]:
    """Run `schedule`, but stop after its first step if another rank was called otherwise.

    Args:
        net: Returns the operation's channel.
        node: Its meeting place on this node; None for a rank that is alone there.
        neighbours: Of the lowest rank of a node, its like on the nodes before and after;
            None for other ranks, and where there is one node only.
        call: What this rank was asked to do.
        schedule: Its first yield must come before anything received is used; it may be
            the node's first barrier.

    Raises:
        BufferMismatchError: Names both ranks and both calls.

    Collective: yes. Blocking: no (a schedule).
    """
    header = call.header
    if node is not None and not node.test():
        yield (node,)
    if neighbours is not None:
        before, after = neighbours
        theirs = np.empty(HEADER_BYTES, np.uint8)
        arriving = net().irecv(theirs, before)
        leaving = net().isend(np.frombuffer(header, np.uint8), after)
    try:
        first = next(schedule)
    except StopIteration as stop:
        first, schedule = (), _finished(stop.value)
    # The data is under way already; only looking at it has to wait for the headers.
    if node is not None:
        if node.met:
            yield first
            first = ()
        else:
            yield (node.barrier(),)
        if not node.agrees():
            for rank, other in node.headers():
                if other != header:
                    _refuse(node.ranks[node.rank], call, rank, other)
    if neighbours is not None:
        yield (arriving,)
        if bytes(theirs) != header:
            _refuse(net().rank, call, before, bytes(theirs))
        first = (leaving, *first)
    if first:
        yield first
    result = yield from schedule
    if node is not None:
        node.leave()
    return result


def _refuse(rank: int, call: Call, other: int, header: bytes) -> None:
    own, theirs = (text.decode(errors="replace").strip() for text in (call.header, header))
    raise BufferMismatchError(
        f"rank {rank} called {own}, but rank {other} called {theirs}; every rank must call "
        f"the same collectives in the same order with equal shape, dtype, op and root")


def _finished(value: T) -> Schedule[T]:
    """Be a schedule that has nothing left to do."""
    return value
    yield ()
