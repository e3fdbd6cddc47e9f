"""Finds out, when an operation stalls, which ranks wait in it and which never came."""

import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..config import Config
from ..errors import StallError
from ..record.recorder import Flight, Recorder
from .handle import Handle

# How long a stalled rank waits for the others' answers before it reports.
_ANSWER_S = 1.0
# A report tells of so many operations before the one that stalls, on so many ranks: this one,
# and the first of those that have not called it.
_LAST, _RANKS = 4, 4
_SILENT = "does not answer: it is stopped, or outside mpiring without a progress thread"


class Post(Protocol):
    """Short messages between any two ranks; see transport.mpi.Mailbox."""

    def post(self, dest: int, message: bytes) -> None:
        """Send a message, without waiting for anybody."""

    def poll(self) -> list[tuple[int, bytes]]:
        """Return the messages that have arrived, each with its source."""


class StallWatch:
    """Keeps the position of one rank in one communicator, and asks for that of the others.

    Args:
        rank, size: This rank, and how many there are.
        post: The control messages.
        config: `stall_warning_s` and `stall_timeout_s`.
        recorder: Knows what this rank did before.
        say: Where a report goes; standard error by default.

    Attributes:
        config: As above; may be replaced.
        last: What this rank called last. Not its handle: that would keep the user's array alive.
    """

    def __init__(self, rank: int, size: int, post: Post, config: Config, recorder: Recorder,
                 say: Callable[[str], None] | None = None) -> None:
        self._rank, self._size = rank, size
        self._post = post
        self._recorder = recorder
        self.config = config
        self._say = say or _print_at_once
        self._unfinished: list[Handle[Any]] = []
        self._lock = threading.Lock()    # the caller enters, the engine's thread looks
        self.last: Flight | None = None
        self._inquiry: _Inquiry | None = None
        self._patient = False

    def enter(self, handle: Handle[Any], *, patient: bool = False) -> None:
        """Watch an operation; a `patient` one, the rank's last, may wait for ever."""
        with self._lock:
            # Complete ones would keep their results alive.
            self._unfinished = [other for other in self._unfinished if not other.done] + [handle]
        self._patient = patient

    def unfinished(self) -> list[Handle[Any]]:
        """Return the operations that this rank called and that are not complete."""
        with self._lock:
            self._unfinished = [handle for handle in self._unfinished if not handle.done]
            return list(self._unfinished)

    def look(self) -> None:
        """Answer the others; ask them, report, or raise when the oldest operation stalls.

        Raises:
            StallError: After `stall_timeout_s`; holds the report.
        """
        for source, message in self._post.poll():
            self._read(source, json.loads(message))
        oldest = next(iter(self.unfinished()), None)
        if oldest is None:
            self._inquiry = None
            return
        warning_s, timeout_s = self.config.stall_warning_s, self._timeout_s
        if self._inquiry is None or self._inquiry.is_over(oldest):
            self._inquiry = _Inquiry(oldest)
        inquiry = self._inquiry
        if timeout_s and oldest.waited_s >= timeout_s:
            if self._have_answers(inquiry, "timeout"):
                raise StallError(self._report(inquiry, ": Timed out after"))
        elif warning_s and oldest.waited_s >= warning_s and not inquiry.reported:
            if self._have_answers(inquiry, "warning"):
                inquiry.reported = True
                # One report is enough: the lowest of the ranks that wait prints it.
                if not any(rank < self._rank for rank in inquiry.waiting):
                    self._say(self._report(inquiry, " has waited"))

    @property
    def _timeout_s(self) -> float:
        """Seconds that an operation may stall; 0 for ever."""
        return 0.0 if self._patient else self.config.stall_timeout_s

    def _have_answers(self, inquiry: "_Inquiry", purpose: str) -> bool:
        """Ask all ranks once per purpose; return whether they answered, or had time to."""
        if inquiry.purpose != purpose:
            inquiry.ask_anew(purpose)
            question = json.dumps({"ask": inquiry.handle.flight.sequence}).encode()
            for rank in self._others():
                self._post.post(rank, question)
        return (len(inquiry.answers) == self._size - 1
                or time.monotonic() - inquiry.asked_s > _ANSWER_S)

    def _others(self) -> Iterable[int]:
        return (rank for rank in range(self._size) if rank != self._rank)

    def _read(self, source: int, message: dict[str, Any]) -> None:
        if "ask" in message:
            text, waits = self._position(message["ask"])
            answer = {"sequence": message["ask"], "text": text, "waits": waits,
                      "last": self._recorder.report(_LAST)}
            self._post.post(source, json.dumps(answer).encode())
        elif self._inquiry and self._inquiry.handle.flight.sequence == message["sequence"]:
            self._inquiry.answers[source] = message["text"]
            self._inquiry.last[source] = message["last"]
            if message["waits"]:
                self._inquiry.waiting.add(source)

    def _position(self, sequence: int) -> tuple[str, bool]:
        """Say where this rank stands with an operation, and whether it waits in it."""
        unfinished = self.unfinished()
        for handle in unfinished:
            if handle.flight.sequence == sequence and handle.started:
                return f"waits in it too, since {handle.waited_s:.0f} s", True
            if handle.flight.sequence == sequence:
                return f"has it queued behind {unfinished[0]}", False
        if self.last is None:
            return "has not called it, nor anything else", False
        if self.last.sequence >= sequence:
            return "has finished it", False
        ago = time.monotonic() - self.last.called_s
        return f"has NOT CALLED it; its last call was {self.last}, {ago:.0f} s ago", False

    def _report(self, inquiry: "_Inquiry", what: str) -> str:
        handle = inquiry.handle
        lines = [f"rank {self._rank}{what} {handle.waited_s:.0f} s in {handle}"]
        for rank in self._others():
            lines.append(f"  rank {rank} {inquiry.answers.get(rank, _SILENT)}")
        lines.append(
            f"  the limit is stall_timeout_s={self._timeout_s:g} (MPIRING_STALL_TIMEOUT_S)"
            if self._timeout_s else "  it waits for ever")
        missing = [rank for rank in inquiry.last if rank not in inquiry.waiting]
        told = [self._recorder.report(_LAST), *(
            inquiry.last[rank] for rank in sorted(missing)[:_RANKS - 1])]
        return "\n".join(lines + [
            f"  {line}" for text in told for line in text.splitlines()])


