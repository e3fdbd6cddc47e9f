"""Ends the job when a rank fails, and lets one rank of a node report what several raise."""

import contextlib
import os
import socket
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from ..errors import StallError
from ..transport.layout import REPORT_FAILED, REPORT_KIND, REPORT_PRINTED
from . import forks

# The exit status of a process that Ctrl-C ended, by the convention of shells.
_INTERRUPTED = 130
# Launchers kill at once, and were seen to drop output that they had not yet forwarded.
FORWARD_S = 0.3
# The last words of a rank show this many operations.
_LAST = 4
# Of an error that another rank has reported, so many characters are printed.
_LINE = 300
# So much later than the first rank the others may fail, and still find that it is the first.
_TOGETHER_S = 0.05
# How long the others give it to print, before they do.
_PRINT_S = 5.0
_PAUSE_S = 0.01

# Per rank, numbers that can be set.
Words = Sequence[Any]

Abort = Callable[[int], None]


class FirstReport:
    """The report of the first rank of a node that fails, told to the others without messages.

    Args:
        words: Returns the node memory's words per rank of the node; None once it is given back.
        rank: This rank among them.
    """

    def __init__(self, words: Callable[[], Words | None], rank: int) -> None:
        self._words, self._rank = words, rank

    def is_due(self, error: BaseException) -> bool:
        """Return whether this rank is to report an error in full.

        If another rank has failed before with such an error, return False once it has reported.

        Collective: no. Blocking: for 0.05 s, or 5 s at most.
        """
        words = self._words()
        if words is None:
            return True
        kind = zlib.crc32(type(error).__qualname__.encode())
        words[self._rank][REPORT_KIND] = kind
        words[self._rank][REPORT_FAILED] = time.monotonic_ns()
        time.sleep(_TOGETHER_S)
        _, first = min((its[REPORT_FAILED], rank) for rank, its in enumerate(words)
                       if its[REPORT_FAILED] and its[REPORT_KIND] == kind)
        deadline = time.monotonic() + _PRINT_S
        while first != self._rank and not words[first][REPORT_PRINTED]:
            if time.monotonic() > deadline:
                # It has been killed meanwhile: no error may go without a report.
                return True
            time.sleep(_PAUSE_S)
        return first == self._rank

    def printed(self) -> None:
        """Tell the others that this rank has reported."""
        words = self._words()
        if words is not None:
            words[self._rank][REPORT_PRINTED] = 1


class JobEnder:
    """Prints an error with its rank, and ends the whole MPI job.

    Args:
        rank, size: Printed, so that the rank is found among many.
        abort: MPI_Abort; takes the exit status.
        report: Returns lines about this number of last operations of this rank.

    Attributes:
        first: Asked whether this rank reports in full; None: it does.
    """

    def __init__(self, rank: int, size: int, abort: Abort,
                 report: Callable[[int], str] = lambda last: "") -> None:
        self._report = report
        self._where = f"rank {rank} of {size} on {socket.gethostname()}"
        self._abort = abort
        self.first: FirstReport | None = None

    def __call__(self, error: BaseException) -> None:
        """Print the traceback of `error` and end the job.

        If another rank of the node has, a line will do: all of them raise the same.
        """
        is_due = True
        with contextlib.suppress(Exception):
            is_due = self.first is None or self.first.is_due(error)
        if is_due:
            self.end(error, "".join(traceback.format_exception(error)))
        else:
            line = str(error).partition("\n")[0][:_LINE]
            self._end(error, f"mpiring: {self._where} failed with {type(error).__name__}: {line}")

    def end(self, error: BaseException, text: str = "") -> None:
        """Print `text` and last words, and end the job because of `error`."""
        self._end(error, f"{text}{self._last_words(error)}")

    def _end(self, error: BaseException, text: str) -> None:
        # A program that wraps the excepthook may hold back what it prints, as PyTorch does after
        # init_process_group, and would never come to show it.
        held_back = sys.stderr is not sys.__stderr__
        for stream in (sys.stderr, sys.__stderr__) if held_back else (sys.stderr,):
            # Also where nothing can be printed, as on a full disk, the other ranks must end.
            with contextlib.suppress(Exception):
                # One write (print makes two), so that the launcher does not mix ranks' lines.
                stream.write(f"{text}\n")  # type: ignore[union-attr]
                stream.flush()  # type: ignore[union-attr]
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        with contextlib.suppress(Exception):
            if self.first is not None:
                self.first.printed()
        time.sleep(FORWARD_S)
        code = _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        self._abort(code)
        # MPICH's MPI_Abort was seen to return, and this process must do nothing more.
        os._exit(code)

    def _last_words(self, error: BaseException) -> str:
        report = ""
        # Nothing that goes wrong here may keep the job from ending.
        with contextlib.suppress(Exception):
            # A StallError shows the last operations itself.
            report = self._report(0 if isinstance(error, StallError) else _LAST)
        end = f"mpiring: {self._where} failed with {type(error).__name__}: the job ends"
        return f"{report}\n{end}" if report else end


class _Hook:
    """An excepthook that ends the job after the traceback is printed."""

    def __init__(self, ender: JobEnder) -> None:
        self._ender = ender
        self._previous = sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException,
                 trace: TracebackType | None) -> None:
        if forks.in_fork:
            # No rank waits for it: it ends alone.
            self._previous(kind, error, trace)
            return
        if self._previous is sys.__excepthook__:
            self._ender(error)
        try:
            self._previous(kind, error, trace)
        finally:
            self._ender.end(error)


def end_job_on_exceptions(ender: JobEnder) -> None:
    """Make an uncaught exception of this process end the job.

    Otherwise MPI_Finalize would wait for the other ranks, which wait for this one.
    """
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(ender)
