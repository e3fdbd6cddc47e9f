"""Opens the outputs of a command: files, and standard output, whose reader may go away."""

import contextlib
import errno
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any, TextIO, TypeVar, cast

from .. import ConfigError, MpiringError
from ..provisional import launch
from .arguments import UsageError, outlive_message

# Options with the name of a file; one of them may be "-", for standard output.
_OPTIONS = ("json", "csv", "output")
_FORWARD_S = 0.2

T = TypeVar("T")
# A path, or an open stream such as standard output.
Target = str | os.PathLike[str] | TextIO


class OutputError(Exception):
    """Standard output cannot be written to."""


class Output:
    """Standard output whose errors are OutputError, unlike the errors of files."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __str__(self) -> str:
        return "standard output"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a string; raise OutputError if the disk is full or the pipe is closed."""
        # A name of a file may have bytes that are not in the encoding.
        encoding = self._stream.encoding or "utf-8"
        encoded = text.encode(encoding, "backslashreplace").decode(encoding)
        return _unless_lost(lambda: self._stream.write(encoded))

    def flush(self) -> None:
        """Flush the stream; raise OutputError as `write` does."""
        _unless_lost(self._stream.flush)


def _unless_lost(action: Callable[[], T]) -> T:
    try:
        return action()
    except OSError as exc:
        raise OutputError from exc


def run(parse: Callable[[], Namespace]) -> int:
    """Run the `action` of a command line, and return the exit status.

    The status is 1 if standard output cannot be written to. A message then gives the reason, unless
    the reader has closed the pipe, as with `| head`.
    """
    if sys.stdout is None:
        return _status(parse)
    out = Output(sys.stdout)
    try:
        with contextlib.redirect_stdout(cast(TextIO, out)):
            try:
                return _status(parse)
            finally:
                out.flush()
    except OutputError as error:
        _end(cast(OSError, error.__cause__))
        return 1


def _status(parse: Callable[[], Namespace]) -> int:
    try:
        return _act(parse())
    except MpiringError as error:
        if not isinstance(error, UsageError) or launch.prints_for_job():
            # In one write: ranks that print it at once would mix up their lines.
            sys.stderr.write(f"mpiring: {error}\n")
        else:
            outlive_message()
        return 2
    except MemoryError as error:
        sys.stderr.write(f"mpiring: there is not enough memory: {error or 'use smaller sizes'}\n")
        _end_job(2)
        return 2
    except KeyboardInterrupt:
        return 130


def _end(reason: OSError) -> None:
    """Print why standard output failed, and end the job."""
    if reason.errno != errno.EPIPE:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"mpiring: standard output: {reason.strerror}\n")
            sys.stderr.flush()
    # When the process ends, Python would try again to write the rest of the buffer.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    _end_job(1)


def _end_job(status: int) -> None:
    """End the job if there are other ranks, which would wait for this one."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and mpi.COMM_WORLD.Get_size() > 1:
        # Give the launcher time to forward the message.
        time.sleep(_FORWARD_S)
        mpi.COMM_WORLD.Abort(status)
        # MPICH's MPI_Abort may return.
        os._exit(status)


def _act(options: Namespace) -> int:
    """Run the action; if an option is "-", print all other output on standard error."""
    dashed = [name for name in _OPTIONS if getattr(options, name, None) == "-"]
    if len(dashed) > 1:
        raise UsageError(f"--{dashed[0]} - and --{dashed[1]} -: standard output takes one of them")
    if dashed and sys.stdout is None:
        raise ConfigError(f"--{dashed[0]} -: standard output is closed")
    # A job that a benchmark has started leaves the results to the benchmark.
    if not dashed or getattr(options, "part", None):
        return int(options.action(options))
    setattr(options, dashed[0], sys.stdout)
    with contextlib.redirect_stdout(sys.stderr):
        return int(options.action(options))


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert OSError to ConfigError while a file is written."""
    try:
        yield
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be written: {exc.strerror or exc}") from exc


@contextlib.contextmanager
def opened(path: Target, opener: Callable[[str, int], int] | None = None) -> Iterator[TextIO]:
    """Yield a new file, or the stream given instead of a path; errors are as in `writing`."""
    if not isinstance(path, str | os.PathLike):
        yield path
        return
    with writing(path), open(path, "w", newline="", opener=opener, encoding="utf-8",
                             errors="backslashreplace") as file:
        yield file


def refuse_unwritable(path: Target) -> None:
    """Raise ConfigError if a file cannot be written; do not create it."""
    if not isinstance(path, str | os.PathLike):
        return
    with writing(path):
        new = not os.path.lexists(path)
        open(path, "a").close()
        if new:
            os.unlink(path)
