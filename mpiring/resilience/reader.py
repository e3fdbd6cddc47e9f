"""Finds the newest checkpoint that all ranks can resume from, and reads it on all of them."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..communicator import Communicator
from ..errors import CheckpointError
from .checkpoint_file import Content, name_of, read
from .folder import candidates, read_manifest
from .publisher import written_name
from .tree import Kind, rebuild

_log = logging.getLogger("mpiring")


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was read.

    Attributes:
        name: Of its folder.
        step: Of the training.
        size: Number of ranks that saved it.
        replicated: State of all ranks, saved by rank 0.
        own: State of this rank; None if it saved none, or if the number of ranks was another.
    """

    name: str
    step: int
    size: int
    replicated: Any
    own: Any


class Reader:
    """Reads checkpoints together with the other ranks.

    Args:
        folder: Of checkpoints.
        comm: The ranks.
        kinds: The arrays that states may hold.
        seed: Of the training; None accepts any.
        refused: The names of checkpoints that cannot be used are added to it.
    """

    def __init__(self, folder: Path, comm: Communicator, kinds: Sequence[Kind], seed: int | None,
                 refused: set[str]) -> None:
        self._folder, self._comm, self._kinds = folder, comm, kinds
        self._seed, self._refused = seed, refused

    def newest(self) -> Saved | None:
        """Return the newest complete checkpoint; None where there is none; see Checkpoints.

        Collective: yes. Blocking: yes.
        """
        names, remark = self._on_rank_0(lambda: candidates(self._folder))
        if remark:
            self._warn(f"{self._folder}: {remark}; the newest checkpoint is looked for instead")
        problems = []
        for name in names:
            try:
                return self._read(name)
            except CheckpointError as exc:
                problems.append(f"checkpoint {name} is refused: {exc}")
                self._refused.add(name)
                self._warn(f"{self._folder}: {problems[-1]}")
        if problems:
            raise CheckpointError(
                f"no checkpoint in {self._folder} can be used: {'; '.join(problems)}. To begin "
                f"anew, give another folder")
        return None

    def _read(self, name: str) -> Saved:
        """Read a checkpoint.

        Raises:
            CheckpointError: A rank cannot use it; the same on all ranks.
        """
        path = self._folder / name
        manifest = self._on_rank_0(lambda: read_manifest(path))
        if self._seed is not None and manifest["seed"] != self._seed:
            raise CheckpointError(f"it is of seed {manifest['seed']}, not {self._seed}")
        files = {name_of(file): (file, nbytes) for file, nbytes in manifest["files"].items()}
        same_size = manifest["size"] == self._comm.size
        wanted = [written_name(self._comm.rank)] if same_size else []
        if self._comm.rank == 0:
            wanted.append(written_name(None))
        found, problem = _read_all(path, {name: files[name] for name in wanted if name in files})
        where = f"rank {self._comm.rank}: {problem}" if problem else ""
        for text in self._comm.allgather_object(where):
            if text:
                raise CheckpointError(text)
        if not same_size and len(files) > 1:
            self._warn(
                f"{path}: the own state of {manifest['size']} ranks (residuals, random numbers) "
                f"does not fit {self._comm.size} ranks, and is left out")
        replicated = self._shared(found.get(written_name(None)))
        own = found.get(written_name(self._comm.rank))
        return Saved(name, manifest["step"], manifest["size"], self._rebuilt(replicated),
                     None if own is None else self._rebuilt(own))

    def _rebuilt(self, content: Content) -> Any:
        return rebuild(content.text, content.data, self._kinds)

    def _shared(self, content: Content | None) -> Content:
        """Return on all ranks what rank 0 has read: the network is faster than a shared disk."""
        sizes = None if content is None else {name: x.size for name, x in content.data.items()}
        text = None if content is None else content.text
        text, sizes = self._comm.broadcast_object((text, sizes), root=0)
        data = content.data if content is not None else {
            name: np.empty(size, np.uint8) for name, size in (sizes or {}).items()}
        for x in data.values():
            self._comm.broadcast(x, root=0)
        return Content(text or "", data)

    def _on_rank_0(self, function: Callable[[], Any]) -> Any:
        """Call a function on rank 0, and return its result on all ranks.

        Raises:
            CheckpointError: It failed; on all ranks.
        """
        result, problem = None, ""
        if self._comm.rank == 0:
            try:
                result = function()
            except (OSError, CheckpointError) as exc:
                problem = str(exc)
        result, problem = self._comm.broadcast_object((result, problem), root=0)
        if problem:
            raise CheckpointError(problem)
        return result

    def _warn(self, text: str) -> None:
        if self._comm.rank == 0:
            _log.warning("%s", text)


def _read_all(path: Path, files: Mapping[str, tuple[str, int]],
              ) -> tuple[dict[str, Content], str]:
    """Read files of a checkpoint; return their contents, and what is wrong, or ""."""
    found = {}
    for name, (file, nbytes) in files.items():
        try:
            found[name] = read(path / file, nbytes)
        except CheckpointError as exc:
            return found, str(exc)
    return found, ""
