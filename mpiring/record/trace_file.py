"""Writes a rank's operations, waits and steps as JSON for Chrome's viewer and Perfetto.

The format is the array of Chrome's Trace Event Format, with one event per line. The array may end
anywhere, so the file of a killed job is also readable.
"""

import contextlib
import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..files import regular
from .flight import Flight

_log = logging.getLogger("mpiring")

# Lanes of each rank, which Chrome calls threads.
STEPS, PROGRAM, OPERATIONS = 0, 1, 100
# Seconds that a killed job may lose from the end of its trace.
_PERIOD_S = 0.25
# Events in a period beyond this number are left out, so that memory stays bounded.
_MAX_EVENTS = 1 << 16
# A limit on disk use: at 5 kB per step, about 50,000 steps.
MAX_BYTES = 256 << 20
# For this many steps, the trace also contains the time when each gradient became ready. This is
# enough to learn how these times vary, and takes a few megabytes for a large model.
_DETAILED_STEPS = 500
# The fastest of this many round trips counts, because disturbances only make them slower.
_ANSWERS = 20

Event = dict[str, Any]
# json.dumps would make an encoder for each event.
_encode = json.JSONEncoder(separators=(",", ":")).encode


class ClockReading(NamedTuple):
    """Offset of a rank's time.monotonic() from rank 0's.

    Attributes:
        at_s: Time of the measurement, by this rank's clock.
        offset_s: This rank's time minus rank 0's.
        error_s: Bound on the error of `offset_s`.
    """

    at_s: float = 0.0
    offset_s: float = 0.0
    error_s: float = 0.0


def compare_clocks(comm: Any) -> ClockReading:
    """Return the offset from rank 0's clock, as measured by the fastest of several round trips.

    In step k, ranks 2^k to 2^(k+1) ask the 2^k ranks before them, which already know their offsets.
    This takes ceil(log2 p) steps. The errors along the path from rank 0 add up. Nothing else is
    sent on `comm`.

    Collective: yes. Blocking: yes.
    Source: Cristian, Distributed Computing 3, 1989.
    """
    reading, synchronized = ClockReading(time.monotonic()), 1
    while synchronized < comm.size:
        if synchronized <= comm.rank < 2 * synchronized:
            reading = _ask_clock(comm, comm.rank - synchronized)
        elif comm.rank < synchronized and comm.rank + synchronized < comm.size:
            _answer_clock(comm, comm.rank + synchronized, reading)
        synchronized *= 2
    return reading


def _ask_clock(comm: Any, other: int) -> ClockReading:
    buffer, best = np.zeros(3), ClockReading(error_s=math.inf)
    for _ in range(_ANSWERS):
        began = time.monotonic()
        comm.Send(buffer, other)
        comm.Recv(buffer, other)
        ended = time.monotonic()
        other_time, other_offset, other_error = buffer.tolist()
        error = (ended - began) / 2 + other_error
        if error < best.error_s:
            middle = (began + ended) / 2
            best = ClockReading(middle, middle - other_time + other_offset, error)
    return best


def _answer_clock(comm: Any, other: int, reading: ClockReading) -> None:
    buffer = np.zeros(3)
    for _ in range(_ANSWERS):
        comm.Recv(buffer, other)
        buffer[:] = time.monotonic(), reading.offset_s, reading.error_s
        comm.Send(buffer, other)


