"""Records a rank's last operations, always: what they were, when they ran, who waited for them."""

import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Protocol, TextIO

from ..operations.agreement import Call
from ..text import ranges

# Some steps of a large model; a megabyte at most.
CAPACITY = 1024
# In reports, a call's text is cut here: the names of all gradients in a bucket fill pages.
_WIDTH = 100
_NAME_WIDTH = 40
_KEEP_S = 1.0


class Flight:
    """An operation of this rank, from its call to its end; holds no array.

    Attributes:
        call: What it is.
        sequence: Its number among its communicator's operations.
        group: Its communicator; see Recorder.name.
        algorithm: Of an allreduce; "" where there is no choice, or it is not known yet.
        called_s, started_s, ended_s: When, by time.monotonic(); 0 for what has not happened.
        exposed_s: Seconds that callers have waited for it.
    """

    __slots__ = ("call", "sequence", "group", "algorithm", "called_s", "started_s", "ended_s",
                 "exposed_s")

    def __init__(self, call: Call, sequence: int, group: str = "", algorithm: str = "") -> None:
        self.call, self.sequence = call, sequence
        self.group, self.algorithm = group, algorithm
        self.called_s = time.monotonic()
        self.started_s = self.ended_s = self.exposed_s = 0.0

    def __repr__(self) -> str:
        return f"#{self.sequence} {self.call}"

    def told(self, now_s: float, clock_s: float) -> str:
        """Return a line about it.

        Args:
            now_s: Of time.monotonic().
            clock_s: What to add to such times for those of time.time().
        """
        what = f"{self!r}" if len(f"{self!r}") <= _WIDTH else f"{self!r:.{_WIDTH}}…"
        about = [what, f"{self.call.nbytes:,} bytes" * bool(self.call.nbytes), self.algorithm,
                 f"among {self.group}" * bool(self.group)]
        return f"{_clock(self.called_s + clock_s)} {', '.join(filter(None, about))}: " \
               f"{self._progress(now_s)}"

    def _progress(self, now_s: float) -> str:
        if not self.started_s:
            return f"queued for {now_s - self.called_s:.1f} s"
        if not self.ended_s:
            return f"NOT COMPLETE after {now_s - self.started_s:.1f} s"
        return (f"queued {_ms(self.started_s - self.called_s)}, took "
                f"{_ms(self.ended_s - self.started_s)}, waited for {_ms(self.exposed_s)} ms")


class Trace(Protocol):
    """Where all operations go, if they are traced; see chrome.TraceFile."""

    def operation(self, flight: Flight) -> None:
        """Take an operation that is complete."""

    def waited(self, flight: Flight, began_s: float, ended_s: float) -> None:
        """Take the time in which a caller waited for an operation."""

    def step(self, number: int, began_s: float, ready_s: float, waited_s: float,
             ended_s: float) -> None:
        """Take a training step; see Recorder.end_step."""

    def keep(self, lines: Sequence[str], unfinished: Sequence[Flight]) -> str:
        """Write the last operations to a file beside the trace, and return its name."""


class Recorder:
    """The last operations of a rank, in all communicators that share an engine.

    Adding to it takes no lock: the ring is a bounded deque.

    Args:
        rank: Of the first of those communicators, by which the rank is called.

    Attributes:
        rank: As above.
        trace: Where operations go besides; None for nowhere.
        add: Note that this rank calls an operation.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.trace: Trace | None = None
        self._ring: deque[Flight] = deque(maxlen=CAPACITY)
        # Itself, for its speed: a blocking call takes microseconds.
        self.add: Callable[[Flight], None] = self._ring.append
        self._names: Counter[str] = Counter()
        self._steps = 0
        self._step_ended_s = 0.0
        self._kept_s, self._kept = 0.0, ""

    def name(self, ranks: Sequence[int]) -> str:
        """Return a new name for a communicator, the same on all its ranks.

        Args:
            ranks: Of the first communicator, whose own name is "".

        Collective: yes, among those ranks, but without a message. Blocking: no.
        """
        text = f"ranks {_name_of(ranks)}" if self._names else ""
        self._names[text] += 1
        return text if self._names[text] == 1 else f"{text} ({self._names[text]})"

    def at_once(self, flight: Flight, began_s: float, ended_s: float) -> None:
        """Note that an operation is complete, and that the caller has waited all the time."""
        flight.ended_s = ended_s
        flight.exposed_s = ended_s - began_s
        if self.trace is not None:
            self.trace.waited(flight, began_s, ended_s)
            self.trace.operation(flight)

    def ended(self, flight: Flight, ended_s: float) -> None:
        """Note that an operation is complete, since when."""
        flight.ended_s = ended_s
        if self.trace is not None:
            self.trace.operation(flight)

    def waited(self, flight: Flight, began_s: float, ended_s: float) -> None:
        """Note that a caller has waited for an operation, from when to when."""
        flight.exposed_s += ended_s - began_s
        if self.trace is not None:
            self.trace.waited(flight, began_s, ended_s)

    def end_step(self, ready_s: float = 0.0, waited_s: float = 0.0) -> None:
        """Note that a training step ends now; the next one begins.

        Args:
            ready_s: When its first gradient became ready, if that is known.
            waited_s: When all were, and the wait for their means began.
        """
        now = time.monotonic()
        if self.trace is not None and self._steps:
            self.trace.step(self._steps, self._step_ended_s, ready_s, waited_s, now)
        self._steps += 1
        self._step_ended_s = now

    def lines(self, last: int = CAPACITY) -> list[str]:
        """Return a line for each of the last operations, the newest last."""
        now = time.monotonic()
        clock_s = time.time() - now
        flights = list(self._ring)
        return [flight.told(now, clock_s) for flight in flights[max(0, len(flights) - last):]]

    def report(self, last: int) -> str:
        """Return a few lines about the last operations; where there is a trace, also keep them all.

        Args:
            last: How many operations are told of.
        """
        more, told = self.kept(), self.lines(last)
        head = f"the last operations of rank {self.rank}, by its clock{more}:"
        return "\n".join([head, *(f"  {line}" for line in told)]) if told else ""

    def dump(self, last: int, file: TextIO) -> None:
        """Print what `report` returns, in one write, so that ranks' lines do not mix."""
        file.write(f"mpiring: {self.report(last) or 'there were no operations yet'}\n")
        file.flush()

    def kept(self) -> str:
        """Write all that is known to a file beside the trace, if there is one; say which."""
        # All other ranks may ask at once.
        if self.trace is not None and time.monotonic() - self._kept_s > _KEEP_S:
            unfinished = [flight for flight in list(self._ring) if not flight.ended_s]
            name = self.trace.keep(self.lines(), unfinished)
            self._kept_s, self._kept = time.monotonic(), f" (more in {name})" if name else ""
        return self._kept


def _clock(seconds: float) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(seconds))}.{int(seconds * 1e3) % 1000:03d}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _name_of(ranks: Sequence[int]) -> str:
    """Return ranks as ranges; where that is long, cut, with a digest that tells them apart."""
    text = ranges(ranks)
    return text if len(text) <= _NAME_WIDTH else (
        f"{text[:_NAME_WIDTH - 10]}…{zlib.crc32(text.encode()):08x}")
