"""Ends the job when a rank fails. If several ranks raise the same error, one of them reports it."""

import contextlib
import os
import signal
import sys
import textwrap
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

# Exit status of a process that Ctrl-C ended, by the convention of shells.
_INTERRUPTED = 130
# Time for the launcher to forward output. When a rank ends with an error, launchers kill the job
# at once and drop the rest.
FORWARD_S = 0.3
# Number of last operations in the report of a failed rank.
_LAST_OPERATIONS = 4
# Maximum length of the line about an error that another rank has reported, in characters.
_LINE_LENGTH = 300
# Ranks that fail within this time of each other agree on which rank failed first.
_TOGETHER_S = 0.05
# Seconds in which the first rank must print its report; otherwise the others print theirs.
_PRINT_S = 5.0
_PAUSE_S = 0.01
# One rank reports errors that several ranks raise at once. The others print nothing, unless the
# job is still running after this time.
_COMMON = (MpiringError, KeyboardInterrupt)
_QUIET_S = 2.0
# Nodes report one after another, the node of rank 0 first.
_TURN_S, _TURNS = 0.4, 8
# Beginnings of the files whose frames do not belong to the program.
_INTERNAL = f"{Path(__file__).parents[1]}{os.sep}", contextlib.__file__


class FirstReport:
    """Chooses the rank of a node that reports an error: the first one that fails.

    The ranks communicate in node-shared memory, without messages.

    Args:
        words: Function that returns the words of each rank in the node memory; None after the
            memory has been freed.
        rank: Number of this rank in the node memory.
    """

    def __init__(self, words: Callable[[], Sequence[memoryview] | None], rank: int) -> None:
        self._words, self._rank = words, rank

    def is_due(self, error: BaseException) -> bool:
        """Return whether this rank should report an error in full.

        If another rank failed earlier with the same type of error, wait for its report. Return True
        only if this report does not arrive in time.

        Collective: no. Blocking: for 0.05 s, or up to 5 s if another rank failed first.
        """
        words = self._words()
        if words is None:
            return True
        kind = zlib.crc32(type(error).__qualname__.encode())
        words[self._rank][REPORT_KIND] = kind
        words[self._rank][REPORT_FAILED] = time.monotonic_ns()
        time.sleep(_TOGETHER_S)
        _, first = min((of_rank[REPORT_FAILED], rank) for rank, of_rank in enumerate(words)
                       if of_rank[REPORT_FAILED] and of_rank[REPORT_KIND] == kind)
        deadline = time.monotonic() + _PRINT_S
        while first != self._rank and not words[first][REPORT_PRINTED]:
            if time.monotonic() > deadline:
                # The first rank was probably killed, and every error needs a report.
                return True
            time.sleep(_PAUSE_S)
        return first == self._rank

    def printed(self) -> None:
        """Tell the other ranks that this rank has printed its report."""
        words = self._words()
        if words is not None:
            words[self._rank][REPORT_PRINTED] = 1


class JobEnder:
    """Prints an error with its rank, and ends the MPI job on all ranks.

    Args:
        rank, size: Number of this rank and number of ranks, for messages.
        abort: Function that ends the job with an exit status, such as MPI_Abort.
        report: Function that saves the last operations of this rank and returns a text about some
            of them. Its argument is the number of operations.
        report_peers: Function that lets the other ranks save their last operations, and returns
            lines about some of them.
        in_full: If true, each rank prints its complete traceback.

    Attributes:
        first: Chooses the rank of this node that reports in full; None if every rank does.
        turn: Number of this rank's node memory, counted from the memory of rank 0. Ranks with a
            larger number wait longer before they report an error that several ranks raise.
    """

    def __init__(self, rank: int, size: int, abort: Callable[[int], None],
                 report: Callable[[int], str], report_peers: Callable[[], str], *,
                 in_full: bool = False) -> None:
        self._report, self._report_peers = report, report_peers
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
            # Save the last operations, even if this rank prints nothing.
            self._report(0)
        if self._in_full:
            self.end(error, "".join(traceback.format_exception(error)))
            return
        if (isinstance(error, KeyboardInterrupt)
                and threading.current_thread() is threading.main_thread()):
            # Terminals and launchers send several interrupts. The next one would stop the report.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        is_due = True
        with contextlib.suppress(Exception):
            is_due = self.first is None or self.first.is_due(error)
        if isinstance(error, _COMMON) and (self.turn or not is_due):
            # Another rank should report and end the job during this time.
            time.sleep(_QUIET_S + self.turn % _TURNS * _TURN_S)
        if is_due:
            self.end(error, _traceback_of(error))
        else:
            line = str(error).partition("\n")[0][:_LINE_LENGTH]
            _print(f"mpiring: {self._where} failed with {type(error).__name__}: {line}")
            self._end(error)

    def end(self, error: BaseException, text: str = "") -> None:
        """Print `text` and the last operations of all ranks; end the job because of `error`."""
        try:
            _print(f"{text}{self._last_operations(error)}")
            # The job must end even if a report fails.
            with contextlib.suppress(Exception):
                if not _names_operations(error) and (peers := self._report_peers()):
                    _print(f"mpiring: the other ranks:\n{textwrap.indent(peers, '  ')}")
        finally:
            self._end(error)

    def _end(self, error: BaseException) -> None:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        with contextlib.suppress(Exception):
            if self.first is not None:
                self.first.printed()
        time.sleep(FORWARD_S)
        code = _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        self._abort(code)
        # MPICH's MPI_Abort may return, but this process must not continue.
        os._exit(code)

    def _last_operations(self, error: BaseException) -> str:
        report = ""
        # The job must end even if the report fails.
        with contextlib.suppress(Exception):
            report = self._report(0 if _names_operations(error) else _LAST_OPERATIONS)
        end = f"mpiring: {self._where} failed with {type(error).__name__}: the job ends"
        if isinstance(error, (ConnectionError, EOFError)):
            end += (". If a data loader or a pool has raised it, one of their processes has died, "
                    "for example for lack of memory: see the kernel's messages (dmesg)")
        if isinstance(error, _COMMON) and not self._in_full:
            end += ". For the complete tracebacks of all ranks, set MPIRING_FULL_TRACEBACKS=1."
        return f"{report}\n{end}" if report else end