class TraceFile:
    """A file that records what one rank does from now on.

    The threads in which events happen queue them; a separate thread writes them from time to time.
    If the disk is full, or the file too long, the trace ends and training continues. The
    communicator is duplicated, and the folder is created if it does not exist. The last operations
    are in a separate file at `flight_path`; see flight_file.

    Collective: yes. Blocking: yes.
    """

    def __init__(self, comm: Any, folder: str, node: int) -> None:
        self._comm = comm.Dup()
        self._rank, self._node = self._comm.rank, node
        # Functions that make events, with their arguments, so that recording is quick.
        self._events: deque[tuple[Any, ...]] = deque()
        self._left_out = 0
        self._written = 0
        self._lane_ends: list[float] = []
        self._threads: dict[int, int] = {threading.get_ident(): PROGRAM}
        # Held while writing; reentrant, because a signal handler may ask for a report.
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._start = compare_clocks(self._comm)
        new = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
        self._job: str
        self._zero_s: float
        self._job, self._zero_s = self._comm.bcast((new, time.monotonic()))
        self._folder = Path(os.path.abspath(os.path.expanduser(folder)))
        self.path = f"{self._path('trace')}.json"
        # fr_trace expects the name to end with the rank.
        self.flight_path = self._path("flight")
        self._file = self._open()
        self._write([*self._about(), *self._lane_name(STEPS, "training steps"),
                     *self._lane_name(PROGRAM, "program")])
        self._thread = threading.Thread(target=self._loop, name="mpiring trace", daemon=True)
        self._thread.start()

    def _open(self) -> int | None:
        """Return a new file; rank 0 logs a warning if ranks cannot create their files."""
        problem, file = "", None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = regular(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except OSError as error:
            problem = f"rank {self._rank} on {os.uname().nodename}: {error.strerror or error}"
        problems = [*filter(None, self._comm.allgather(problem))]
        if problems and self._rank == 0:
            _log.warning("%d of %d ranks cannot write a trace to %s, and continue without one: %s",
                         len(problems), self._comm.size, self._folder, problems[0])
        return file

    def _path(self, kind: str) -> str:
        return str(self._folder / f"{kind}-{self._job}-rank{self._rank:05d}")

    # Interface for a Recorder

    def operation(self, flight: Flight) -> None:
        """Record a complete operation."""
        self._add(self._operation, flight, flight.ended_s)

    def waited(self, flight: Flight, began_s: float, ended_s: float) -> None:
        """Record when a caller waited for an operation."""
        self._add(self._wait, flight, began_s, ended_s, threading.get_ident())

    def step(self, number: int, began_s: float, ready_s: Sequence[float], waited_s: float,
             ended_s: float, tokens: float | None) -> None:
        """Record a training step; see Recorder.end_step."""
        self._add(self._step, number, began_s, ready_s, waited_s, ended_s, tokens)

    def model(self, **about: Any) -> None:
        """Record the model that is trained from now on."""
        self._add(lambda: [self._metadata("model", about)])

    def span(self, name: str, category: str, began_s: float, ended_s: float, **about: Any) -> None:
        """Record any other activity of the rank."""
        self._add(self._span, name, category, began_s, ended_s, about, threading.get_ident())

    def incomplete(self, flights: Sequence[Flight]) -> None:
        """Record incomplete operations as if they ended now, and write all events so far."""
        now = time.monotonic()
        self.flush()
        with self._lock:
            self._write([event for flight in flights
                         for event in self._operation(flight, now, complete=False)])

    def close(self, *, together: bool) -> None:
        """Write the remaining events, and end the file; blocking.

        If `together`, all ranks call this, and compare their clocks again.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        reading = compare_clocks(self._comm) if together else None
        self.flush()
        if reading is not None:
            self._write([self._clock("clock at end", reading)])
            self._comm.Free()
        with self._lock:
            self._append("\n]\n")
            self._end_file()

    # Writing

    def _add(self, *event: Any) -> None:
        if len(self._events) < _MAX_EVENTS:
            self._events.append(event)
        else:
            self._left_out += 1

    def _loop(self) -> None:
        while not self._closing.wait(_PERIOD_S):
            self.flush()

    def flush(self) -> None:
        """Write the events so far."""
        with self._lock:
            events: list[Event] = []
            # Events that are added meanwhile are written next time.
            for _ in range(len(self._events)):
                make, *arguments = self._events.popleft()
                events += make(*arguments)
            if self._left_out:
                events.append(self._metadata("left out", {"events": self._left_out}))
                self._left_out = 0
            self._write(events)

    def _write(self, events: Sequence[Event]) -> None:
        lines = [_encode(event) for event in events]
        if lines:
            self._append(("" if self._written else "[\n") + ",\n" * bool(self._written)
                         + ",\n".join(lines))

    def _append(self, text: str) -> None:
        if self._file is None:
            return
        try:
            data = text.encode()
            while data:
                data = data[os.write(self._file, data):]
            self._written += len(text)
        except OSError as error:
            self._end_file(error.strerror or str(error))
            return
        if self._written > MAX_BYTES:
            self._end_file(f"it has {self._written >> 20} MB")

    def _end_file(self, problem: str = "") -> None:
        if problem:
            _log.warning("rank %d: the trace ends here; training continues: %s: %s",
                         self._rank, self.path, problem)
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None

    # Events

    def _about(self) -> list[Event]:
        """Return events that describe this rank."""
        host = os.uname().nodename
        return [
            self._metadata("process_name", {"name": f"rank {self._rank} on {host}"}),
            self._metadata("process_sort_index", {"sort_index": self._rank}),
            self._metadata("mpiring", {"job": self._job, "rank": self._rank,
                                       "size": self._comm.size, "node": self._node}),
            # Horovod's timelines also have this event.
            self._metadata("start", {"start_time_since_epoch_in_micros": time.time_ns() // 1000}),
            self._clock("clock at start", self._start)]

    def _metadata(self, name: str, about: dict[str, Any], **fields: Any) -> Event:
        return {"name": name, "ph": "M", "pid": self._rank, **fields, "args": about}

    def _lane_name(self, lane: int, name: str) -> list[Event]:
        return [self._metadata("thread_name", {"name": name}, tid=lane),
                self._metadata("thread_sort_index", {"sort_index": lane}, tid=lane)]

    def _clock(self, name: str, reading: ClockReading) -> Event:
        return self._metadata(name, {
            "at_us": self._us(reading.at_s), "offset_us": round(reading.offset_s * 1e6, 3),
            "error_us": round(reading.error_s * 1e6, 3)})

    def _us(self, seconds: float) -> float:
        """Convert a time of this rank's clock to µs of rank 0's clock since the trace began."""
        return round((seconds - self._start.offset_s - self._zero_s) * 1e6, 3)

    def _slice(self, lane: int, name: str, category: str, began_s: float, ended_s: float,
               **about: Any) -> Event:
        return {"name": name, "cat": category, "ph": "X", "pid": self._rank, "tid": lane,
                "ts": self._us(began_s), "dur": round((ended_s - began_s) * 1e6, 3),
                "args": about}

    def _operation(self, flight: Flight, ended_s: float, *, complete: bool = True) -> list[Event]:
        started = flight.started_s or ended_s
        lane, events = self._lane(started, ended_s)
        call = flight.call
        return [*events, self._slice(
            lane, _short(flight) + " (not complete)" * (not complete), "operation", started,
            ended_s, call=str(call), sequence=flight.sequence, group=flight.group,
            bytes=call.nbytes, algorithm=flight.algorithm, complete=complete,
            queued_us=round((started - flight.called_s) * 1e6, 3))]

    def _lane(self, started_s: float, ended_s: float) -> tuple[int, list[Event]]:
        """Return the first lane free since `started_s`, and the events that name a new one."""
        for index, end in enumerate(self._lane_ends):
            if end <= started_s:
                self._lane_ends[index] = ended_s
                return OPERATIONS + index, []
        self._lane_ends.append(ended_s)
        lane = OPERATIONS + len(self._lane_ends) - 1
        return lane, self._lane_name(lane, f"operations {len(self._lane_ends)}")

    def _wait(self, flight: Flight, began_s: float, ended_s: float, thread: int) -> list[Event]:
        about = {"sequence": flight.sequence, "group": flight.group}
        return self._span(f"wait for {_short(flight)}", "wait", began_s, ended_s, about, thread)

    def _span(self, name: str, category: str, began_s: float, ended_s: float,
              about: dict[str, Any], thread: int) -> list[Event]:
        lane, events = self._thread_lane(thread)
        return [*events, self._slice(lane, name, category, began_s, ended_s, **about)]

    def _thread_lane(self, thread: int) -> tuple[int, list[Event]]:
        """Return the lane of a thread of the program, and the events that name a new one."""
        if thread in self._threads:
            return self._threads[thread], []
        self._threads[thread] = lane = PROGRAM + len(self._threads)
        return lane, self._lane_name(lane, f"waits of thread {lane}")

    def _step(self, number: int, began_s: float, ready_s: Sequence[float], waited_s: float,
              ended_s: float, tokens: float | None) -> list[Event]:
        extra = {} if tokens is None else {"tokens": tokens}
        step = self._slice(
            STEPS, f"step {number}", "step", began_s, ended_s, step=number, **extra)
        first_s = min(ready_s, default=0.0)
        if not began_s < first_s < waited_s:
            return [step]
        each = {} if number > _DETAILED_STEPS else {
            "at_us": [round((at_s - first_s) * 1e6) for at_s in ready_s]}
        return [step, self._slice(
            STEPS, "gradients become ready", "ready", first_s, waited_s, **each)]


def _short(flight: Flight) -> str:
    """Return a name like "bucket 3", which is short enough for a picture."""
    return flight.call.label.partition(" (")[0] or flight.call.kind
