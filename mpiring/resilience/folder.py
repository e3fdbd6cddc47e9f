"""A folder of checkpoints: how they appear in it, which is the newest, and which job may write."""

import fcntl
import logging
import os
import re
import secrets
import shutil
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ..communicator import Communicator
from ..errors import CheckpointError, MpiringError
from ..files import UNFINISHED, read, regular, replacing, sync_folder
from ..operations.consistency import Ranks
from .checkpoint_file import SUFFIX, name_of
from .manifest import FORMAT, MANIFEST, own_name, sealed, version_of

_log = logging.getLogger("mpiring")

T = TypeVar("T")

_POINTER = "latest"
_LOCK = "lock"
# A checkpoint: its number in this folder, which grows, and its step.
_NAME = re.compile(r"(\d{6,})-step-\d+")
# How long a change may take to appear on other nodes, as over NFS.
PATIENCE_S = 5.0
PAUSE_S = 0.1
# Prefixes: of a checkpoint that is being deleted, and of the files by which ranks find out whether
# they share the folder.
DELETING, MARK = ".deleting-", ".mark-"
# Lengths of the longest texts of a pointer and a lock that are read.
_POINTER_BYTES, _HOLDER_CHARACTERS = 4096, 300
# Pauses between two looks; each is half as long again as the last.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 1.0
_NOTE, _NOTE_BYTES = ".failed", 1 << 16


def _checkpoint_names(folder: Path) -> list[str]:
    """Return the names of the checkpoints in a folder, the newest first."""
    names = [entry.name for entry in folder.iterdir() if _NAME.fullmatch(entry.name)]
    return sorted(names, key=_number, reverse=True)


def _number(name: str) -> int:
    return int(name.partition("-")[0])


def step_of(name: str) -> int:
    """Return the step of a checkpoint."""
    return int(name.rpartition("-")[2])


def candidates(folder: Path) -> tuple[list[str], str]:
    """Return the checkpoints that a job may resume from, the newest first.

    Returns:
        Names; and what is wrong with the pointer, or "". Checkpoints that are newer than the
        pointer were not finished when their job ended.
    """
    names = _checkpoint_names(folder)
    try:
        latest = read(folder / _POINTER, _POINTER_BYTES).decode("ascii").strip()
    except FileNotFoundError:
        return names, f"there is no file {_POINTER}" if names else ""
    except (OSError, ValueError) as exc:
        return names, f"{_POINTER} cannot be read ({exc})"
    if latest in names:
        return names[names.index(latest):], ""
    return names, f"{_POINTER} names {latest!r:.80}, which is not there"


def leave_note(staging: Path, rank: int, problem: str) -> None:
    """Leave a note for rank 0, which would wait for this rank's file in vain."""
    try:
        with replacing(staging / f"{own_name(rank)}{_NOTE}", links=False) as new:
            new.file.write(problem.encode())
    except OSError:
        # Rank 0 learns it in the next `wait`.
        return


def await_files(staging: Path, names: Collection[str], timeout_s: float,
                canceled: threading.Event) -> list[str]:
    """Return the names of the files of all ranks when all have appeared.

    The name of a file shows that it is complete. So a checkpoint is published without a message:
    before the ranks communicate again, and with no thread but the training's in MPI.

    Args:
        staging: Folder in which the files appear.
        names: Names of the files, without their hashes.
        timeout_s: Seconds without a new file after which to give up; 0 waits for ever.
        canceled: Event that another thread sets to end the wait at once.

    Raises:
        CheckpointError: A rank has failed, or its file has not appeared.
        OSError: The folder cannot be read.
    """
    pause_s, seen, moved_s = _FIRST_PAUSE_S, 0, time.monotonic()
    while True:
        present = [path.name for path in staging.iterdir()]
        for name in present:
            if name.endswith(_NOTE):
                note = read(staging / name, _NOTE_BYTES)
                raise CheckpointError(note.decode(errors="replace"))
        files = [name for name in present if name.endswith(SUFFIX)]
        missing = {*names}.difference(map(name_of, files))
        if not missing:
            return files
        if len(files) > seen:
            pause_s, seen, moved_s = _FIRST_PAUSE_S, len(files), time.monotonic()
        if timeout_s and time.monotonic() - moved_s > timeout_s:
            raise CheckpointError(f"no file of {', '.join(sorted(missing)[:5])} appeared in "
                                  f"{staging} within {timeout_s:g} s")
        if canceled.wait(pause_s):
            raise CheckpointError("it was given up")
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)


