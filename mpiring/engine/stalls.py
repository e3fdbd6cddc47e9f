"""Asks the other ranks what they are doing when an operation or a message stalls."""

import contextlib
import functools
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..config import Config
from ..errors import StallError
from ..record.counter import OperationCounter
from ..record.flight import Flight
from ..transport import waiting
from .handle import Handle
from .questions import MAX_CALLS, MAX_RANKS, Watch

if TYPE_CHECKING:
    from ..transport.mpi import Mailbox

# With up to _MAX_ASKED ranks, each rank asks all others. With more, a rank asks rank 0, then
# _GROWTH times as many of the first ranks, and so on. It stops once one of these ranks also waits
# and therefore reports on all. This costs a few messages per rank in total. A report lists at most
# _MAX_ASKED ranks.
_MAX_ASKED, _GROWTH = 64, 4
# Number of queued operations after which this class looks which of them are over.
_MAX_QUEUED = 32
# How often per `stall_timeout_s` a patient rank asks the other ranks.
_QUESTIONS = 2
_NO_ANSWER = "does not answer: it is stopped, or outside mpiring without a progress thread"


class StallWatch(Watch):
    """Watches the operations of one rank in one communicator, and asks the other ranks.

    Args:
        rank, size: Number of this rank, and number of ranks.
        mailbox: Mailbox for questions and answers.
        config: Settings `stall_warning_s` and `stall_timeout_s`.
        report: Function that saves this rank's last operations and returns a text about some of
            them. Its argument is the number of operations.
        counter: Counter of its last fast calls in this communicator.
        warn: Function that is given the text of a report; by default, it prints to standard error.

    Attributes:
        config: Settings; may be replaced.
        last: Flight of this rank's last call, except fast calls; not its handle, which would keep
            the user's array alive.
    """

    def __init__(self, rank: int, size: int, mailbox: "Mailbox", config: Config,
                 report: Callable[[int], str], counter: OperationCounter,
                 warn: Callable[[str], None] | None = None) -> None:
        super().__init__(rank, mailbox, report)
        self._size = size
        self._counter = counter
        self.config = config
        self._warn = warn or print_at_once
        self._unfinished: list[Handle[Any]] = []
        # Operations whose rest is queued on a GPU, in the order in which they will end there.
        self._queued: deque[Handle[Any]] = deque()
        self._newest_queued = 0
        # The caller enters operations, and the engine's thread reads them.
        self._lock = threading.Lock()
        self.last: Flight | None = None
        self._inquiry: _Inquiry | None = None

    @property
    def ranks(self) -> Sequence[int]:
        """Ranks of the group, as numbered in the engine's first group."""
        return self._counter.ranks

    def enter(self, handle: Handle[Any]) -> None:
        """Watch an operation."""
        with self._lock:
            if handle.is_queued:
                self._newest_queued = min(self._newest_queued, handle.flight.sequence)
                self._queued.append(handle)
                if len(self._queued) < _MAX_QUEUED:
                    # It takes a call of CUDA to find out which are over.
                    return
            else:
                self._unfinished.append(handle)
            self._forget()

    def unfinished(self) -> list[Handle[Any]]:
        """Return this rank's incomplete operations."""
        with self._lock:
            self._forget()
            return [*self._queued, *self._unfinished]

    def _forget(self) -> None:
        """Forget complete operations, which would keep their results alive."""
        unfinished = []
        for handle in self._unfinished:
            if handle.is_queued:
                self._queued.append(handle)
            elif not handle.complete:
                unfinished.append(handle)
        self._unfinished = unfinished
        while self._queued and self._queued[0].is_over:
            self._queued.popleft()

    def check(self) -> None:
        """Answer other ranks; if the oldest operation stalls, ask, report, or raise.

        Raises:
            StallError: `stall_timeout_s` has passed; the error contains the report.
        """
        self.answer()
        oldest = next(iter(self.unfinished()), None)
        if oldest is None:
            self._inquiry = None
            return
        if self._inquiry is None or self._inquiry.handle is not oldest:
            self._inquiry = _Inquiry(oldest)
        inquiry, warning_s = self._inquiry, self.config.stall_warning_s
        if self._is_overdue(inquiry):
            if self._has_answers(inquiry, "timeout") and self._is_overdue(inquiry):
                raise StallError(self._report(inquiry, ": Timed out after"))
        elif warning_s and oldest.waited_s >= warning_s and not inquiry.reported:
            if self._has_answers(inquiry, "warning"):
                inquiry.reported = True
                # One report is enough: the lowest waiting rank prints it.
                if not any(rank < self.rank for rank in inquiry.waiting):
                    self._warn(self._report(inquiry, " has waited"))

    def _is_overdue(self, inquiry: "_Inquiry") -> bool:
        """Return whether the operation has stalled, or a rank has been silent, for too long."""
        handle, timeout_s, now_s = inquiry.handle, self.config.stall_timeout_s, time.monotonic()
        if not timeout_s or handle.waited_s < timeout_s:
            return False
        if handle.waited_s >= self._patience_s(handle):
            return True
        if now_s - inquiry.asked_again_s >= timeout_s / _QUESTIONS:
            inquiry.asked_again_s = now_s
            self.ask(handle.flight.sequence, self._watched_ranks)
        # Without a background thread, a rank that computes does not answer either.
        return handle.queue.engine.threaded and any(
            now_s - inquiry.heard_s.get(rank, inquiry.began_s) >= timeout_s
            for rank in self._watched_ranks)

    @functools.cached_property
    def _watched_ranks(self) -> list[int]:
        """Ranks whose silence this rank checks: all others, or, of many, those 1, 2, 4, … ahead."""
        p = self._size
        distances = range(1, p) if p <= _MAX_ASKED else [
            1 << k for k in range((p - 1).bit_length())]
        return [(self.rank + distance) % p for distance in distances]

    def _patience_s(self, handle: Handle[Any]) -> float:
        """Return the seconds that an operation may stall while all ranks answer."""
        return max(self.config.stall_timeout_s, handle.patience_s)

    def _has_answers(self, inquiry: "_Inquiry", purpose: str) -> bool:
        """Ask other ranks once per purpose; return True once they have answered or are late."""
        if inquiry.purpose != purpose:
            inquiry.purpose, inquiry.asked = purpose, 0
            for answers in (inquiry.answers, inquiry.last, inquiry.waiting):
                answers.clear()
            self._ask_more(inquiry)
        if (len(inquiry.answers) < len(self._asked_ranks(inquiry))
                and time.monotonic() - inquiry.asked_s <= waiting.ANSWER_S):
            return False
        if inquiry.asked == self._size or any(rank < self.rank for rank in inquiry.waiting):
            return True
        self._ask_more(inquiry)
        return False

    def _ask_more(self, inquiry: "_Inquiry") -> None:
        """Ask more ranks; ask all ranks if all lower ranks have been asked."""
        before = len(self._asked_ranks(inquiry))
        inquiry.asked, inquiry.asked_s = max(1, _GROWTH * inquiry.asked), time.monotonic()
        if self._size <= _MAX_ASKED or inquiry.asked > self.rank:
            inquiry.asked = self._size
        self.ask(inquiry.handle.flight.sequence, self._asked_ranks(inquiry)[before:])

    def _asked_ranks(self, inquiry: "_Inquiry") -> list[int]:
        return [rank for rank in range(inquiry.asked) if rank != self.rank]

    def _receive(self, source: int, answer: dict[str, Any]) -> None:
        inquiry = self._inquiry
        if inquiry and inquiry.handle.flight.sequence == answer["answer"]:
            inquiry.answers[source], inquiry.last[source] = answer["text"], answer["last"]
            inquiry.heard_s[source] = time.monotonic()
            if answer["waits"]:
                inquiry.waiting.add(source)

    def _position(self, number: int) -> tuple[str, bool]:
        unfinished = self.unfinished()
        for handle in unfinished:
            if handle.flight.sequence == number and handle.flight.started_s:
                return f"waits in it too, since {handle.waited_s:.0f} s", True
            if handle.flight.sequence == number:
                return f"has it queued behind {unfinished[0]}", False
        calls = [flight for flight in (self.last, *self._counter.flights(1)) if flight is not None]
        if not calls:
            return "has not called it, nor anything else", False
        last = max(calls, key=lambda flight: flight.called_s)
        # A started fast call is in neither list until the caller waits for it. Queued operations
        # have negative numbers, which fall.
        newest = max(last.sequence, self._counter.sequence - 1)
        if newest >= number >= 0 or self._newest_queued <= number < 0:
            return "has finished it", False
        ago = time.monotonic() - last.called_s
        return f"has NOT CALLED it; its last call was {last}, {ago:.0f} s ago", False

    def _report(self, inquiry: "_Inquiry", verb: str) -> str:
        handle, timeout_s = inquiry.handle, self.config.stall_timeout_s
        patience_s, limit = self._patience_s(handle), "it waits without a limit"
        if timeout_s:
            limit = f"the limit is stall_timeout_s={timeout_s:g} (MPIRING_STALL_TIMEOUT_S)"
        if timeout_s and patience_s > timeout_s:
            limit += f", but {patience_s:g} s while all ranks answer: others may still be at work"
        missing = sorted(inquiry.last.keys() - inquiry.waiting)[:MAX_RANKS - 1]
        last = [self._last_operations(MAX_CALLS), *(inquiry.last[rank] for rank in missing)]
        return "\n".join([
            f"rank {self.rank}{verb} {handle.waited_s:.0f} s in {handle}",
            *(f"  {line}" for line in self._positions(inquiry)),
            f"  {limit}",
            *(f"  {line}" for text in last for line in text.splitlines())])

    def _positions(self, inquiry: "_Inquiry") -> list[str]:
        """Return a line per asked rank; if there are many, ranks that do not wait come first."""
        asked = sorted(self._asked_ranks(inquiry), key=lambda rank: (
            self._size > _MAX_ASKED and rank in inquiry.waiting, rank))
        lines = [f"rank {rank} {inquiry.answers.get(rank, _NO_ANSWER)}"
                 for rank in asked[:_MAX_ASKED]]
        if len(asked) > _MAX_ASKED:
            lines.append(f"{len(inquiry.waiting)} of the {len(asked)} other ranks wait in it too")
        if inquiry.asked < self._size:
            lines.append(f"ranks {inquiry.asked} to {self._size - 1} were not asked: "
                         f"rank {min(inquiry.waiting)} asks them")
        return lines


