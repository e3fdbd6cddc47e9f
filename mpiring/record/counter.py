"""Keeps what a group's operations have in common on this rank, in words that fast calls change."""

import threading
from array import array
from collections.abc import Iterator

from ..launch import forks
from ..operations.agreement import Call
from ..transport.layout import (
    COUNTER_CALLS, COUNTER_GATE, COUNTER_HELD, COUNTER_NANOSECONDS, COUNTER_RING,
    COUNTER_SEQUENCE, COUNTER_WORDS, GATE_FORKED, RING, RING_BEGAN, RING_ENDED, RING_IDENTITY,
    RING_SEQUENCE, RING_WORDS)
from .flight import Flight

# So many calls are known by their identities. Beyond, those are forgotten that are neither in the
# ring nor among the newer half.
_MOST_CALLS = 4 * RING
_FORGOTTEN = Call("a fast call", "of long ago")


class OperationCounter:
    """The number of a group's next operation, and its last fast calls; see transport.layout.

    Attributes:
        words: COUNTER_WORDS words, which compiled code changes, too; never resized.
        group: The group's name in reports; see Recorder.name.

    It is a lock, held (`with counter:`) to number an operation in Python, and to run a fast call
    but its beginning in compiled code, which finds out by a word that the lock is held; never for a
    long wait, and never taken by a thread that holds the engine's. Reentrant, because a signal's
    handler may make a call.
    """

    def __init__(self) -> None:
        self.words = array("q", bytes(8 * COUNTER_WORDS))
        self.group = ""
        self._lock = threading.RLock()
        self._calls: dict[int, tuple[Call, str]] = {}
        self._identity = 0
        forks.gates.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()
        self.words[COUNTER_HELD] += 1

    def __exit__(self, *error: object) -> None:
        self.words[COUNTER_HELD] -= 1
        self._lock.release()

    @property
    def sequence(self) -> int:
        """The number of the next operation."""
        return self.words[COUNTER_SEQUENCE]

    @property
    def fast_calls(self) -> int:
        """How many fast calls were complete without the engine."""
        return self.words[COUNTER_CALLS]

    @property
    def fast_s(self) -> float:
        """Seconds that callers spent in these."""
        return self.words[COUNTER_NANOSECONDS] / 1e9

    def close(self, reason: int) -> None:
        """Close the gate: no fast call begins.

        Args:
            reason: GATE_CLOSED or another bit, see transport.layout.
        """
        self.words[COUNTER_GATE] |= reason

    def open(self, reason: int) -> None:
        """Open the gate again, as far as it was closed for a reason."""
        self.words[COUNTER_GATE] &= ~reason

    def fork(self) -> None:
        """Close the gate in a fork of this process, where nobody may be left to free the lock."""
        self._lock = threading.RLock()
        self.words[COUNTER_HELD] = 0
        self.close(GATE_FORKED)

    def identity_of(self, call: Call, algorithm: str) -> int:
        """Return a new number by which fast calls are noted.

        Args:
            call: What they are.
            algorithm: Which algorithm they take, for reports.
        """
        with self:
            if len(self._calls) >= _MOST_CALLS:
                noted = {identity for identity, *_ in self._noted()}
                noted.update(range(self._identity - _MOST_CALLS // 2, self._identity + 1))
                self._calls = {key: call for key, call in self._calls.items() if key in noted}
            self._identity += 1
            self._calls[self._identity] = call, algorithm
            return self._identity

    def flights(self, last: int = RING) -> list[Flight]:
        """Return the last fast calls as operations, the newest last."""
        return [self._flight(*entry) for entry in self._noted(last)]

    def _noted(self, last: int = RING) -> Iterator[tuple[int, int, int, int]]:
        calls = self.fast_calls
        for k in range(max(0, calls - min(last, RING)), calls):
            entry = COUNTER_RING + k % RING * RING_WORDS
            words = self.words[entry:entry + RING_WORDS]
            yield (words[RING_IDENTITY], words[RING_SEQUENCE], words[RING_BEGAN],
                   words[RING_ENDED])

    def _flight(self, identity: int, sequence: int, began_ns: int, ended_ns: int) -> Flight:
        call, algorithm = self._calls.get(identity, (_FORGOTTEN, ""))
        began_s, ended_s = began_ns / 1e9, ended_ns / 1e9
        return Flight(call, sequence, self.group, algorithm, began_s, began_s, ended_s,
                      ended_s - began_s)
