"""Finds out, when an operation stalls, which ranks wait in it and which never came."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable
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
            silent = "does not answer: it is stopped, or outside mpiring without a progress thread"
            lines.append(f"  rank {rank} {inquiry.answers.get(rank, silent)}")
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


def _print_at_once(text: str) -> None:
    # One write (print makes two), so that the launcher does not mix ranks' lines.
    sys.stderr.write(f"mpiring: {text}\n")
    sys.stderr.flush()