@dataclass
class _Inquiry:
    """The answers of other ranks about a stalled operation.

    Attributes:
        handle: Handle of the operation.
        reported: True once this rank or a lower one has reported it.
        purpose: Purpose of the questions: "warning", "timeout" or "".
        asked: Number of the first ranks that were asked.
        asked_s: Time of the last questions.
        asked_again_s: Time of the last question to the watched ranks.
        began_s: Time when the inquiry began.
        heard_s: Time of each rank's last answer.
        answers: Each rank's answer.
        last: Last operations of each rank.
        waiting: Ranks that wait in the operation.
    """

    handle: Handle[Any]
    reported: bool = False
    purpose: str = ""
    asked: int = 0
    asked_s: float = 0.0
    asked_again_s: float = 0.0
    began_s: float = field(default_factory=time.monotonic)
    heard_s: dict[int, float] = field(default_factory=dict)
    answers: dict[int, str] = field(default_factory=dict)
    last: dict[int, str] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)


class MessageWatch(Watch):
    """Watches the messages for which callers wait, and asks the other ranks.

    Args:
        rank, size, mailbox, config, report, warn: Arguments of StallWatch.

    Attributes:
        config: Settings; may be replaced.
    """

    def __init__(self, rank: int, size: int, mailbox: "Mailbox", config: Config,
                 report: Callable[[int], str], warn: Callable[[str], None] | None = None) -> None:
        super().__init__(rank, mailbox, report)
        self._others = [other for other in range(size) if other != rank]
        self.config = config
        self._warn = warn or print_at_once
        # No lock: each change is atomic, and a fork may happen at any time.
        self._waits: dict[int, _Wait] = {}

    @contextlib.contextmanager
    def waiting(self, handle: Handle[Any], other: int | None,
                limit_s: float) -> Iterator[Callable[[], list[str]]]:
        """Watch a message while a caller waits; yield a function that returns a report's lines.

        Args:
            handle: Handle of the message.
            other: Rank at the other end; None for any.
            limit_s: Seconds after which the caller gives up; 0 for never.
        """
        warning_s = self.config.stall_warning_s
        # Ask early enough that answers arrive before the wait ends.
        ask_s = min([s for s in (warning_s, limit_s / 2) if s], default=math.inf)
        wait = self._waits[id(handle)] = _Wait(
            handle, [rank for rank in self._others if other in (None, rank)], time.monotonic(),
            ask_s, warning_s or math.inf)
        try:
            yield lambda: self._lines(wait)
        finally:
            del self._waits[id(handle)]

    def check(self) -> None:
        """Answer other ranks; ask them about late messages, and report late messages."""
        self.answer()
        for number, wait in tuple(self._waits.items()):
            now_s = time.monotonic()
            waited_s = now_s - wait.began_s
            if not wait.asked_s and waited_s >= wait.ask_s:
                wait.asked_s = now_s
                self.ask(number, wait.peers)
            is_late = now_s - wait.asked_s > waiting.ANSWER_S
            complete = is_late or len(wait.answers) == len(wait.peers)
            if waited_s >= wait.warning_s and complete:
                wait.warning_s = math.inf
                self._warn("\n".join([
                    f"rank {self.rank} has waited {waited_s:.0f} s in {wait.handle}",
                    *self._lines(wait)]))

    def _receive(self, source: int, answer: dict[str, Any]) -> None:
        if answer["answer"] in self._waits:
            self._waits[answer["answer"]].answers[source] = "\n".join(
                filter(None, [answer["text"], answer["last"]]))

    def _position(self, number: int) -> tuple[str, bool]:
        waits = [f"{wait.handle}, since {time.monotonic() - wait.began_s:.0f} s"
                 for wait in tuple(self._waits.values())]
        return f"waits for {'; '.join(waits) or 'no message'}", bool(waits)

    def _lines(self, wait: "_Wait") -> list[str]:
        late = wait.asked_s and time.monotonic() - wait.asked_s > waiting.ANSWER_S
        missing = _NO_ANSWER if late else "has not answered yet"
        lines = [line for rank in wait.peers[:MAX_RANKS]
                 for line in f"rank {rank} {wait.answers.get(rank, missing)}".splitlines()]
        return [f"  {line}" for line in lines + self._last_operations(MAX_CALLS).splitlines()]


@dataclass
class _Wait:
    """A caller's wait for a message, and the answers of the ranks at its other end."""

    handle: Handle[Any]
    peers: list[int]
    began_s: float
    ask_s: float
    warning_s: float
    asked_s: float = 0.0
    answers: dict[int, str] = field(default_factory=dict)


def print_at_once(text: str) -> None:
    """Print a report to standard error, unless this fails: a full disk must not end the job."""
    # One write (print makes two), so that the launcher does not mix lines of ranks.
    with contextlib.suppress(Exception):
        sys.stderr.write(f"mpiring: {text}\n")
        sys.stderr.flush()
