"""Runs a command that may crash or hang in a child process, for a limited time."""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Seconds to wait after the deadline for a child that ends by itself, before it is killed.
GRACE_S = 5.0


@dataclass(frozen=True)
class ChildResult:
    """Output and status of a child: below 0 for a signal, None if it was killed at the limit."""

    status: int | None
    lines: Sequence[str]


def last_lines(lines: Sequence[str], most: int) -> list[str]:
    """Return the last lines that contain text."""
    return [line.rstrip() for line in lines if line.strip(" -=*")][-most:]


def run(command: Sequence[str], limit_s: float, *, env: Mapping[str, str] | None = None,
        in_place: bool = False) -> ChildResult:
    """Run a command until it ends, or kill it after a time limit.

    Args:
        env: Environment of the child; by default, the environment of this process.
        in_place: If true, the child replaces this process as a rank of the launcher: it inherits
            all open files and stays in the session. Otherwise it has a separate session, and its
            processes end with it.

    Raises:
        OSError: The command cannot be started.
    """
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env,
            close_fds=not in_place, start_new_session=not in_place)
        status = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = child.wait(limit_s)
        finally:
            if in_place:
                child.kill()
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        output.seek(0)
        return ChildResult(status, output.read().decode(errors="replace").splitlines())
