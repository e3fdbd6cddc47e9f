"""Ends the job when a rank fails, and lets one rank of the job report what several raise."""

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from ..errors import MpiringError, StallError
from ..transport.layout import REPORT_FAILED, REPORT_KIND, REPORT_PRINTED
from . import forks

# The exit status of a process that Ctrl-C ended, by the convention of shells.
_INTERRUPTED = 130
# Launchers kill at once, and drop output that they have not yet forwarded.
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
# Errors that several ranks raise at once: one rank reports them. The others print nothing, unless
# the job has not ended after this time.
_COMMON = (MpiringError, KeyboardInterrupt)
_QUIET_S = 2.0
# Of ranks that share no memory, those of rank 0's node report first, then one node after another.
_TURN_S, _TURNS = 0.4, 8
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


class FirstReport:
    """The report of the first rank of a node that fails, told to the others without messages.

    Args:
        words: Returns the node memory's words per rank of the node; None once it is given back.
        rank: This rank among them.
    """

    def __init__(self, words: Callable[[], Sequence[memoryview] | None], rank: int) -> None:
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
        abort: Function that ends the job with an exit status, such as MPI_Abort.
        report: Function that returns lines about this number of last operations of this rank, and
            saves them.
        in_full: If true, each rank prints its whole traceback.

    Attributes:
        first: Answers whether this rank reports in full; None if it always does.
        turn: Number of this rank's node memory, from that of rank 0 on. Ranks of later turns wait
            longer before they report what several ranks raise.
    """

    def __init__(self, rank: int, size: int, abort: Callable[[int], None],
                 report: Callable[[int], str], *, in_full: bool = False) -> None:
        self._report = report
        self._where = f"rank {rank} of {size} on {os.uname().nodename}"
        self._abort = abort
        self._in_full = in_full
        self.first: FirstReport | None = None
        self.turn = rank

    def __call__(self, error: BaseException) -> None:
        """Print the traceback of `error` and end the job.

        If another rank has printed the same kind of error, this rank prints one line or nothing.
        """
        with contextlib.suppress(Exception):
            # A rank that prints nothing also saves its last operations.
            self._report(0)
        if self._in_full:
            self.end(error, "".join(traceback.format_exception(error)))
            return
        if (isinstance(error, KeyboardInterrupt)
                and threading.current_thread() is threading.main_thread()):
            # Terminals and launchers send several, and a second one would end the report.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        is_due = True
        with contextlib.suppress(Exception):
            is_due = self.first is None or self.first.is_due(error)
        if isinstance(error, _COMMON) and (self.turn or not is_due):
            # Another rank reports, and ends the job meanwhile.
            time.sleep(_QUIET_S + self.turn % _TURNS * _TURN_S)
        if is_due:
            self.end(error, _traceback_of(error))
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
        # MPICH's MPI_Abort may return, and this process must do nothing more.
        os._exit(code)

    def _last_words(self, error: BaseException) -> str:
        report = ""
        # Nothing that goes wrong here may keep the job from ending.
        with contextlib.suppress(Exception):
            # A StallError shows the last operations itself.
            report = self._report(0 if isinstance(error, StallError) else _LAST)
        end = f"mpiring: {self._where} failed with {type(error).__name__}: the job ends"
        if isinstance(error, _COMMON) and not self._in_full:
            end += ". For the complete tracebacks of all ranks, set MPIRING_FULL_TRACEBACKS=1."
        return f"{report}\n{end}" if report else end


def _traceback_of(error: BaseException) -> str:
    """Return the traceback of an error.

    mpiring errors say what is wrong. Their tracebacks, and that of Ctrl-C, have only the frames
    of the program.
    """
    summary = traceback.TracebackException.from_exception(error, compact=True)
    remark = ""
    if isinstance(error, _COMMON):
        all_frames = summary.stack
        _leave_out_frames(summary)
        if not summary.stack and threading.current_thread() is not threading.main_thread():
            remark = "An operation in the background failed. The main thread is here:\n"
            main = sys._current_frames()[threading.main_thread().ident or 0]
            summary.stack = _of_program(traceback.extract_stack(main))
        summary.stack = summary.stack or all_frames
    return remark + "".join(summary.format())


def _leave_out_frames(summary: traceback.TracebackException) -> None:
    """Remove the frames of mpiring, also of the causes, and the causes that have no others."""
    summary.stack = _of_program(summary.stack)
    for name in ("__cause__", "__context__"):
        cause = getattr(summary, name)
        if cause is not None:
            _leave_out_frames(cause)
            if not cause.stack:
                setattr(summary, name, None)


def _of_program(frames: traceback.StackSummary) -> traceback.StackSummary:
    return traceback.StackSummary.from_list(
        [frame for frame in frames if not frame.filename.startswith(_PACKAGE)])


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