def publish(folder: Path, staging: Path, files: Collection[str],
            facts: Mapping[str, Any]) -> None:
    """Make a checkpoint with complete files the newest.

    Args:
        folder: Folder of checkpoints.
        staging: Subfolder that has the files; it is renamed.
        files: Names of the files.
        facts: Facts of the manifest; `step` is one.

    Raises:
        CheckpointError: The manifest would be too long.
        OSError: It is not published, and the one before is still the newest.
    """
    # Another version of these packages can change the bits of a training.
    packages = [name for name in ("mpiring", "mpi4py", "numpy", "torch") if name in sys.modules]
    manifest = {
        "format": FORMAT, "version": version_of(files), **facts,
        "written": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "versions": {"python": sys.version.split()[0],
                     **{name: str(sys.modules[name].__version__) for name in packages}},
        "files": {name: (staging / name).stat().st_size for name in sorted(files)}}
    with replacing(staging / MANIFEST, synced=True, links=False) as new:
        new.file.write(sealed(manifest).encode())
    number = max(map(_number, _checkpoint_names(folder)), default=0) + 1
    name = f"{number:06d}-step-{facts['step']}"
    os.rename(staging, folder / name)
    sync_folder(folder)
    with replacing(folder / _POINTER, synced=True) as new:
        new.file.write(f"{name}\n".encode())


def delete_old(folder: Path, keep: int, refused: set[str]) -> None:
    """Delete old checkpoints.

    Args:
        folder: Folder of checkpoints.
        keep: Number of the newest that stay.
        refused: Names of checkpoints that cannot be used, which do not count.
    """
    names = _checkpoint_names(folder)
    good = [name for name in names if name not in refused]
    if len(good) > keep:
        for name in names[names.index(good[keep - 1]) + 1:]:
            remove(folder / name)


def remove(path: Path) -> None:
    """Delete a checkpoint, its name first; log a warning if that fails."""
    doomed = path
    try:
        if not path.name.startswith("."):
            doomed = path.with_name(f"{DELETING}{path.name}")
            os.rename(path, doomed)
        shutil.rmtree(doomed)
    except NotADirectoryError:
        path.unlink(missing_ok=True)
    except FileNotFoundError:
        pass
    except OSError as exc:
        _log.warning("%s cannot be deleted: %s", path, exc.strerror or exc)


def sweep(folder: Path) -> None:
    """Delete what earlier jobs have left unfinished."""
    for entry in list(folder.iterdir()):
        if entry.name.startswith((UNFINISHED, DELETING, MARK)):
            remove(entry)


