"""Opens a folder of checkpoints on all ranks, and sees to it that it is the same one for all."""

import secrets
import socket
import time
from pathlib import Path

from ..communicator import Communicator
from ..errors import CheckpointError
from .folder import MARK, PATIENCE_S, PAUSE_S, Lock, sweep


def where(comm: Communicator) -> str:
    """Return this rank and its host, for messages."""
    return f"rank {comm.rank} on {socket.gethostname()}"


def open_folder(folder: Path, comm: Communicator) -> tuple[str, Lock | None]:
    """Make a folder of checkpoints where there is none, and keep other jobs from it.

    Returns:
        A text that no other job has; and on rank 0, what keeps others out.

    Raises:
        CheckpointError: Another job uses it, it cannot be written to, or a rank has another
            folder of this name.

    Collective: yes. Blocking: yes.
    """
    token, lock, problem = secrets.token_hex(4), None, ""
    if comm.rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = Lock(folder)
            if lock.held:
                sweep(folder)
        except (OSError, CheckpointError) as exc:
            problem = f"{where(comm)}: {exc}"
    token, problem = comm.broadcast_object((token, problem), root=0)
    if problem:
        raise CheckpointError(problem)
    try:
        _refuse_other_folders(folder, comm, token)
    except CheckpointError:
        if lock is not None:
            lock.release()
        raise
    return token, lock


def _refuse_other_folders(folder: Path, comm: Communicator, token: str) -> None:
    """Let each rank leave a mark in the folder, and rank 0 look for all of them."""
    mark = folder / f"{MARK}{token}-{comm.rank}"
    ranks = comm.allgather_object((where(comm), _touched(mark)))
    lost: list[int] = []
    if comm.rank == 0 and not any(problem for _, problem in ranks):
        lost = _unmarked(folder, [f"{MARK}{token}-{rank}" for rank in range(comm.size)])
    lost = comm.broadcast_object(lost, root=0)
    mark.unlink(missing_ok=True)
    for name, problem in ranks:
        if problem:
            raise CheckpointError(
                f"{name} cannot write into {folder} ({problem}), which {ranks[0][0]} can; "
                f"checkpoints must lie on a file system that all nodes share")
    if lost:
        raise CheckpointError(
            f"{ranks[lost[0]][0]} has another folder {folder} than {ranks[0][0]}; checkpoints "
            f"must lie on a file system that all nodes share")


def _touched(mark: Path) -> str:
    """Leave an empty file; return why that cannot be done, or ""."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            mark.touch()
            return ""
        except OSError as exc:
            # Rank 0 may just have made the folder.
            if not isinstance(exc, FileNotFoundError) or time.monotonic() > end:
                return exc.strerror or str(exc)
        time.sleep(PAUSE_S)


def _unmarked(folder: Path, marks: list[str]) -> list[int]:
    """Return the ranks whose marks do not appear."""
    end = time.monotonic() + PATIENCE_S
    while True:
        there = {entry.name for entry in folder.iterdir()}
        lost = [rank for rank, mark in enumerate(marks) if mark not in there]
        if not lost or time.monotonic() > end:
            return lost
        time.sleep(PAUSE_S)
