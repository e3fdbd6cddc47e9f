"""Makes the files of all ranks a checkpoint: on rank 0, in the background, without a message."""

import os
import sys
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..files import read, replacing, sync_folder
from .checkpoint_file import SUFFIX, name_of
from .folder import POINTER, checkpoints_in, number_of
from .manifest import FORMAT, MANIFEST, VERSION, own_name, sealed

# Pauses between two looks; each is half as long again as the last.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 1.0
_NOTE, _NOTE_BYTES = ".failed", 1 << 16


def leave_note(written: Path, rank: int, problem: str) -> None:
    """Leave a note for rank 0, which would wait for this rank's file in vain."""
    try:
        with replacing(written / f"{own_name(rank)}{_NOTE}", links=False) as new:
            new.file.write(problem.encode())
    except OSError:
        # Rank 0 learns it in the next `wait`.
        return


def await_files(written: Path, names: Collection[str], timeout_s: float,
                given_up: threading.Event) -> list[str]:
    """Return the names of the files of all ranks when all have appeared.

    The name of a file shows that it is complete. So a checkpoint is published without a message:
    before the ranks communicate again, and with no thread but the training's in MPI.

    Args:
        written: The folder where the files appear.
        names: Of the files, without their hashes.
        timeout_s: Give up when no file has appeared for so long; 0 waits for ever.
        given_up: Set by another thread to give up at once.

    Raises:
        CheckpointError: A rank has failed, or its file has not appeared.
        OSError: The folder cannot be read.
    """
    pause_s, seen, moved_s = _FIRST_PAUSE_S, 0, time.monotonic()
    while True:
        present = [path.name for path in written.iterdir()]
        for name in present:
            if name.endswith(_NOTE):
                note = read(written / name, _NOTE_BYTES)
                raise CheckpointError(note.decode(errors="replace"))
        files = [name for name in present if name.endswith(SUFFIX)]
        missing = {*names}.difference(map(name_of, files))
        if not missing:
            return files
        if len(files) > seen:
            pause_s, seen, moved_s = _FIRST_PAUSE_S, len(files), time.monotonic()
        if timeout_s and time.monotonic() - moved_s > timeout_s:
            raise CheckpointError(f"no file of {', '.join(sorted(missing)[:5])} appeared in "
                                  f"{written} within {timeout_s:g} s")
        if given_up.wait(pause_s):
            raise CheckpointError("it was given up")
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)


def publish(folder: Path, written: Path, files: Collection[str],
            facts: Mapping[str, Any]) -> None:
    """Make a checkpoint with complete files the newest.

    Args:
        folder: Of checkpoints.
        written: The folder in it that has the files; renamed.
        files: Names of the files.
        facts: Of the manifest; `step` among them.

    Raises:
        CheckpointError: The manifest would be too long.
        OSError: It is not published, and the one before is still the newest.
    """
    manifest = {
        "format": FORMAT, "version": VERSION, **facts,
        "written": time.strftime("%Y-%m-%d %H:%M:%S %z"), "versions": _versions(),
        "files": {name: (written / name).stat().st_size for name in sorted(files)}}
    with replacing(written / MANIFEST, synced=True, links=False) as new:
        new.file.write(sealed(manifest).encode())
    number = max(map(number_of, checkpoints_in(folder)), default=0) + 1
    name = f"{number:06d}-step-{facts['step']}"
    os.rename(written, folder / name)
    sync_folder(folder)
    with replacing(folder / POINTER, synced=True) as new:
        new.file.write(f"{name}\n".encode())


def _versions() -> dict[str, str]:
    """Return the versions of packages that can change the bits of a training."""
    versions = {"python": sys.version.split()[0]}
    for name in ("mpiring", "mpi4py", "numpy", "torch"):
        if name in sys.modules:
            versions[name] = str(sys.modules[name].__version__)
    return versions
