"""Runs the examination in a child process, so that the doctor neither hangs nor dies of it."""

import os
import pickle
import signal
import sys
import tempfile
from typing import IO, Any

from ...launch import child_job
from .facts import LOADING, Failure

_MOST_LINES = 12


def examined(deadline_s: float) -> tuple[dict[str, Any], Failure | None]:
    """Examine MPI in a child that stands for this process among the launcher's ranks.

    Launchers know their ranks by variables and open files, which children inherit. What kills the
    child leaves this process alive to report.

    Args:
        deadline_s: Seconds after which the child is ended.

    Returns:
        Fields of Job, as far as it came, and how it failed, if it did.
    """
    with tempfile.TemporaryFile() as answers:
        os.set_inheritable(answers.fileno(), True)
        ended = child_job.run(
            [sys.executable, "-m", "mpiring", "doctor", "--examine", str(answers.fileno()),
             "--deadline", str(deadline_s)], deadline_s, in_place=True)
        stage, found = _read(answers)
    # Python's own report of a late end is noise.
    end = next((i for i, line in enumerate(ended.lines) if line.startswith("Timeout (")), None)
    late = ended.status is None or end is not None
    found["printed"] = child_job.Ended(None, ended.lines[:end]).last_lines(_MOST_LINES)
    if stage == "":
        return found, None    # however it ended after MPI did
    how = f"no end within {deadline_s:g} s" if late else _how(ended.status or 0)
    return found, Failure(stage=stage, how=how, late=late, printed=found["printed"])


def _read(answers: IO[bytes]) -> tuple[str, dict[str, Any]]:
    """Return the last stage, and all that was found, from what the child wrote."""
    answers.seek(0)
    stage = LOADING
    found: dict[str, Any] = {}
    while True:
        try:
            stage, more = pickle.load(answers)
        except (EOFError, pickle.UnpicklingError):
            return stage, found
        found.update(more)


def _how(status: int) -> str:
    """Return how a process ended."""
    return (f"exit status {status}" if status >= 0 else
            f"{signal.strsignal(-status)} (signal {-status})")