class _Inquiry:
    """What the other ranks said about one stalled operation."""

    def __init__(self, handle: Handle[Any]) -> None:
        self.handle = handle
        self.reported = False
        self.purpose = ""
        self.asked_s = 0.0
        self.answers: dict[int, str] = {}
        self.last: dict[int, str] = {}
        self.waiting: set[int] = set()

    def is_over(self, oldest: Handle[Any]) -> bool:
        """Return whether another operation is the oldest by now."""
        return self.handle is not oldest

    def ask_anew(self, purpose: str) -> None:
        """Forget earlier answers."""
        self.purpose = purpose
        self.asked_s = time.monotonic()
        self.answers.clear()
        self.last.clear()
        self.waiting.clear()


class HasConfig(Protocol):
    """Whatever holds the settings that are valid now."""

    config: Config


class MessageWatch:
    """Reports messages that a caller has waited for long, with what the other end is doing.

    Args:
        rank, size, post, recorder, say: As for StallWatch.
        settings: `config.stall_warning_s` of it.
    """

    def __init__(self, rank: int, size: int, post: Post, settings: HasConfig, recorder: Recorder,
                 say: Callable[[str], None] | None = None) -> None:
        self._rank, self._size = rank, size
        self._post = post
        self._settings = settings
        self._recorder = recorder
        self._say = say or _print_at_once
        # Without a lock: additions and removals are atomic, and forks may look at any time.
        self._waits: dict[int, _Wait] = {}

    @contextmanager
    def waiting(self, handle: Handle[Any], other: int | None,
                limit_s: float) -> Iterator[Callable[[], list[str]]]:
        """Watch a message while a caller waits for it; yield what returns the report's lines.

        Args:
            other: The rank at its other end; None for any.
            limit_s: When the caller gives up; 0 for never.
        """
        warning_s = self._settings.config.stall_warning_s
        # By the end of the wait the answers must be there.
        ask_s = min([s for s in (warning_s, limit_s / 2) if s], default=math.inf)
        peers = [rank for rank in (range(self._size) if other is None else [other])
                 if rank != self._rank]
        wait = self._waits[id(handle)] = _Wait(
            handle, peers, ask_s, warning_s or math.inf, time.monotonic())
        try:
            yield lambda: self._lines(wait)
        finally:
            del self._waits[id(handle)]

    def look(self) -> None:
        """Answer the others; ask them about messages that are late, and report these."""
        for source, content in self._post.poll():
            message = json.loads(content)
            if "ask" in message:
                answer = {"answer": message["ask"], "text": self._position()}
                self._post.post(source, json.dumps(answer).encode())
            elif message["answer"] in self._waits:
                self._waits[message["answer"]].answers[source] = message["text"]
        for number, wait in tuple(self._waits.items()):
            now, waited_s = time.monotonic(), time.monotonic() - wait.began_s
            if not wait.asked_s and waited_s >= wait.ask_s:
                wait.asked_s = now
                for rank in wait.peers:
                    self._post.post(rank, json.dumps({"ask": number}).encode())
            complete = len(wait.answers) == len(wait.peers) or now - wait.asked_s > _ANSWER_S
            if waited_s >= wait.warning_s and complete:
                wait.warning_s = math.inf
                self._say("\n".join([
                    f"rank {self._rank} has waited {waited_s:.0f} s in {wait.handle}",
                    *self._lines(wait)]))

    def _position(self) -> str:
        """Return what this rank's callers wait for, and its last operations."""
        waits = [f"{wait.handle}, since {time.monotonic() - wait.began_s:.0f} s"
                 for wait in tuple(self._waits.values())]
        return "\n".join([f"waits for {'; '.join(waits) or 'no message'}",
                          *self._recorder.report(_LAST).splitlines()])

    def _lines(self, wait: "_Wait") -> list[str]:
        late = time.monotonic() - wait.asked_s > _ANSWER_S
        missing = _SILENT if wait.asked_s and late else "has not answered yet"
        lines = [line for rank in wait.peers[:_RANKS]
                 for line in f"rank {rank} {wait.answers.get(rank, missing)}".splitlines()]
        return [f"  {line}" for line in lines + self._recorder.report(_LAST).splitlines()]


@dataclass
class _Wait:
    """A caller's wait for a message."""

    handle: Handle[Any]
    peers: list[int]
    ask_s: float
    warning_s: float
    began_s: float
    asked_s: float = 0.0
    answers: dict[int, str] = field(default_factory=dict)


def _print_at_once(text: str) -> None:
    # One write (print makes two), so that the launcher does not mix ranks' lines.
    sys.stderr.write(f"mpiring: {text}\n")
    sys.stderr.flush()
