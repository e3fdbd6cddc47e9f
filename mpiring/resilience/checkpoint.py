"""Saves the state of a training run in the background, and loads the newest complete checkpoint."""

import collections
import logging
import os
import random
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..arguments import path, refuse_other_state, whole_number
from ..communicator import Communicator
from ..errors import CheckpointError, ClosedError
from ..files import UNFINISHED
from ..operations.consistency import same_on_all
from ..world import or_world
from .checkpoint_file import Copy
from .folder import (Lock, await_files, delete_old, leave_note, open_folder, publish, rank_and_host,
                     remove)
from .plan import SavePlan, agree
from .reader import Reader, Saved
from .tree import Arrays, DeviceArrays, Kind, Scalars


_log = logging.getLogger("mpiring")

# Effect of random numbers that are not restored.
NEW_SEEDS = ("Ranks draw from new seeds: data order and dropout that depend on them differ from an "
             "uninterrupted run")


@dataclass(frozen=True)
class _Writing:
    """A checkpoint that is being written.
    Its files appear in `folder`; `files` is done when this rank's are written, and `published`,
    None except on rank 0, when the checkpoint is published. `canceled` prevents its publication.
    """

    step: int
    folder: Path
    canceled: threading.Event
    files: "Future[None]"
    published: "Future[None] | None" = None


