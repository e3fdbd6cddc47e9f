"""The memory that the ranks of a node share: barriers, notes, headers of calls, staging slots.

Every rank writes to its own segment only, except in some node calls (see protocol). A segment has
AREAS areas. Operation number s uses area `s % AREAS`, once no rank is in the previous operation of
this area.
"""

import platform
import threading
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..memory.arrays import data_address
from .base import HEADER_BYTES, Array, Schedule
from .layout import (
    AREAS, AREA_WORDS, COUNT_BITS, Counter, DIGEST_WORD, ENDED, FORM_WORD, HEADER_WORD, LANE_WORDS,
    LATE, NOTE_WORD, NOTE_WORDS, POLL, PUBLISH, SLOT_BYTES, SLOT_WORD)
from .waiting import Patience

# x86 reorders neither stores with stores nor loads with loads; ARM and POWER reorder both.
REORDERS = platform.machine() not in ("x86_64", "AMD64", "i386", "i686")

# Maximum number of cached views, because a program may combine vectors of any number of lengths.
_MAX_SLOTS = 256


class NodeMemory:
    """The memory that the ranks of one node share.

    Args:
        segments: Memory of each rank of the node: NODE_MEMORY_BYTES bytes, zero at first.
        ranks: Their ranks in the communicator, for messages.
        counter: The group's counter; this class writes its `headers`.
    """

    def __init__(self, segments: Sequence[Array], rank: int, ranks: Sequence[int],
                 counter: Counter, patience: Patience = Patience()) -> None:
        self.segments = segments
        self.rank = rank
        self.ranks = ranks
        self.counter = counter
        self.patience = patience
        self.words = [segment.data.cast("q") for segment in segments]
        self.addresses = array("q", [data_address(segment) for segment in segments])
        self.texts = [segment.data for segment in segments]
        self.others = [words for position, words in enumerate(self.words) if position != rank]
        self._slots: dict[tuple[int, np.dtype[Any], int | None], Sequence[Array]] = {}
        self.written: list[bytes] = [b""] * AREAS

    def node(self, sequence: int, header: bytes, digest: int) -> "SharedNode":
        """Return the node of an operation; header and digest (63 bits) are equal on all ranks."""
        return SharedNode(self, sequence, header, digest, 0)

    def slots(self, area: int, dtype: np.dtype[Any], size: int | None) -> Sequence[Array]:
        """Return the first `size` elements of an area's slot, per rank."""
        key = area, dtype, size
        slots = self._slots.get(key)
        if slots is None:
            if len(self._slots) >= _MAX_SLOTS:
                self._slots.clear()
            start = (area * AREA_WORDS + SLOT_WORD) * 8
            slots = self._slots[key] = [
                segment[start:start + SLOT_BYTES].view(dtype)[:size] for segment in self.segments]
        return slots

    def write_header(self, area: int, header: bytes) -> None:
        """Write the header of an operation that uses the area at word `area`."""
        start = (area + HEADER_WORD) * 8
        self.texts[self.rank][start:start + HEADER_BYTES] = header

    @staticmethod
    def fence() -> None:
        """Prevent the processor from moving memory accesses across this call.

        Releasing a lock and acquiring it again prevents this on every processor. The lock is new
        each time, because fast calls run here in one thread, and other operations in another.
        """
        lock = threading.Lock()
        lock.acquire()
        lock.release()
        lock.acquire()


