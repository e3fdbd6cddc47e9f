"""Lets neighbours on the ring compare what they were asked to do, at no extra step.

Every rank sends its right neighbour a short header before its first message,
and compares the one from the left before it passes anything on. If all
neighbours agree, all ranks agree; a rank that disagrees with its left
neighbour raises before it has forwarded a byte, so no wrong result can spread.
"""

import zlib
from dataclasses import dataclass

import numpy as np

from ..errors import BufferMismatchError
from ..memory.arrays import Array
from ..transport.base import Channel, Schedule, T

HEADER_BYTES = 192


@dataclass(frozen=True)
class Call:
    """What one rank was asked to do; all ranks must be asked the same.

    Attributes:
        kind: "allreduce", "broadcast", …
        detail: op, root, shape, dtype, algorithm: everything that must agree.
        label: Bucket and parameter names, where there are any.
    """

    kind: str
    detail: str = ""
    label: str = ""

    def __str__(self) -> str:
        return " ".join(text for text in (self.kind, self.detail, self.label) if text)

    def header(self, sequence: int) -> Array:
        """Return HEADER_BYTES bytes that differ when the calls differ."""
        text = f"#{sequence} {self}".encode()
        if len(text) > HEADER_BYTES:
            # The checksum still tells long texts apart that differ only in their tails.
            tail = f"… ({zlib.crc32(text):08x})".encode()
            text = text[:HEADER_BYTES - len(tail)] + tail
        return np.frombuffer(text.ljust(HEADER_BYTES), np.uint8)


def agreed(net: Channel, call: Call, sequence: int, schedule: Schedule[T]) -> Schedule[T]:
    """Run `schedule`, but stop after its first step if the left neighbour was called otherwise.

    Args:
        net: The operation's channel, of at least two ranks.
        call: What this rank was asked to do.
        sequence: Its number among this communicator's operations.
        schedule: Its first yield must come before anything received is used.

    Raises:
        BufferMismatchError: Names both ranks and both calls.

    Collective: yes. Blocking: no (a schedule).
    """
    p, r = net.size, net.rank
    left, right = (r - 1) % p, (r + 1) % p
    mine, theirs = call.header(sequence), np.empty(HEADER_BYTES, np.uint8)
    arriving = net.irecv(theirs, left)
    leaving = net.isend(mine, right)
    try:
        first = tuple(next(schedule))
    except StopIteration as stop:
        first, schedule = (), _finished(stop.value)
    # The data is under way already; only looking at it has to wait for the header.
    yield (arriving,)
    if not np.array_equal(mine, theirs):
        own, other = (bytes(text).decode(errors="replace").strip() for text in (mine, theirs))
        raise BufferMismatchError(
            f"rank {r} called {own}, but rank {left} called {other}; every rank must call "
            f"the same collectives in the same order with equal shape, dtype, op and root")
    yield leaving, *first
    return (yield from schedule)


def _finished(value: T) -> Schedule[T]:
    """Be a schedule that has nothing left to do."""
    return value
    yield ()
