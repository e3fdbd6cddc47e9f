"""Waits on rank 0, in the background, for the files of all ranks; makes them a checkpoint."""

import sys
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..files import read, replacing
from .checkpoint_file import SUFFIX, name_of
from .folder import publish, thin_out
from .manifest import FORMAT, VERSION

# Pauses between two looks; each is half as long again as the last.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 1.0
_NOTE, _NOTE_BYTES = ".failed", 1 << 16
# The file with the tree of sharded state, and what in it is equal on all ranks.
SHARDED = "sharded"


def written_name(rank: int | None) -> str:
    """Return the name of a rank's file, without its hash; None for the replicated state."""
    return "replicated" if rank is None else f"rank-{rank:05d}"


def slices_name(rank: int) -> str:
    """Return the name of the file with a rank's pieces of sharded state, without its hash."""
    return f"slices-{rank:05d}"


def leave_note(written: Path, rank: int, problem: str) -> None:
    """Leave a note for rank 0, which would wait for this rank's file in vain."""
    try:
        with replacing(written / f"{written_name(rank)}{_NOTE}", links=False) as new:
            new.file.write(problem.encode())
    except OSError:
        # Rank 0 learns it in the next `wait`.
        return


class Publisher:
    """Makes one checkpoint out of the files of all ranks.

    The name of a file shows that it is complete. So a checkpoint is published without a message:
    before the ranks communicate again, and with no thread but the training's in MPI.

    Args:
        folder: Of checkpoints.
        written: The folder in it where the files appear.
        names: Of the files, without their hashes.
        timeout_s: Give up when no file has appeared for so long; 0 waits for ever.
    """

    def __init__(self, folder: Path, written: Path, names: Collection[str],
                 timeout_s: float) -> None:
        self._folder, self._written, self._names = folder, written, set(names)
        self._timeout_s = timeout_s
        self._gave_up = threading.Event()

    def give_up(self) -> None:
        """Make `publish` raise, if it is still waiting."""
        self._gave_up.set()

    def publish(self, facts: Mapping[str, Any], keep: int, refused: set[str]) -> str:
        """Wait for the files, publish the checkpoint, and thin out the old ones.

        Args:
            facts: Of the manifest; `step` among them.
            keep, refused: As for `thin_out`.

        Returns:
            The name of the checkpoint.

        Raises:
            CheckpointError: A rank has failed, or its file has not appeared.
            OSError: The folder cannot be written to.
        """
        files = self._arrived()
        manifest = {
            "format": FORMAT, "version": VERSION, **facts,
            "written": time.strftime("%Y-%m-%d %H:%M:%S %z"), "versions": _versions(),
            "files": {name: (self._written / name).stat().st_size for name in sorted(files)}}
        name = publish(self._folder, self._written, facts["step"], manifest)
        thin_out(self._folder, keep, refused)
        return name

    def _arrived(self) -> list[str]:
        """Return the names of the files when all have appeared."""
        pause_s, seen, moved_s = _FIRST_PAUSE_S, 0, time.monotonic()
        while True:
            names = [path.name for path in self._written.iterdir()]
            for name in names:
                if name.endswith(_NOTE):
                    note = read(self._written / name, _NOTE_BYTES)
                    raise CheckpointError(note.decode(errors="replace"))
            files = [name for name in names if name.endswith(SUFFIX)]
            missing = self._names.difference(map(name_of, files))
            if not missing:
                return files
            if len(files) > seen:
                pause_s, seen, moved_s = _FIRST_PAUSE_S, len(files), time.monotonic()
            if self._timeout_s and time.monotonic() - moved_s > self._timeout_s:
                raise CheckpointError(f"no file of {', '.join(sorted(missing)[:5])} appeared in "
                                      f"{self._written} within {self._timeout_s:g} s")
            if self._gave_up.wait(pause_s):
                raise CheckpointError("it was given up")
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)


def _versions() -> dict[str, str]:
    """Return the versions of packages that can change the bits of a training."""
    versions = {"python": sys.version.split()[0]}
    for name in ("mpiring", "mpi4py", "numpy", "torch"):
        if name in sys.modules:
            versions[name] = str(sys.modules[name].__version__)
    return versions