class Lock:
    """Keeps other jobs from writing into a folder, for as long as this process lives.

    Args:
        folder: Folder of checkpoints.

    Attributes:
        held: False if the file system has no locks.
        release: Function that lets other jobs write.

    Raises:
        CheckpointError: Another job writes there; says which.
        OSError: The folder cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        self._file = open(folder / _LOCK, "a+", errors="replace", opener=regular)
        self.release = weakref.finalize(self, self._file.close)
        self.held = True
        try:
            # A job that has just ended may hold it for a moment longer.
            _retry(lambda: fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB),
                       BlockingIOError)
        except BlockingIOError as error:
            self._file.seek(0)
            holder = self._file.read(_HOLDER_CHARACTERS).strip() or "an unknown process"
            self.release()
            raise CheckpointError(
                f"{folder} is in use: {holder} writes its checkpoints there; give each job a "
                f"separate folder, or, if that job has ended, delete {folder / _LOCK}") from error
        except OSError as error:
            self.held = False
            _log.warning(
                "%s is on a file system without locks (%s): see to it that no second job writes "
                "its checkpoints there", folder, error.strerror or error)
        # With a second name, it may be a file that another user wants to be emptied.
        if self.held and os.fstat(self._file.fileno()).st_nlink == 1:
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            self._file.flush()


def rank_and_host(comm: Ranks) -> str:
    """Return this rank and its host, for messages."""
    return f"rank {comm.rank} on {socket.gethostname()}"


def on_rank_0(comm: Ranks, function: Callable[[], T]) -> T:
    """Call a function on rank 0, and return its result on all ranks.

    Raises:
        CheckpointError: It failed; on all ranks.
    """
    result, problem = None, ""
    if comm.rank == 0:
        try:
            result = function()
        except (OSError, CheckpointError) as exc:
            problem = str(exc)
    answer: tuple[T, str] = comm.broadcast_object((result, problem), root=0)
    result, problem = answer
    if problem:
        raise CheckpointError(problem)
    return result


def on_all_ranks(comm: Ranks, label: str, function: Callable[[], T], error: type[MpiringError],
                 place: str) -> list[T]:
    """Call a function on each rank, and return the results of all ranks on each.

    Args:
        label: Name of the call, for messages.
        error: Class of the error that is raised on all ranks, with the text of the lowest rank
            that raised it.
        place: This rank, in that text.
    """
    result, problem = None, ""
    try:
        result = function()
    except error as exc:
        problem = f"{place}: {exc}"
    answers = comm.allgather_object((result, problem), label=label)
    for _, problem in answers:
        if problem:
            raise error(problem)
    return [result for result, _ in answers]


def open_folder(folder: Path, comm: Communicator) -> tuple[str, Lock | None]:
    """Make a folder of checkpoints where it is missing, and lock it against other jobs.

    Returns:
        A text that is unique to this job; and, on rank 0, the lock.

    Raises:
        CheckpointError: Another job uses the folder, it cannot be written to, or a rank has
            another folder of this name.

    Collective: yes. Blocking: yes.
    """
    lock: Lock | None = None

    def prepare() -> str:
        nonlocal lock
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = Lock(folder)
            if lock.held:
                sweep(folder)
        except (OSError, CheckpointError) as exc:
            raise CheckpointError(f"{rank_and_host(comm)}: {exc}") from exc
        return secrets.token_hex(4)

    token = on_rank_0(comm, prepare)
    try:
        _refuse_other_folders(folder, comm, token)
    except CheckpointError:
        if lock is not None:
            lock.release()
        raise
    return token, lock


def _refuse_other_folders(folder: Path, comm: Communicator, token: str) -> None:
    """Leave a mark in the folder on each rank, and look for all of them on rank 0."""
    marks = [folder / f"{MARK}{token}-{rank}" for rank in range(comm.size)]
    ranks = comm.allgather_object((rank_and_host(comm), _touch(marks[comm.rank])))

    def check() -> None:
        names = {entry.name for entry in folder.iterdir()}
        for mark, (name, _) in zip(marks, ranks):
            if mark.name not in names:
                raise CheckpointError(
                    f"{name} has another folder {folder} than {ranks[0][0]}; checkpoints must lie "
                    f"on a file system that all nodes share")

    try:
        for name, problem in ranks:
            if problem:
                raise CheckpointError(
                    f"{name} cannot write into {folder} ({problem}), which {ranks[0][0]} can; "
                    f"checkpoints must be on a file system that all nodes share")
        on_rank_0(comm, lambda: _retry(check, CheckpointError))
    finally:
        marks[comm.rank].unlink(missing_ok=True)


def _touch(mark: Path) -> str:
    """Make an empty file; return why that failed, or ""."""
    try:
        # Rank 0 may have made the folder just now.
        _retry(lambda: open(mark, "x", opener=regular).close(), FileNotFoundError)
    except OSError as exc:
        return exc.strerror or str(exc)
    return ""


def _retry(attempt: Callable[[], T], error: type[Exception]) -> T:
    """Repeat an attempt while it raises this error, for PATIENCE_S seconds."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return attempt()
        except error:
            if time.monotonic() > end:
                raise
        time.sleep(PAUSE_S)
