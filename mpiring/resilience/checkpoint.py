"""Saves the state of a training in the background, and loads the newest complete checkpoint."""

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from ..arguments import path, whole_number
from ..communicator import Communicator, refuse_other_than_communicators
from ..errors import CheckpointError, ClosedError, ConfigError
from .checkpoint_file import Copy
from .folder import WRITING, Lock, open_folder, remove, where
from .publisher import Publisher, leave_note, written_name
from .reader import Reader, Saved
from .tree import Arrays, DeviceArrays, Kind, Outline, Scalars, outline


@dataclass(frozen=True)
class _Writing:
    """A checkpoint that is being written.

    Attributes:
        step: Of the training.
        folder: Where its files appear.
        files: Done when this rank's files are written.
        publisher, published: On rank 0; done when the checkpoint is the newest.
    """

    step: int
    folder: Path
    files: "Future[None]"
    publisher: Publisher | None = None
    published: "Future[None] | None" = None


class Checkpoints:
    """Checkpoints of a training in a folder, written in the background.

        with Checkpoints("run1", comm, keep=3) as checkpoints:
            saved = checkpoints.load()                    # None where there is none
            ...
                checkpoints.save(step, replicated={"params": params}, own={"random": ...})

    `save` copies the state in memory and returns; a thread writes it. A checkpoint counts once the
    files of all ranks are complete and on the disk. Hashes are compared when it is read: a damaged
    checkpoint is refused, with the reason, and the one before is loaded.

    State is a nest of dicts, lists and tuples of arrays, numbers, texts, True, False, None. Nothing
    is pickled. Files are in the format of safetensors, with a manifest in JSON.

    Args:
        folder: On a file system that all ranks share; made where it is missing. With None, `load`
            finds no checkpoint, and `save` does nothing.
        comm: The ranks.
        keep: How many of the newest checkpoints stay, from 1.
        seed: Of the training; a checkpoint of another seed is refused.

    Attributes:
        save_s: Seconds from the last call of `save` until this rank's part of it was complete, on
            rank 0 the whole; 0 before the first.

    Raises:
        CheckpointError: Another job writes into the folder, or not all ranks can.
        ConfigError: The ranks' arguments differ, or are wrong.

    Collective: yes. Blocking: yes.
    """

    kinds: ClassVar[Sequence[Kind]] = (Arrays(), Scalars(), DeviceArrays())

    def __init__(self, folder: str | os.PathLike[str] | None, comm: Communicator, *, keep: int = 3,
                 seed: int | None = None) -> None:
        refuse_other_than_communicators(comm)
        folder = None if folder is None else path("folder", folder)
        self._comm, self._keep = comm, whole_number("keep", keep, 1)
        self._seed = None if seed is None else whole_number("seed", seed)
        self._copies = {name: Copy() for name in (written_name(None), written_name(comm.rank))}
        # To hash, to write and to publish. The process does not end before they are done.
        self._threads = ThreadPoolExecutor(3, "mpiring-checkpoint")
        self._refused: set[str] = set()
        self._writing: _Writing | None = None
        self._count = 0
        self._closed = False
        self.save_s = 0.0
        mine = (folder, self._keep, self._seed)
        for rank, theirs in enumerate(comm.allgather_object(mine)):
            if theirs != mine:
                raise ConfigError(f"rank {comm.rank}: (folder, keep, seed) is {mine}, but rank "
                                  f"{rank} has {theirs}; give every rank the same")
        self._folder = None if folder is None else Path(folder)
        self._lock: Lock | None = None
        if self._folder is not None:
            self._token, self._lock = open_folder(self._folder, comm)

    def save(self, step: int, *, replicated: Any = None, own: Any = None) -> None:
        """Copy the state, and begin to write it; return while it is being written.

        Waits for the checkpoint before, if that is not written yet.

        Args:
            step: Of the training; from 0.
            replicated: State that is equal on all ranks; rank 0's is written.
            own: State of this rank, such as reducers' residuals and the state of random numbers;
                None where there is none.

        Raises:
            ConfigError: The state holds something that cannot be saved; says what and where. On
                all ranks.
            CheckpointError: The checkpoint before could not be written; says why. On all ranks.
            ClosedError: After `close`.

        Collective: yes. Blocking: until the state is copied.
        """
        if self._folder is None:
            return
        if self._closed:
            raise ClosedError(f"rank {self._comm.rank}: these checkpoints are closed; save before")
        began = time.monotonic()
        found, ranks = self._outlined(step, replicated, own)
        # JSON has no integers of NumPy.
        step = int(step)
        self.wait()
        for name, outlined in found.items():
            self._copies[name].take(outlined)
        self._count += 1
        written = self._folder / f"{WRITING}{self._token}-{self._count}"
        # Each task waits only for tasks that were submitted before it.
        digests = {name: self._threads.submit(self._copies[name].digest) for name in found}
        files = self._threads.submit(self._write, written, digests, began)
        if self._comm.rank:
            self._writing = _Writing(step, written, files)
            return
        publisher = Publisher(
            self._folder, written, [written_name(None), *map(written_name, ranks)],
            self._comm.config.stall_timeout_s)
        published = self._threads.submit(self._publish, publisher, files, step, began)
        self._writing = _Writing(step, written, files, publisher, published)

    def _outlined(self, step: int, replicated: Any, own: Any) -> tuple[
            dict[str, Outline], list[int]]:
        """Return what this rank is to write, and which ranks write state of their own.

        Raises:
            ConfigError: The state of a rank cannot be saved; on all ranks.
        """
        found, problem = {}, ""
        try:
            whole_number("step", step, 0)
            found[written_name(None)] = outline(replicated, self.kinds, "replicated")
            if own is not None:
                found[written_name(self._comm.rank)] = outline(own, self.kinds, "own")
        except ConfigError as exc:
            problem = f"{where(self._comm)}: {exc}"
        everybodys = self._comm.allgather_object(
            (problem, None if problem else step, own is not None))
        for rank, (theirs, its_step, _) in enumerate(everybodys):
            if theirs or its_step != everybodys[0][1]:
                raise ConfigError(theirs or f"rank {rank} saves step {its_step}, but rank 0 saves "
                                            f"step {everybodys[0][1]}")
        if self._comm.rank:
            del found[written_name(None)]
        return found, [rank for rank, (_, _, has_own) in enumerate(everybodys) if has_own]

    def _write(self, written: Path, digests: Mapping[str, "Future[str]"], began: float) -> None:
        """Write this rank's files; in the background."""
        try:
            # A rank without files does not make the folder: rank 0 may have renamed it already.
            if digests:
                written.mkdir(exist_ok=True)
            for name, digest in digests.items():
                self._copies[name].write(written, name, digest)
        except OSError as exc:
            problem = f"{where(self._comm)}: {exc}"
            leave_note(written, self._comm.rank, problem)
            raise CheckpointError(problem) from exc
        self.save_s = time.monotonic() - began

    def _publish(self, publisher: Publisher, files: "Future[None]", step: int,
                 began: float) -> None:
        """Make the files of all ranks a checkpoint; in the background of rank 0."""
        files.result()
        facts = {"step": step, "size": self._comm.size, "seed": self._seed}
        try:
            publisher.publish(facts, self._keep, self._refused)
        except OSError as exc:
            raise CheckpointError(f"{where(self._comm)}: {exc}") from exc
        self.save_s = time.monotonic() - began

    def wait(self) -> None:
        """Return when the last `save` is complete.

        Raises:
            CheckpointError: It failed; says why. On all ranks. Earlier checkpoints are untouched,
                and another `save` may follow.

        Collective: yes. Blocking: yes.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        problems = self._comm.allgather_object(_problem_of(writing.files))
        problem = next(filter(None, problems), "")
        if writing.publisher is not None:
            if problem:
                writing.publisher.give_up()
            problem = problem or _problem_of(writing.published)
        problem = self._comm.broadcast_object(problem, root=0)
        if problem:
            if writing.publisher is not None:
                _problem_of(writing.published)
                remove(writing.folder)
            raise CheckpointError(f"the checkpoint of step {writing.step} was not written: "
                                  f"{problem}. Those before are untouched")

    def load(self) -> Saved | None:
        """Return the newest complete checkpoint; the same on all ranks.

        Returns:
            None where the folder holds no checkpoint. `own` is None, with the reason logged, where
            the number of ranks was another.

        Raises:
            CheckpointError: There are checkpoints, but none can be used; says why.

        Collective: yes. Blocking: yes.
        """
        if self._folder is None:
            return None
        self.wait()
        return Reader(self._folder, self._comm, self.kinds, self._seed, self._refused).newest()

    def close(self) -> None:
        """Wait for what is being written, and let other jobs use the folder.

        Raises: as `wait`.

        Collective: yes. Blocking: yes.
        """
        try:
            self.wait()
        finally:
            self._release()

    def _release(self) -> None:
        self._closed = True
        if self._writing is not None and self._writing.publisher is not None:
            self._writing.publisher.give_up()
        self._threads.shutdown(wait=self._writing is None)
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        # After an exception the other ranks do not close.
        if error is None:
            self.close()
        else:
            self._release()


def _problem_of(future: "Future[None] | None") -> str:
    """Wait for a thread; return what went wrong in it, or ""."""
    error = None if future is None else future.exception()
    if error is None:
        return ""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
