"""Operation counter of a group, in memory that compiled code can update."""

import threading
from collections import deque
from collections.abc import Iterator, Sequence

from ..launch import forks
from ..operations.agreement import Call
from ..transport.layout import ENTRY_WORDS, GATE_CLOSED, GATE_FORKED, RING, Counter
from .flight import Flight

# Number of calls that are known by their identities. Beyond it, the older half is forgotten, except
# for calls in the ring.
_MAX_CALLS = 4 * RING
_FORGOTTEN = Call("a fast call", "of long ago")


class OperationCounter(Counter):
    """The number of a group's next operation, and its last fast calls; see transport.layout.

    It is also a lock. A thread holds it (`with counter:`) to number an operation in Python, and to
    run a fast call. Compiled code does not acquire it to begin a call, but reads a word that says
    whether the lock is held. It is never held for a long wait, and never acquired by a thread that
    holds the engine's lock. It is reentrant, because a signal handler may make a call.

    Attributes:
        group: Name of the group in reports; see Recorder.name.
        ranks: Its ranks, as numbered in the first group.
    """

    def __init__(self) -> None:
        super().__init__()
        self.group = ""
        self.ranks: Sequence[int] = ()
        self._lock = threading.RLock()
        self._calls: dict[int, tuple[Call, str]] = {}
        # Numbers of the latest calls that are made once.
        self._once = deque([0] * (2 * RING), 2 * RING)
        self._identity = 0
        forks.gates.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()
        self.held += 1

    def __exit__(self, *error: object) -> None:
        self.held -= 1
        self._lock.release()

    @property
    def fast_s(self) -> float:
        """Number of seconds that callers spent in these calls."""
        return float(self.fast_ns / 1e9)

    @property
    def closed(self) -> bool:
        """Whether the group was closed."""
        return bool(self.gate & GATE_CLOSED)

    def close(self, reason: int) -> None:
        """Close the gate for a reason, such as layout.GATE_CLOSED, so that no fast call begins."""
        self.gate |= reason

    def open(self, reason: int) -> None:
        """Open the gate again, unless it is closed for another reason."""
        self.gate &= ~reason

    def fork(self) -> None:
        """Close the gate in a forked process, where no thread may be left to release the lock."""
        self._lock = threading.RLock()
        self.held = 0
        self.close(GATE_FORKED)

    def identity_of(self, call: Call, algorithm: str, *, once: bool = False) -> int:
        """Return a new number by which fast calls of an algorithm are recorded.

        If `once`, there will be only one of them.
        """
        with self:
            if once:
                # The ring holds no older ones.
                self._calls.pop(self._once[0], None)
                self._once.append(self._identity + 1)
            if len(self._calls) >= _MAX_CALLS:
                recorded = {identity for identity, *_ in self._ring_entries()}
                recorded.update(range(self._identity - _MAX_CALLS // 2, self._identity + 1))
                self._calls = {key: call for key, call in self._calls.items() if key in recorded}
            self._identity += 1
            self._calls[self._identity] = call, algorithm
            return self._identity

    def flights(self, last: int = RING) -> list[Flight]:
        """Return the last fast calls as operations, the newest last."""
        return [self._flight(*entry) for entry in self._ring_entries(last)]

    def _ring_entries(self, last: int = RING) -> Iterator[tuple[int, int, int, int]]:
        calls = self.fast_calls
        for k in range(max(0, calls - min(last, RING)), calls):
            entry = k % RING * ENTRY_WORDS
            identity, sequence, began_ns, ended_ns = self.ring[entry:entry + ENTRY_WORDS]
            yield identity, sequence, began_ns, ended_ns

    def _flight(self, identity: int, sequence: int, began_ns: int, ended_ns: int) -> Flight:
        call, algorithm = self._calls.get(identity, (_FORGOTTEN, ""))
        began_s, ended_s = began_ns / 1e9, ended_ns / 1e9
        return Flight(call, sequence, self.group, algorithm, began_s, began_s, ended_s,
                      ended_s - began_s)
