"""The memory in which the ranks of a node meet: barriers, notes, headers of calls, staging slots.

Every rank writes to its own segment only. A segment has a few areas, and operation
number s uses area s modulo their count once no rank is in the area's previous operation.
"""

import platform
import threading
from array import array
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from .base import HEADER_BYTES, Array, Schedule
from .layout import (
    AREAS, AREA_WORDS, CALL_COUNT, COUNTER_WRITTEN, COUNT_BITS, DIGEST_WORD, ENDED, FORM_WORD,
    HEADER_WORD, LANE_WORDS, LATE, LOOK, NOTE_WORD, NOTE_WORDS, PUBLISH, SLOT_BYTES, SLOT_WORD)

# x86 reorders neither stores nor loads among themselves; ARM and POWER do.
REORDERS = platform.machine() not in ("x86_64", "AMD64", "i386", "i686")

# A program may combine vectors of ever new lengths.
_MOST_SLOTS = 256


class PartCall(Protocol):
    """A call that is a part of an operation; see node_call.NodeCall."""

    def __getitem__(self, word: int) -> int: ...

    def join(self, sequence: int, count: int, x: Any) -> None:
        """Begin behind barrier number `count` of operation number `sequence`."""

    def run(self, how: int, x: Any) -> int:
        """Run it as far as it goes."""


class NodeMemory:
    """The shared memory in which the ranks of one node meet.

    Args:
        segments: Per rank of the node, NODE_MEMORY_BYTES bytes, zero at first.
        rank: This rank, among them.
        ranks: Their ranks in the communicator, for messages.
        counter: The words of the group's counter, COUNTER_WRITTEN of which are kept here.
    """

    def __init__(self, segments: Sequence[Array], rank: int, ranks: Sequence[int],
                 counter: "array[int]") -> None:
        self.segments = segments
        self.rank = rank
        self.ranks = ranks
        self.counter = counter
        self.words = [segment.data.cast("q") for segment in segments]
        self.texts = [segment.data for segment in segments]
        self.others = [words for position, words in enumerate(self.words) if position != rank]
        self.positions = [position for position in range(len(ranks)) if position != rank]
        self._slots: dict[tuple[int, np.dtype[Any], int | None], Sequence[Array]] = {}
        self.written: list[bytes] = [b""] * AREAS

    def node(self, sequence: int, header: bytes, digest: int) -> "SharedNode":
        """Return the meeting place of operation number `sequence`, see base.Node.

        Args:
            header: HEADER_BYTES bytes that must be equal on all ranks.
            digest: Any number of 63 bits that is equal if they are.
        """
        return SharedNode(self, sequence, header, digest, 0)

    def slots(self, area: int, dtype: np.dtype[Any], size: int | None) -> Sequence[Array]:
        """Return, per rank, the first `size` elements of a area's slot."""
        key = area, dtype, size
        slots = self._slots.get(key)
        if slots is None:
            if len(self._slots) >= _MOST_SLOTS:
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
        """Let no access to memory move across this line, where the processor would do that.

        Giving a lock away and taking it again forbids it on each. Not always the same lock: fast
        calls pass here in one thread, and other operations in another.
        """
        lock = threading.Lock()
        lock.acquire()
        lock.release()
        lock.acquire()