def _names_operations(error: BaseException) -> bool:
    """Return whether an error's message has the last operations of all ranks that matter."""
    return isinstance(error, StallError) and "the last operations of" in str(error)


def _print(text: str) -> None:
    """Print to standard error, unless this fails, as on a full disk."""
    # PyTorch, after init_process_group, replaces stderr while its excepthook runs. It would not
    # print the collected text, because this process ends before.
    is_replaced = sys.stderr is not sys.__stderr__
    for stream in (sys.stderr, sys.__stderr__) if is_replaced else (sys.stderr,):
        with contextlib.suppress(Exception):
            # One write, so that the launcher does not mix lines of different ranks. (`print`
            # writes twice.)
            stream.write(f"{text}\n")  # type: ignore[union-attr]
            stream.flush()  # type: ignore[union-attr]


def _traceback_of(error: BaseException) -> str:
    """Return the traceback of an error.

    An mpiring error explains the problem in its message. Its traceback has only the frames of the
    program, and so has the traceback of a KeyboardInterrupt.
    """
    summary = traceback.TracebackException.from_exception(error, compact=True)
    remark = ""
    if isinstance(error, _COMMON):
        all_frames = summary.stack
        _remove_frames(summary)
        if not summary.stack and threading.current_thread() is not threading.main_thread():
            remark = "An operation in the background failed. The main thread is here:\n"
            main = sys._current_frames()[threading.main_thread().ident or 0]
            summary.stack = _of_program(traceback.extract_stack(main))
        summary.stack = summary.stack or all_frames
    return remark + "".join(summary.format())


def _remove_frames(summary: traceback.TracebackException) -> None:
    """Remove the frames that are not the program's, and the causes that have no other frames."""
    summary.stack = _of_program(summary.stack)
    for name in ("__cause__", "__context__"):
        cause = getattr(summary, name)
        if cause is not None:
            _remove_frames(cause)
            if not cause.stack:
                setattr(summary, name, None)


def _of_program(frames: traceback.StackSummary) -> traceback.StackSummary:
    return traceback.StackSummary.from_list(
        [frame for frame in frames if not frame.filename.startswith(_INTERNAL)])


class _Hook:
    """An excepthook that prints the traceback and ends the job."""

    def __init__(self, choose: Callable[[], JobEnder | None]) -> None:
        self._choose = choose
        self._previous = sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException,
                 trace: TracebackType | None) -> None:
        # No rank waits for a fork, so the job continues.
        ender = None if forks.in_fork else self._choose()
        if ender is None:
            self._previous(kind, error, trace)
            return
        if self._previous is sys.__excepthook__:
            ender(error)
        try:
            self._previous(kind, error, trace)
        finally:
            ender.end(error)


def end_job_on_exceptions(choose: Callable[[], JobEnder | None]) -> None:
    """Make an uncaught exception of this process end the job.

    Otherwise MPI_Finalize would wait for the other ranks, which wait for this one.

    Args:
        choose: Function that returns the ender of the group that reports; None if no group does.
    """
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(choose)
