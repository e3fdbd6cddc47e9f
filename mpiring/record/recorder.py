"""Records a rank's last operations: their calls, their times, and how long callers waited."""

import threading
import time
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..files import replacing
from ..launch.forks import OfRank
from ..text import ranges
from .counter import OperationCounter
from .flight import Flight
from .flight_file import pickled
from .trace_file import TraceFile

# Number of operations: a few steps of a large model, and a megabyte at most.
CAPACITY = 1024
_NAME_WIDTH = 40
# Seconds between two saves, because all other ranks may ask for a report at once.
_SAVE_S = 1.0


class Recorder(OfRank):
    """The last operations of a rank, in all communicators that share an engine.

    Adding an operation needs no lock, because a bounded deque holds them.

    Args:
        rank: Number of this rank in the first of these communicators.

    Attributes:
        rank: The argument of the same name.
        trace: File of all operations, waits and steps, or None.
        counters: Counters of these communicators; their fast calls are also operations.
        add: Function that records that this rank calls an operation.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.counters: weakref.WeakSet[OperationCounter] = weakref.WeakSet()
        self.trace: TraceFile | None = None
        self._flights: deque[Flight] = deque(maxlen=CAPACITY)
        # An attribute instead of a method, for speed: a blocking call takes microseconds.
        self.add: Callable[[Flight], None] = self._flights.append
        self._names: Counter[str] = Counter()
        self._steps = 0
        self._step_ended_s = 0.0
        self._saved_s, self._saved = 0.0, ""
        # Reentrant, because a signal handler may ask for a report.
        self._saving = threading.RLock()

    def name(self, ranks: Sequence[int]) -> str:
        """Return a new name for a communicator, the same on all its ranks.

        Args:
            ranks: Ranks of the new communicator, as numbered in the first one, whose name is "".

        Collective: yes, among these ranks, but without a message. Blocking: no.
        """
        text = f"ranks {_name_of(ranks)}" if self._names else ""
        self._names[text] += 1
        return text if self._names[text] == 1 else f"{text} ({self._names[text]})"

    def ended(self, flight: Flight, ended_s: float) -> None:
        """Record when an operation was completed."""
        flight.ended_s = ended_s
        if self.trace is not None:
            self.trace.operation(flight)

    def waited(self, flight: Flight, began_s: float, ended_s: float) -> None:
        """Record when a caller waited for an operation."""
        flight.exposed_s += ended_s - began_s
        if self.trace is not None:
            self.trace.waited(flight, began_s, ended_s)

    def waited_for_data(self, began_s: float, ended_s: float) -> None:
        """Record when the program waited for its next batch."""
        if self.trace is not None:
            self.trace.span("wait for data", "data", began_s, ended_s)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record when a part of a step runs, like "forward" or "optimizer"."""
        began_s = time.monotonic()
        yield
        if self.trace is not None:
            self.trace.span(name, "phase", began_s, time.monotonic())

    def end_step(self, waited_s: float = 0.0, tokens: float | None = None,
                 ready_s: Sequence[float] = ()) -> None:
        """Record that a training step ends now and the next one begins.

        Args:
            waited_s: Time when all gradients were ready, and the wait for their means began.
            tokens: Number of tokens of this rank in the step; None if unknown.
            ready_s: Times when each gradient became ready, in the model's order; empty if unknown.
        """
        now = time.monotonic()
        if self.trace is not None and self._steps:
            self.trace.step(self._steps, self._step_ended_s, ready_s, waited_s, now, tokens)
        self._steps += 1
        self._step_ended_s = now

    @property
    def has_data(self) -> bool:
        """Whether one of the last operations has sent data of the program."""
        return not all(flight.call.prepares for flight in self._last(CAPACITY))

    def lines(self, last: int = CAPACITY) -> list[str]:
        """Return a line for each of the last operations, the newest last."""
        now = time.monotonic()
        clock_s = time.time() - now
        return [flight.line(now, clock_s) for flight in self._last(min(last, CAPACITY))]

    def _last(self, last: int) -> list[Flight]:
        """Return the last operations, the newest last."""
        flights = list(self._flights)
        for counter in tuple(self.counters):
            flights += counter.flights(last)
        flights.sort(key=lambda flight: flight.called_s)
        return flights[max(0, len(flights) - last):]

    def report(self, last: int, folder: str | None = None, *, where: str = "") -> str:
        """Return lines about the `last` operations, after saving all; see `save`.

        Args:
            last: Number of operations.
            folder: Argument of `save`.
            where: Text that distinguishes this record from others of the rank.
        """
        more, lines = self.save(folder), self.lines(last)
        head = f"the last operations of rank {self.rank}{where}, by its clock{more}:"
        return "\n".join([head, *(f"  {line}" for line in lines)]) if lines else ""

    def save(self, folder: str | None = None) -> str:
        """Save the last operations in a file for PyTorch's `fr_trace`; see flight_file.

        Args:
            folder: Folder for the file, created if needed; by default the folder of the trace.
                Without a trace, nothing is saved by default.

        Returns:
            Text with the file's name, to append to a report.
        """
        if folder is not None:
            return self._write(Path(folder).expanduser().absolute() / f"flight-rank{self.rank:05d}")
        # Threads of several engines may save at once, and each report names the file.
        with self._saving:
            if self.trace is None or time.monotonic() - self._saved_s < _SAVE_S:
                return self._saved
            self._saved_s = time.monotonic()
            self.trace.incomplete([
                flight for flight in list(self._flights) if not flight.ended_s])
            return self._write(Path(self.trace.flight_path))

    def _write(self, name: Path) -> str:
        counters = [counter for counter in tuple(self.counters) if not counter.closed]
        content = pickled(self._last(CAPACITY), counters)
        try:
            name.parent.mkdir(parents=True, exist_ok=True)
            with replacing(name) as new:
                new.file.write(content)
            self._saved = f" (more in {name})"
        except OSError as error:
            # A full disk must not end the training.
            self._saved = f" (not saved in {name}: {error.strerror or error})"
        return self._saved


def _name_of(ranks: Sequence[int]) -> str:
    """Return ranks as ranges; a long string is truncated, and ends with a digest of all ranks."""
    text = ranges(ranks)
    return text if len(text) <= _NAME_WIDTH else (
        f"{text[:_NAME_WIDTH - 10]}…{zlib.crc32(text.encode()):08x}")
