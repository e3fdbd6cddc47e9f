"""Runs the examination in a child process, and tells how it ended; never hangs or dies of it."""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from typing import IO, Any

from .facts import LOADING, Failure

# Beyond its deadline, at which the child ends by itself.
_GRACE_S = 3.0
_MOST_LINES = 12


def examined(deadline_s: float) -> tuple[dict[str, Any], Failure | None]:
    """Examine MPI in a child that takes this process's place among the launcher's ranks.

    Launchers know their ranks by variables and open files, which children inherit; and so
    also what kills a rank leaves this process alive, to tell.

    Args:
        deadline_s: Seconds after which it is ended.

    Returns:
        Fields of Job, as far as it came, and how it failed, if it did.
    """
    with tempfile.TemporaryFile() as answers, tempfile.TemporaryFile() as said:
        descriptor = answers.fileno()
        os.set_inheritable(descriptor, True)
        child = subprocess.Popen(
            [sys.executable, "-m", "mpiring", "doctor", "--examine", str(descriptor),
             "--deadline", str(deadline_s)],
            stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT,
            # The launcher's files have to pass, and so does the one for the answers.
            close_fds=False)
        try:
            status = child.wait(deadline_s + _GRACE_S)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            child.kill()
            child.wait()
        stage, found = _read(answers)
        said.seek(0)
        lines = said.read().decode(errors="replace").splitlines()
    late = status is None or any(line.startswith("Timeout (") for line in lines)
    found["said"] = _told(lines)
    if stage == "":
        return found, None    # however it ended after MPI did
    how = f"no end within {deadline_s:g} s" if late else _how(status or 0)
    return found, Failure(stage=stage, how=how, late=late, said=found["said"])


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
    """Say how a process ended."""
    if status >= 0:
        return f"exit status {status}"
    return f"{signal.strsignal(-status)} (signal {-status})"


def _told(lines: list[str]) -> list[str]:
    """Return what MPI printed: without empty lines, and without the trace of a late end."""
    end = next((i for i, line in enumerate(lines) if line.startswith("Timeout (")), len(lines))
    return [line.rstrip() for line in lines[:end] if line.strip(" -=*")][-_MOST_LINES:]