class SharedNode:
    """The node of one operation; `count` is this rank's flag since its last barrier."""

    is_queued = False
    __slots__ = ("rank", "size", "ranks", "has_arrived", "memory", "count",
                 "_sequence", "_header", "_lanes", "_digest", "_area", "_flag")

    def __init__(self, memory: NodeMemory, sequence: int, header: bytes, digest: int,
                 lane: int) -> None:
        self.rank = memory.rank
        self.size = len(memory.ranks)
        self.ranks = memory.ranks
        self.has_arrived = False
        self.memory = memory
        self._sequence = sequence
        self._header = header
        self._lanes: dict[int, SharedNode] = {}
        self._digest = digest
        self._area = sequence % AREAS * AREA_WORDS
        self._flag = self._area + lane * LANE_WORDS
        self.count = (sequence + 1) << COUNT_BITS

    def slots(self, dtype: np.dtype[Any], size: int | None = None) -> Sequence[Array]:
        """Return vectors of at most SLOT_BYTES bytes, per rank of the node; see base.Node."""
        return self.memory.slots(self._sequence % AREAS, dtype, size)

    def test(self) -> bool:
        """Return whether no rank uses the memory for an earlier operation any more."""
        if self._sequence < AREAS:
            return True
        ended = (self._sequence + 1 - AREAS) << COUNT_BITS | ENDED
        flag = self._area
        for words in self.memory.others:
            if words[flag] < ended:
                return False
        return self.memory.words[self.rank][flag] >= ended

    def barrier(self, *numbers: int) -> "_Arrival":
        """Arrive, write a note of up to 8 numbers, and return a request for the other ranks."""
        memory, flag = self.memory, self._flag
        words = memory.words[self.rank]
        self.count += 1
        if not self.has_arrived:
            self.has_arrived = True
            self._write_header()
        if numbers:
            note = flag + NOTE_WORD + (self.count & 1) * NOTE_WORDS
            for position, number in enumerate(numbers):
                words[note + position] = number
        if REORDERS:
            memory.fence()
        words[flag] = self.count
        return _Arrival(memory, flag, self.count)

    def arrival(self, count: int) -> "_Arrival":
        """Return a request for the other ranks, after other code has set this rank's flag."""
        self.count, self.has_arrived = count, True
        return _Arrival(self.memory, self._flag, count)

    def part(self, call: Any, x: Any) -> Schedule[None]:
        """Run a call as a part of the operation, after its barriers so far; see protocol."""
        if not self.has_arrived:
            self.has_arrived = True
            self._write_header()
        call.join(self._sequence, self.count, x)
        # This does not use data of other ranks, because the calls have not been compared yet.
        call.run(PUBLISH, x)
        status = LATE
        while status == LATE:
            yield (self.arrival(call.count),)
            status = call.run(POLL, x)
        self.count = call.count

    def share(self, *numbers: int) -> Schedule[list[tuple[int, ...]]]:
        """Return the up to 8 numbers that each rank of the node has passed, per rank."""
        yield (self.barrier(*numbers),)
        return self.notes(len(numbers))

    def notes(self, length: int) -> list[tuple[int, ...]]:
        """Return the numbers of all ranks' notes, per rank of the node; after a barrier."""
        note = self._flag + NOTE_WORD + (self.count & 1) * NOTE_WORDS
        return [tuple(words[note:note + length]) for words in self.memory.words]

    def lane(self, index: int) -> "SharedNode":
        """Return another node object of the same operation, which compares no calls."""
        if index not in self._lanes:
            # Keep the object, because its count of barriers must continue.
            other = SharedNode(self.memory, self._sequence, self._header, self._digest, index)
            other.has_arrived = True
            self._lanes[index] = other
        return self._lanes[index]

    def leave(self) -> None:
        """Mark that this rank no longer uses the memory for the operation."""
        memory = self.memory
        if REORDERS:
            memory.fence()
        memory.words[self.rank][self._area] = (self._sequence + 1) << COUNT_BITS | ENDED

    def agrees(self) -> bool:
        """Return whether all ranks made the same call; after the first barrier."""
        digest, word = self._digest, self._area + DIGEST_WORD
        for words in self.memory.others:
            if words[word] != digest:
                return False
        return True

    def headers(self) -> list[tuple[int, bytes]]:
        """Return the other ranks and their headers; after the first barrier."""
        memory, start = self.memory, (self._area + HEADER_WORD) * 8
        return [(self.ranks[position], bytes(text[start:start + HEADER_BYTES]))
                for position, text in enumerate(memory.texts) if position != self.rank]

    def _write_header(self) -> None:
        memory = self.memory
        words = memory.words[self.rank]
        words[self._area + DIGEST_WORD], words[self._area + FORM_WORD] = self._digest, 0
        # If a program repeats the same calls, the header is already in place.
        area = self._sequence % AREAS
        headers = memory.counter.headers
        if headers[area] or memory.written[area] is not self._header:
            headers[area], memory.written[area] = 0, self._header
            memory.write_header(self._area, self._header)


class _Arrival:
    """A request that is complete once every other rank of the node has arrived."""

    __slots__ = ("_memory", "_flag", "_count", "_others")

    def __init__(self, memory: NodeMemory, flag: int, count: int) -> None:
        self._memory, self._flag, self._count = memory, flag, count
        self._others = memory.others

    def __repr__(self) -> str:
        return f"rank {self._memory.ranks[self._memory.rank]}: waiting for its node's ranks"

    def test(self) -> bool:
        flag, count = self._flag, self._count
        for words in self._others:
            if words[flag] < count:
                return False
        if REORDERS:
            self._memory.fence()
        return True


class Alone:
    """A node of one rank, which waits for nothing and compares nothing; see base.Node."""

    is_queued = False

    def __init__(self, rank: int) -> None:
        self.rank, self.size = 0, 1
        self.ranks: Sequence[int] = (rank,)
        self.has_arrived = True

    def test(self) -> bool:
        """Return True, because no other rank uses the memory."""
        return True

    def slots(self, dtype: np.dtype[Any], size: int | None = None) -> Sequence[Array]:
        """Return one vector, by default as long as a slot of a node memory."""
        return [np.empty(SLOT_BYTES // dtype.itemsize, dtype)[:size]]

    def agrees(self) -> bool:
        """Return True."""
        return True

    def headers(self) -> Sequence[tuple[int, bytes]]:
        """Return nothing, because there are no other ranks."""
        return []

    def leave(self) -> None:
        """Do nothing."""

    def barrier(self, *numbers: int) -> "Alone":
        """Return a request that is complete."""
        return self

    def share(self, *numbers: int) -> Schedule[list[tuple[int, ...]]]:
        """Return this rank's numbers, after one yield, as other nodes do."""
        yield (self,)
        return [numbers]

    def lane(self, index: int) -> "Alone":
        """Return the same object, because it needs no barriers."""
        return self
