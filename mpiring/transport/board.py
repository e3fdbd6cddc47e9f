"""Lets the ranks of a node meet in shared memory: barriers, short notes, call headers, desks.

Every rank writes to its own segment only. A segment has a few slots, and operation
number s uses slot s modulo their count once nobody is in the slot's previous operation.
"""

import platform
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from .base import HEADER_BYTES, LANES, Array, Schedule

SLOTS = 4
DESK_BYTES = 512 << 10
_NOTE_WORDS = 8
# Of a lane: its flag on a cache line of its own, and two notes, used in turn.
_LANE_WORDS = 8 + 2 * _NOTE_WORDS
# Beside the flag of lane 0, so that whoever reads that has it too.
_DIGEST_WORD = 1
_HEADER_WORD = LANES * _LANE_WORDS
_DESK_WORD = -(-(_HEADER_WORD * 8 + HEADER_BYTES) // 64) * 8
_SLOT_WORDS = _DESK_WORD + DESK_BYTES // 8
BOARD_BYTES = SLOTS * _SLOT_WORDS * 8

# A flag counts the barriers of one operation in its low bits; above is the operation's number.
_COUNT_BITS = 24
_ENDED = (1 << _COUNT_BITS) - 1

# x86 reorders neither stores nor loads among themselves; ARM and POWER do.
_REORDERS = platform.machine() not in ("x86_64", "AMD64", "i386", "i686")

# A program may combine vectors of ever new lengths.
_MOST_DESKS = 256


class Board:
    """The shared memory in which the ranks of one node meet.

    Args:
        segments: Per rank of the node, BOARD_BYTES bytes, zero at first.
        rank: This rank, among them.
        ranks: Their ranks in the communicator, for messages.
    """

    def __init__(self, segments: Sequence[Array], rank: int, ranks: Sequence[int]) -> None:
        self.segments = segments
        self.rank = rank
        self.ranks = ranks
        self.words = [segment.data.cast("q") for segment in segments]
        self.texts = [segment.data for segment in segments]
        self.others = [words for place, words in enumerate(self.words) if place != rank]
        self.places = [place for place in range(len(ranks)) if place != rank]
        self._desks: dict[tuple[int, np.dtype[Any], int | None], Sequence[Array]] = {}
        self.written: list[bytes] = [b""] * SLOTS
        self._lock = threading.Lock()
        self._lock.acquire()

    def node(self, sequence: int, header: bytes, digest: int) -> "BoardNode":
        """Return the meeting place of operation number `sequence`, see base.Node.

        Args:
            header: HEADER_BYTES bytes that must be equal on all ranks.
            digest: Any number of 63 bits that is equal if they are.
        """
        return BoardNode(self, sequence, header, digest, 0)

    def desks(self, slot: int, dtype: np.dtype[Any], size: int | None) -> Sequence[Array]:
        """Return, per rank, the first `size` elements of a slot's desk."""
        key = slot, dtype, size
        found = self._desks.get(key)
        if found is None:
            if len(self._desks) >= _MOST_DESKS:
                self._desks.clear()
            start = (slot * _SLOT_WORDS + _DESK_WORD) * 8
            found = self._desks[key] = [
                segment[start:start + DESK_BYTES].view(dtype)[:size] for segment in self.segments]
        return found

    def fence(self) -> None:
        """Let no access to memory move across this line, where the processor would do that.

        Giving a lock away and taking it again forbids it on each.
        """
        self._lock.release()
        self._lock.acquire()


class BoardNode:
    """One operation's meeting place; see base.Node."""

    __slots__ = ("rank", "size", "ranks", "met", "_board", "_sequence", "_header", "_lanes",
                 "_digest", "_slot", "_flag", "_count")

    def __init__(self, board: Board, sequence: int, header: bytes, digest: int,
                 lane: int) -> None:
        self.rank = board.rank
        self.size = len(board.ranks)
        self.ranks = board.ranks
        self.met = False
        self._board = board
        self._sequence = sequence
        self._header = header
        self._lanes: dict[int, BoardNode] = {}
        self._digest = digest
        self._slot = sequence % SLOTS * _SLOT_WORDS
        self._flag = self._slot + lane * _LANE_WORDS
        self._count = (sequence + 1) << _COUNT_BITS

    def desks(self, dtype: np.dtype[Any], size: int | None = None) -> Sequence[Array]:
        """Return, per rank of the node, a vector of at most DESK_BYTES bytes; see base.Node."""
        return self._board.desks(self._sequence % SLOTS, dtype, size)

    def test(self) -> bool:
        """Return whether nobody uses the memory for an earlier operation any more."""
        if self._sequence < SLOTS:
            return True
        ended = (self._sequence + 1 - SLOTS) << _COUNT_BITS | _ENDED
        flag = self._slot
        for words in self._board.others:
            if words[flag] < ended:
                return False
        return self._board.words[self.rank][flag] >= ended

    def barrier(self, *numbers: int) -> "_Arrived":
        """Arrive, leave a note of up to 8 numbers, and return a request for the others."""
        board, flag = self._board, self._flag
        mine = board.words[self.rank]
        self._count += 1
        if not self.met:
            self.met = True
            self._write_header()
        if numbers:
            note = flag + 8 + (self._count & 1) * _NOTE_WORDS
            for place, number in enumerate(numbers):
                mine[note + place] = number
        if _REORDERS:
            board.fence()
        mine[flag] = self._count
        return _Arrived(board, flag, self._count)

    def share(self, *numbers: int) -> Schedule[list[tuple[int, ...]]]:
        """Return, per rank of the node, the up to 8 numbers that each has passed."""
        yield (self.barrier(*numbers),)
        note = self._flag + 8 + (self._count & 1) * _NOTE_WORDS
        return [tuple(words[note:note + len(numbers)]) for words in self._board.words]

    def lane(self, index: int) -> "BoardNode":
        """Return a further meeting place of the same operation, without an agreement."""
        if index not in self._lanes:
            # Kept, for its count of barriers goes on.
            other = BoardNode(self._board, self._sequence, self._header, self._digest, index)
            other.met = True
            self._lanes[index] = other
        return self._lanes[index]

    def leave(self) -> None:
        """Say that this rank has done with the operation."""
        board = self._board
        if _REORDERS:
            board.fence()
        board.words[self.rank][self._slot] = (self._sequence + 1) << _COUNT_BITS | _ENDED

    def agrees(self) -> bool:
        """Return whether all ranks were asked to do the same; after the first barrier."""
        digest, word = self._digest, self._slot + _DIGEST_WORD
        for words in self._board.others:
            if words[word] != digest:
                return False
        return True

    def headers(self) -> list[tuple[int, bytes]]:
        """Return the other ranks, and what they were asked to do; after the first barrier."""
        board, start = self._board, (self._slot + _HEADER_WORD) * 8
        return [(self.ranks[place], bytes(board.texts[place][start:start + HEADER_BYTES]))
                for place in board.places]

    def _write_header(self) -> None:
        board = self._board
        board.words[self.rank][self._slot + _DIGEST_WORD] = self._digest
        # A program that makes the same calls again and again finds its header there already.
        slot = self._sequence % SLOTS
        if board.written[slot] is not self._header:
            board.written[slot] = self._header
            start = (self._slot + _HEADER_WORD) * 8
            board.texts[self.rank][start:start + HEADER_BYTES] = self._header


class _Arrived:
    """Complete once every other rank of the node has arrived."""

    __slots__ = ("_board", "_flag", "_count", "_others")

    def __init__(self, board: Board, flag: int, count: int) -> None:
        self._board, self._flag, self._count = board, flag, count
        self._others = board.others

    def __repr__(self) -> str:
        return f"rank {self._board.ranks[self._board.rank]}: waiting for its node's ranks"

    def test(self) -> bool:
        """Return whether all have arrived."""
        flag, count = self._flag, self._count
        for words in self._others:
            if words[flag] < count:
                return False
        if _REORDERS:
            self._board.fence()
        return True
