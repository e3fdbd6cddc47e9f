"""A folder of checkpoints: publishes, finds and deletes them, and locks the folder for one job."""

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
# Name of a checkpoint: its ascending number in this folder, and its step.
_NAME = re.compile(r"(\d{6,})-step-\d+")
# Time after which a change must be visible on other nodes, for example over NFS.
PATIENCE_S = 5.0
PAUSE_S = 0.1
# Prefixes of a checkpoint that is being deleted, and of files that show whether ranks share the
# folder.
DELETING, MARK = ".deleting-", ".mark-"
# Maximum lengths to read from the pointer and the lock.
_POINTER_BYTES, _HOLDER_CHARACTERS = 4096, 300
# Content of the lock.
_HOLDER = re.compile(r"process \d+ on [\w.-]+")
# Pauses between two checks; each is 1.5 times as long as the previous one.
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

    Checkpoints that are newer than the pointer were not finished when their job ended.
    Also return the problem with the pointer, or "".
    """
    names = _checkpoint_names(folder)
    try:
        latest = read(folder / _POINTER, _POINTER_BYTES, links=False).decode("ascii").strip()
    except FileNotFoundError:
        return names, f"there is no file {_POINTER}" if names else ""
    except OSError as exc:
        return names, f"{_POINTER} cannot be read ({exc})"
    except ValueError:
        return names, f"{_POINTER} cannot be read as text"
    if latest in names:
        return names[names.index(latest):], ""
    # Another user may have replaced it by a file whose content must not be shown.
    return names, (f"{_POINTER} names {latest!r}, which is not there"
                   if not latest or _NAME.fullmatch(latest)
                   else f"{_POINTER} does not name a checkpoint")


def leave_note(staging: Path, rank: int, problem: str) -> None:
    """Tell rank 0, by a file, why this rank's file will not appear."""
    try:
        with replacing(staging / f"{own_name(rank)}{_NOTE}", links=False) as new:
            new.file.write(problem.encode())
    except OSError:
        # The next `wait` tells rank 0.
        return


def await_files(staging: Path, names: Collection[str], timeout_s: float,
                canceled: threading.Event) -> list[str]:
    """Wait until the files of all ranks have appeared, and return their names.

    The name of a file shows that the file is complete. Rank 0 can therefore publish a checkpoint
    without messages: it need not wait for the ranks' next call, and the thread does not use MPI.

    A rank has `timeout_s` seconds for its file, 0 for no limit. If another thread sets `canceled`,
    the wait ends at once.

    Raises:
        CheckpointError: A rank has failed, or its file has not appeared.
        OSError: The folder cannot be read.
    """
    pause_s, seen, moved_s = _FIRST_PAUSE_S, 0, time.monotonic()
    while True:
        present = [path.name for path in staging.iterdir()]
        for name in present:
            if name.endswith(_NOTE):
                note = read(staging / name, _NOTE_BYTES, links=False)
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
    """Turn the complete files in a subfolder into the newest checkpoint; rename the subfolder.

    The facts are entries of the manifest, including `step`.

    Raises:
        CheckpointError: The manifest would be too long.
        OSError: Publication failed; the previous checkpoint is still the newest.
    """
    # Another version of these packages can change the bits of a training run.
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
    """Delete all checkpoints but the newest `keep`; refused ones are unusable and do not count."""
    names = _checkpoint_names(folder)
    usable = [name for name in names if name not in refused]
    if len(usable) > keep:
        for name in names[names.index(usable[keep - 1]) + 1:]:
            remove(folder / name)


def remove(path: Path) -> None:
    """Rename and delete a checkpoint; log a warning if that fails."""
    renamed = path
    try:
        if not path.name.startswith("."):
            renamed = path.with_name(f"{DELETING}{path.name}")
            os.rename(path, renamed)
        shutil.rmtree(renamed)
    except NotADirectoryError:
        path.unlink(missing_ok=True)
    except FileNotFoundError:
        pass
    except OSError as exc:
        _log.warning("%s cannot be deleted: %s", path, exc.strerror or exc)


class Lock:
    """Keeps other jobs from writing to a folder as long as this process lives.

    `held` is False if the file system has no locks. `release` lets other jobs write.

    Raises:
        CheckpointError: Another job, which the message names, writes to the folder.
        OSError: The folder cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        self._file = open(folder / _LOCK, "a+", errors="replace", opener=regular)
        self.release = weakref.finalize(self, self._file.close)
        self.held = True
        try:
            # A job that has just ended may still hold the lock for a moment.
            _retry(lambda: fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB),
                   BlockingIOError)
        except BlockingIOError as error:
            self._file.seek(0)
            # A hard link may lead to a file whose content must not be shown.
            holder = self._file.read(_HOLDER_CHARACTERS).strip()
            holder = holder if _HOLDER.fullmatch(holder) else "an unknown process"
            self.release()
            raise CheckpointError(
                f"{folder} is in use: {holder} writes its checkpoints there; give each job a "
                f"separate folder, or, if that job has ended, delete {folder / _LOCK}") from error
        except OSError as error:
            self.held = False
            _log.warning(
                "%s is on a file system without locks (%s): see to it that no second job writes "
                "its checkpoints there", folder, error.strerror or error)
        # A hard link may be a trap: another user may want this process to truncate the file.
        if self.held and os.fstat(self._file.fileno()).st_nlink == 1:
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            self._file.flush()


def rank_and_host(comm: Ranks) -> str:
    """Return this rank and its host, for messages."""
    return f"rank {comm.rank} on {socket.gethostname()}"


def on_rank_0(comm: Ranks, function: Callable[[], T]) -> T:
    """Call a function on rank 0, and return its result on all ranks.

    If it raises CheckpointError or OSError, all ranks raise CheckpointError.
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
    """Call a function on each rank, and return the results of all ranks on each rank.

    If it fails anywhere, all ranks raise `error`, with the text and the `place` of the lowest rank
    that failed. `label` names the call in messages.
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
    """Create a folder of checkpoints if it is missing, and lock it against other jobs.

    Return a token that is unique to this job, and the lock (None except on rank 0).

    Raises:
        CheckpointError: Another job uses the folder, a rank cannot write to it, or the folder of a
            rank is another one of the same name.

    Collective: yes. Blocking: yes.
    """
    lock: Lock | None = None

    def prepare() -> str:
        nonlocal lock
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = Lock(folder)
            if lock.held:
                # Earlier jobs may have left unfinished checkpoints and other files behind.
                for entry in list(folder.iterdir()):
                    if entry.name.startswith((UNFINISHED, DELETING, MARK)):
                        remove(entry)
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
    """Create a file in the folder on each rank, and check on rank 0 that all files are there."""
    marks = [folder / f"{MARK}{token}-{rank}" for rank in range(comm.size)]
    ranks = comm.allgather_object((rank_and_host(comm), _touch(marks[comm.rank])))

    def check() -> None:
        names = {entry.name for entry in folder.iterdir()}
        for mark, (name, _) in zip(marks, ranks):
            if mark.name not in names:
                raise CheckpointError(
                    f"{name} has another folder {folder} than {ranks[0][0]}; checkpoints must be "
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
    """Create an empty file; return the reason for a failure, or ""."""
    try:
        # If rank 0 has just created the folder, it may not be visible yet.
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