class SharedNode:
    """One operation's meeting place; see base.Node."""

    __slots__ = ("rank", "size", "ranks", "met", "memory",
                 "_sequence", "_header", "_lanes",
                 "_digest", "_area", "_flag", "_count")

    def __init__(self, memory: NodeMemory, sequence: int, header: bytes, digest: int,
                 lane: int) -> None:
        self.rank = memory.rank
        self.size = len(memory.ranks)
        self.ranks = memory.ranks
        self.met = False
        self.memory = memory
        self._sequence = sequence
        self._header = header
        self._lanes: dict[int, SharedNode] = {}
        self._digest = digest
        self._area = sequence % AREAS * AREA_WORDS
        self._flag = self._area + lane * LANE_WORDS
        self._count = (sequence + 1) << COUNT_BITS

    def slots(self, dtype: np.dtype[Any], size: int | None = None) -> Sequence[Array]:
        """Return, per rank of the node, a vector of at most SLOT_BYTES bytes; see base.Node."""
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

    def barrier(self, *numbers: int) -> "_Arrived":
        """Arrive, leave a note of up to 8 numbers, and return a request for the others."""
        memory, flag = self.memory, self._flag
        words = memory.words[self.rank]
        self._count += 1
        if not self.met:
            self.met = True
            self._write_header()
        if numbers:
            note = flag + NOTE_WORD + (self._count & 1) * NOTE_WORDS
            for position, number in enumerate(numbers):
                words[note + position] = number
        if REORDERS:
            memory.fence()
        words[flag] = self._count
        return _Arrived(memory, flag, self._count)

    @property
    def count(self) -> int:
        """What this rank's flag says since its last barrier."""
        return self._count

    def arrived(self, count: int) -> "_Arrived":
        """Return a request for the others, given what other code has set this rank's flag to."""
        self._count, self.met = count, True
        return _Arrived(self.memory, self._flag, count)

    def part(self, call: "PartCall", x: Any) -> Schedule[None]:
        """Run a call as a part of the operation, behind its barriers so far; see protocol.

        Args:
            x: Its vector.
        """
        if not self.met:
            self.met = True
            self._write_header()
        call.join(self._sequence, self._count, x)
        # What others have written is not used before the calls were compared.
        call.run(PUBLISH, x)
        status = LATE
        while status == LATE:
            yield (self.arrived(call[CALL_COUNT]),)
            status = call.run(LOOK, x)
        self._count = call[CALL_COUNT]

    def share(self, *numbers: int) -> Schedule[list[tuple[int, ...]]]:
        """Return, per rank of the node, the up to 8 numbers that each has passed."""
        yield (self.barrier(*numbers),)
        return self.notes(len(numbers))

    def notes(self, length: int) -> list[tuple[int, ...]]:
        """Return, per rank of the node, the numbers of its note; after a barrier."""
        note = self._flag + NOTE_WORD + (self._count & 1) * NOTE_WORDS
        return [tuple(words[note:note + length]) for words in self.memory.words]

    def lane(self, index: int) -> "SharedNode":
        """Return a further meeting place of the same operation, without an agreement."""
        if index not in self._lanes:
            # Its count of barriers goes on.
            other = SharedNode(self.memory, self._sequence, self._header, self._digest, index)
            other.met = True
            self._lanes[index] = other
        return self._lanes[index]

    def leave(self) -> None:
        """Mark that this rank has done with the operation."""
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
        return [(self.ranks[position], bytes(memory.texts[position][start:start + HEADER_BYTES]))
                for position in memory.positions]

    def _write_header(self) -> None:
        memory = self.memory
        words = memory.words[self.rank]
        words[self._area + DIGEST_WORD], words[self._area + FORM_WORD] = self._digest, 0
        # A program that makes the same calls again and again finds its header there already.
        area = self._sequence % AREAS
        counter, written = memory.counter, COUNTER_WRITTEN + area
        if counter[written] or memory.written[area] is not self._header:
            counter[written], memory.written[area] = 0, self._header
            memory.write_header(self._area, self._header)


class _Arrived:
    """Complete once every other rank of the node has arrived."""

    __slots__ = ("_memory", "_flag", "_count", "_others")

    def __init__(self, memory: NodeMemory, flag: int, count: int) -> None:
        self._memory, self._flag, self._count = memory, flag, count
        self._others = memory.others

    def __repr__(self) -> str:
        return f"rank {self._memory.ranks[self._memory.rank]}: waiting for its node's ranks"

    def test(self) -> bool:
        """Return whether all have arrived."""
        flag, count = self._flag, self._count
        for words in self._others:
            if words[flag] < count:
                return False
        if REORDERS:
            self._memory.fence()
        return True


class Alone:
    """A node of one rank, which waits for nothing and compares nothing; see base.Node.

    Args:
        rank: Of the communicator.
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.size = 0, 1
        self.ranks: Sequence[int] = (rank,)
        self.met, self.memory = True, None

    def test(self) -> bool:
        """Return True: the memory is this rank's."""
        return True

    def slots(self, dtype: np.dtype[Any], size: int | None = None) -> Sequence[Array]:
        """Return one vector, by default as long as in a node memory."""
        return [np.empty(SLOT_BYTES // dtype.itemsize, dtype)[:size]]

    def agrees(self) -> bool:
        """Return True."""
        return True

    def headers(self) -> Sequence[tuple[int, bytes]]:
        """Return nothing: there are no others."""
        return []

    def leave(self) -> None:
        """Do nothing."""

    def barrier(self, *numbers: int) -> "Alone":
        """Return a request that is complete."""
        return self

    def share(self, *numbers: int) -> Schedule[list[tuple[int, ...]]]:
        """Return this rank's numbers, after a yield, as any other node."""
        yield (self,)
        return [numbers]

    def part(self, call: object, x: object) -> Schedule[None]:
        """Return a schedule that does nothing: vectors of one rank are combined as they are."""
        yield ()

    def lane(self, index: int) -> "Alone":
        """Return a further meeting place of the same operation."""
        return self
