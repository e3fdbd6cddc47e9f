"""Asks other ranks what they are doing, and answers them."""

import contextlib
import functools
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import MpiringError
from ..record.flight import operations_in
from ..text import ranks_text
from ..transport import waiting

if TYPE_CHECKING:
    from ..transport.mpi import Mailbox

# A report shows this many operations per rank, of this many ranks.
MAX_CALLS, MAX_RANKS = 4, 4
# Number of the question of a rank that ends the job. Other questions have the number of an
# operation or of a message.
_AT_END = -1
_PAUSE_S = 0.01


class Watch(ABC):
    """Exchanges questions and answers with the other ranks of a group.

    Callers hold the engine's lock.

    Args:
        rank: Number of this rank.
        mailbox: Mailbox for questions and answers.
        report: Function that saves this rank's last operations and returns a text about some of
            them. Its argument is the number of operations.

    Attributes:
        rank: The argument of the same name.
        at_end: For each rank that was asked at the end of the job, its process and its report;
            None before it answers.
    """

    def __init__(self, rank: int, mailbox: "Mailbox", report: Callable[[int], str]) -> None:
        self.rank = rank
        self.at_end: dict[int, tuple[str, str] | None] = {}
        self._mailbox = mailbox
        self._last_operations = report

    @property
    def ranks(self) -> Sequence[int]:
        """Ranks to ask at the end of the job, as numbered in the engine's first group."""
        return ()

    @abstractmethod
    def check(self) -> None:
        """Answer other ranks; ask them about late operations, and report these operations."""

    @abstractmethod
    def _position(self, number: int) -> tuple[str, bool]:
        """Return how far this rank is with the subject of a question, and whether it waits."""

    @abstractmethod
    def _receive(self, source: int, answer: dict[str, Any]) -> None:
        """Store an answer of another rank."""

    def answer(self, *, failed: bool = False) -> None:
        """Answer other ranks, and store their answers.

        Args:
            failed: If true, answer only ranks that end the job. Ranks that wait for this rank must
                not remain patient.
        """
        for source, content in self._mailbox.poll():
            message = json.loads(content)
            if message.get("answer") == _AT_END:
                self.at_end[source] = message["process"], message["last"]
            elif "answer" in message:
                self._receive(source, message)
            elif not failed or message["ask"] == _AT_END:
                text, waits = self._position(message["ask"])
                self._post(source, {
                    "answer": message["ask"], "text": text, "waits": waits,
                    "last": self._last_operations(MAX_CALLS), "process": _process()})

    def ask(self, number: int, ranks: Iterable[int]) -> None:
        """Ask other ranks about an operation or a message."""
        for rank in ranks:
            self._post(rank, {"ask": number})

    def hear_at_end(self, ranks: Iterable[int]) -> bool:
        """Ask other ranks once to save and send their last operations; return whether all have."""
        if not self.at_end:
            self.at_end = dict.fromkeys(ranks)
            for rank in ranks:
                # It may have died.
                with contextlib.suppress(MpiringError):
                    self.ask(_AT_END, [rank])
        self.answer()
        return None not in self.at_end.values()

    def _post(self, rank: int, message: dict[str, Any]) -> None:
        self._mailbox.post(rank, json.dumps(message).encode())


@functools.cache
def _process() -> str:
    return os.urandom(8).hex()


def report_peers(engines: Iterable[tuple[Any, Sequence[Watch]]]) -> str:
    """Let all other ranks save their last operations; return lines about some of these operations.

    Args:
        engines: Lock and watches of each engine.

    Collective: no. Blocking: until all have answered, but for at most 1 s.
    """
    asked = [(lock, watch, ranks) for lock, watches in engines
             for watch, ranks in _ranks_to_ask(watches)]
    left, deadline_s = list(asked), time.monotonic() + waiting.ANSWER_S
    while left and time.monotonic() < deadline_s:
        for each in tuple(left):
            lock, watch, ranks = each
            if lock.acquire(timeout=_PAUSE_S):
                try:
                    if watch.hear_at_end(ranks):
                        left.remove(each)
                except MpiringError:
                    # A rank has died. MPI then no longer tells which messages have arrived.
                    left.remove(each)
                finally:
                    lock.release()
        time.sleep(_PAUSE_S)
    # A rank that shares several engines with this one has answered in each.
    answers: dict[str, tuple[int, str]] = {}
    silent = set()
    for _, watch, ranks in asked:
        for rank in ranks:
            answer = watch.at_end.get(rank)
            if answer is None:
                silent.add(watch.ranks[rank])
            else:
                answers.setdefault(answer[0], (watch.ranks[rank], answer[1]))
    return "\n".join(_lines(sorted(answers.values()), sorted(silent)))


def _ranks_to_ask(watches: Iterable[Watch]) -> Iterator[tuple[Watch, list[int]]]:
    """Yield each watch, and the ranks of its group that are in no earlier group."""
    known: set[int] = set()
    for watch in watches:
        ranks = [rank for rank, number in enumerate(watch.ranks)
                 if rank != watch.rank and number not in known]
        known.update(watch.ranks)
        if ranks:
            yield watch, ranks


def _lines(reports: Iterable[tuple[int, str]], silent: Sequence[int]) -> Iterator[str]:
    """Yield lines about ranks; ranks with equal operations share a report."""
    groups: dict[tuple[Any, ...], list[tuple[int, str]]] = {}
    for rank, text in reports:
        groups.setdefault(tuple(operations_in(text)), []).append((rank, text))
    shown = [*groups.values()]
    for (rank, text), *others in shown[:MAX_RANKS]:
        yield from text.splitlines() or [f"rank {rank} has called nothing"]
        if others:
            yield f"{ranks_text([rank for rank, _ in others])}: the same operations"
    if more := [rank for same in shown[MAX_RANKS:] for rank, _ in same]:
        yield f"{ranks_text(more)}: other operations"
    if silent:
        yield (f"{ranks_text(silent)}: no answer within {waiting.ANSWER_S:g} s; stopped, "
               f"failing, or outside mpiring without a progress thread")