class Checkpoints:
    """Checkpoints of a training run in a folder, written in the background.

        with Checkpoints("run1", comm, keep=3) as checkpoints:
            saved = checkpoints.load()                    # None if there is none
            ...
                checkpoints.save(step, replicated={"params": params}, own={"random": ...})

    `save` copies the state in memory and returns; a thread writes it. A checkpoint is complete once
    the files of all ranks are on the disk. `load` verifies their hashes. If a checkpoint is
    damaged, `load` logs the reason and loads the previous checkpoint.

    State is a pytree of dicts, lists and tuples with arrays, numbers, strings, True, False, None.
    Nothing is pickled. Files are safetensors, with a manifest in JSON.

    Args:
        folder: Folder on a file system that all ranks share; created if it is missing. With None,
            `load` finds no checkpoint, and `save` does nothing.
        comm: Communicator whose ranks train together; by default, all ranks.
        keep: Number of checkpoints to keep, at least 1; older checkpoints are deleted.
        seed: Seed of the training run; a checkpoint with another seed is refused.

    Attributes:
        save_s: Seconds from the last call of `save` until this rank's files were written; on rank
            0, until the checkpoint was published. 0 before the first call.

    Raises:
        CheckpointError: Another job writes to the folder, or a rank cannot write to it.
        ConfigError: An argument is wrong, or the ranks' arguments differ.

    Collective: yes. Blocking: yes.
    """

    kinds: ClassVar[Sequence[Kind]] = (Arrays(), Scalars(), DeviceArrays())

    def __init__(self, folder: str | os.PathLike[str] | None,
                 comm: Communicator | None = None, *, keep: int = 3,
                 seed: int | None = None) -> None:
        comm = or_world(comm)
        with same_on_all(comm, "Checkpoints") as same:
            folder = same["folder"] = None if folder is None else path("folder", folder)
            keep = same["keep"] = whole_number("keep", keep, 1)
            seed = same["seed"] = None if seed is None else whole_number("seed", seed)
        self._comm, self._keep, self._seed = comm, keep, seed
        self._copies: dict[str, Copy] = collections.defaultdict(Copy)
        # Threads that hash, write and publish. The process does not end before they are done.
        self._threads = ThreadPoolExecutor(3, "mpiring-checkpoint")
        self._refused: set[str] = set()
        self._writing: _Writing | None = None
        self._count = 0
        self._closed = False
        self.save_s = 0.0
        self._folder = None if folder is None else Path(folder)
        self._lock: Lock | None = None
        if self._folder is not None:
            self._token, self._lock = open_folder(self._folder, comm)

    def save(self, step: int, *, replicated: Any = None, own: Any = None,
             sharded: Any = None) -> None:
        """Copy the state and start to write it in the background.

        If the previous checkpoint is not written yet, wait for it.

        Args:
            step: Training step, from 0.
            replicated: State that is equal on all ranks; rank 0 writes it.
            own: State of this rank, such as residuals of Reducers and states of random generators;
                None if there is none.
            sharded: State that is cut into slices, such as an optimizer's. It is a pytree that is
                equal on all ranks, except for its `Sliced` leaves, which hold the pieces of this
                rank. Each rank writes its own pieces, and rank 0 writes the rest.

        Raises:
            ConfigError: The state holds something that cannot be saved, `sharded` differs between
                ranks, or a range in it is saved by no rank or by two. Raised on all ranks.
            CheckpointError: The previous checkpoint could not be written. Raised on all ranks.
            ClosedError: `close` was called before.

        Collective: yes. Blocking: until the state is copied.
        """
        if self._folder is None:
            return
        if self._closed:
            raise ClosedError(f"rank {self._comm.rank}: these checkpoints are closed; save before")
        began = time.monotonic()
        plan = agree(self._comm, self.kinds, step, replicated, own, sharded)
        self.wait()
        for name, outlined in plan.outlines.items():
            self._copies[name].take(outlined)
        self._count += 1
        staging = self._folder / f"{UNFINISHED}{self._token}-{self._count}"
        # Each task waits only for tasks that were submitted before it.
        digests = {
            name: self._threads.submit(self._copies[name].digest, fast=plan.fast)
            for name in plan.outlines}
        files = self._threads.submit(self._write, staging, digests, began)
        canceled = threading.Event()
        published = None if self._comm.rank else self._threads.submit(
            self._publish, staging, canceled, files, plan, began)
        self._writing = _Writing(plan.step, staging, canceled, files, published)

    def _write(self, staging: Path, digests: Mapping[str, "Future[str]"], began: float) -> None:
        try:
            # A rank without files does not create the folder: rank 0 may already have renamed it.
            if digests:
                staging.mkdir(exist_ok=True)
            for name, digest in digests.items():
                self._copies[name].write(staging, name, digest)
        except OSError as exc:
            leave_note(staging, self._comm.rank, f"{rank_and_host(self._comm)}: {exc}")
            raise
        self.save_s = time.monotonic() - began

    def _publish(self, staging: Path, canceled: threading.Event, files: "Future[None]",
                 plan: SavePlan, began: float) -> None:
        files.result()
        folder = staging.parent
        names = await_files(staging, plan.names, self._comm.config.stall_timeout_s, canceled)
        publish(folder, staging, names, {"step": plan.step, "size": self._comm.size,
                                         "seed": self._seed, "slices": plan.slices})
        delete_old(folder, self._keep, self._refused)
        self.save_s = time.monotonic() - began

    def wait(self) -> None:
        """Return when the last `save` is complete.

        Raises:
            CheckpointError: The last `save` failed. Raised on all ranks. Earlier checkpoints are
                unchanged, and `save` may be called again.

        Collective: yes. Blocking: yes.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        problems = self._comm.allgather_object(self._problem_of(writing.files),
                                               label="Checkpoints.wait")
        problem = next(filter(None, problems), "")
        if problem:
            writing.canceled.set()
        late_problem = self._problem_of(writing.published)
        problem = self._comm.broadcast_object(problem or late_problem, root=0)
        if problem:
            if self._comm.rank == 0:
                remove(writing.folder)
            raise CheckpointError(f"the checkpoint of step {writing.step} was not written: "
                                  f"{problem}. Those before are untouched")

    def _problem_of(self, future: "Future[None] | None") -> str:
        """Wait for a task; return the text of its error, or ""."""
        error = None if future is None else future.exception()
        if isinstance(error, OSError):
            return f"{rank_and_host(self._comm)}: {error}"
        if error is None or isinstance(error, CheckpointError):
            return str(error or "")
        return f"{type(error).__name__}: {error}"

    def load(self) -> Saved | None:
        """Return the newest complete checkpoint; the same on all ranks.

        Returns:
            None if the folder holds no checkpoint. If another number of ranks saved the checkpoint,
            `own` is None, and rank 0 logs the reason and the effect; `sharded` fits any number of
            ranks.

        Raises:
            CheckpointError: There are checkpoints, but none can be used.

        Collective: yes. Blocking: yes.
        """
        saved, left_out = self._newest()
        if left_out and self._comm.rank == 0:
            _log.warning("%s, and is left out (residuals, random numbers). %s", left_out, NEW_SEEDS)
        return saved

    def _newest(self) -> tuple[Saved | None, str]:
        """Return the newest complete checkpoint, and why its `own` is None; or ""."""
        if self._folder is None:
            return None, ""
        self.wait()
        reader = Reader(self._folder, self._comm, self.kinds, self._seed, self._refused)
        return reader.newest(), reader.left_out

    def close(self) -> None:
        """Wait until the last checkpoint is written, and let other jobs use the folder.

        Raises the same errors as `wait`.

        Collective: yes. Blocking: yes.
        """
        try:
            self.wait()
        finally:
            self._release()

    def _release(self) -> None:
        self._closed = True
        if self._writing is not None:
            self._writing.canceled.set()
        self._threads.shutdown(wait=self._writing is None)
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # After an exception, the other ranks may not call `close`.
        if error is None:
            self.close()
        else:
            self._release()


def random_state() -> dict[str, Any]:
    """Return the state of `random` and `numpy.random`, as a pytree for a checkpoint.

    Each rank has its own state. The state does not include `numpy.random.Generator` objects; save
    their `generator.bit_generator.state` separately.

    Collective: no.
    """
    return {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)}


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the state of `random` and `numpy.random`.

    Args:
        state: Result of `random_state`.

    Raises:
        ConfigError: `state` does not come from `random_state`.

    Collective: no.
    """
    refuse_other_state(state, ("python", "numpy"), "of random numbers")
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
