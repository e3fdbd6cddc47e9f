"""Saves files whole: who reads one meanwhile finds the old content or the new."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def save(path: Path, content: bytes) -> None:
    """Write a file in place of an earlier one, and its folder; only this user can read it.

    Any number of processes may save the same file at the same time.

    Raises:
        OSError: The folder cannot be written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as opened:
            opened.write(content)
        os.replace(scratch, path)
    except OSError:
        with suppress(OSError):
            os.unlink(scratch)
        raise
