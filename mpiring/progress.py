"""Shows progress with tqdm on a terminal and in lines elsewhere; records metrics."""

import contextlib
import json
import logging
import math
import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from .arguments import number, path, truth, whole_number
from .errors import ConfigError
from .files import regular, replacing

_log = logging.getLogger("mpiring")


class Progress:
    """A progress bar on standard error, printed lines that do not break it, and a metrics file.

        with Progress("training", steps, shown=comm.rank == 0, metrics="metrics.jsonl") as progress:
            ...
                progress.step()
                progress.record(step, loss=loss)

    If standard error is not a terminal, or tqdm is not installed, it prints lines instead.

    Args:
        text: Name of the work.
        total: Number of steps.
        shown: If false, show and record nothing; for all ranks but one.
        done: Number of steps that an earlier run has completed.
        metrics: File to which `record` appends lines of JSON; None for none. Lines on steps after
            `done` are deleted, because these steps are repeated.
        lines_every_s: Interval between lines, in seconds.

    Raises:
        ConfigError: An argument has the wrong type or range.
        OSError: The metrics cannot be written, or the file is a link or a pipe.
    """

    def __init__(self, text: str, total: int, *, shown: bool = True, done: int = 0,
                 metrics: str | os.PathLike[str] | None = None,
                 lines_every_s: float = 30.0) -> None:
        self._text, self._total = text, whole_number("total", total, 0)
        self._shown = truth("shown", shown)
        self._first = self._done = whole_number("done", done, 0)
        self._every_s = number("lines_every_s", lines_every_s, lambda x: x >= 0,
                               "seconds, 0 or more")
        self._began = self._printed_s = time.monotonic()
        self._bar: Any = None
        self._metrics: Any = None
        if shown and metrics is not None:
            file = Path(path("metrics", metrics))
            _delete_later_lines(file, done)
            self._metrics = open(file, "a", encoding="utf-8", opener=regular)
        if shown and sys.stderr is not None and sys.stderr.isatty():
            with contextlib.suppress(ImportError):
                from tqdm import tqdm
                self._bar = tqdm(total=total, desc=text, initial=done, leave=False)

    def say(self, line: str) -> None:
        """Print a line on standard output.

        Args:
            line: Text without a newline.
        """
        if self._bar is not None:
            self._bar.write(line, file=sys.stdout)
            sys.stdout.flush()
        elif self._shown:
            print(line, flush=True)

    def step(self) -> None:
        """Count a step."""
        self._done += 1
        if self._bar is not None:
            self._bar.update()
        elif self._shown and time.monotonic() - self._printed_s >= self._every_s:
            self._printed_s = time.monotonic()
            rate = (self._done - self._first) / max(1e-9, self._printed_s - self._began)
            left_s = (self._total - self._done) / rate
            # One write (print makes two), so that the launcher does not mix lines of ranks. A full
            # disk must not end the training.
            with contextlib.suppress(OSError):
                sys.stderr.write(f"{self._text}: {self._done} of {self._total}, {rate:.3g} per s, "
                                 f"{left_s:,.0f} s left\n")
                sys.stderr.flush()

    def record(self, step: int, **values: Any) -> None:
        """Append a line to the metrics: the step, the time, and some values.

        If the disk is full, a warning is logged, and the metrics end.

        Args:
            step: Step of the training.
            values: Numbers (also NumPy or PyTorch scalars) and strings; NaN and Inf become null.

        Raises:
            ConfigError: A value has another type.
        """
        if self._metrics is not None:
            line = {"step": step, "time": round(time.time(), 3)}
            try:
                line |= {name: _plain(value) for name, value in values.items()}
                text = json.dumps(line, allow_nan=False)
            except (RuntimeError, TypeError, ValueError) as exc:
                raise ConfigError(f"record({step!r}, {', '.join(values)}): {exc}; pass whole "
                                  f"numbers as step, and numbers or strings") from exc
            # One write, so that there is never half a line to read, even after a kill.
            try:
                self._metrics.write(text + "\n")
                self._metrics.flush()
            except OSError as error:
                _log.warning("the metrics end here; training continues: %s: %s",
                             self._metrics.name, error.strerror or error)
                self._close_metrics()

    def _close_metrics(self) -> None:
        if self._metrics is not None:
            # Closing writes again what could not be written.
            with contextlib.suppress(OSError):
                self._metrics.close()
            self._metrics = None

    def close(self) -> None:
        """Remove the bar, and close the metrics."""
        if self._bar is not None:
            self._bar.close()
        self._close_metrics()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


def _plain(value: Any) -> Any:
    """Return a value in a form that JSON can hold."""
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _delete_later_lines(path: Path, done: int) -> None:
    """Delete lines on steps after `done`, and an incomplete line, from a file of metrics."""
    try:
        # Opened for writing, so that no link is followed.
        with open(path, "r+", encoding="utf-8", errors="replace", opener=regular) as file:
            lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:
        return
    valid = [line for line in lines if _is_up_to(done, line)]
    if len(valid) < len(lines):
        with replacing(path) as new:
            new.file.write("".join(valid).encode())


def _is_up_to(done: int, line: str) -> bool:
    try:
        return line.endswith("\n") and json.loads(line)["step"] <= done
    except (ValueError, KeyError, TypeError):
        return False
