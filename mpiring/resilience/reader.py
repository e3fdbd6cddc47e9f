"""Finds the newest checkpoint that all ranks can resume from, and reads it on all of them."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import CheckpointError
from ..operations.consistency import Ranks, same_on_all
from ..text import count
from .checkpoint_file import Content, Layout, name_of, read, verify
from .folder import candidates, on_all_ranks, on_rank_0, step_of
from .manifest import read_manifest
from .publisher import SHARDED, written_name
from .slices import File, MappedSlices, SlicedTensors, files_of, refuse_gaps
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
        sharded: State that was cut into slices, for any number of ranks; None if there is none.
            Its `Sliced` leaves have the pieces of all ranks, mapped into memory read-only: what is
            not read costs nothing. Read what is needed (`load_state_dict`, or `whole`) before the
            next `save`, which may delete the files.
    """

    name: str
    step: int
    size: int
    replicated: Any
    own: Any
    sharded: Any


class Readers(Ranks, Protocol):
    """The part of a Communicator that reads a checkpoint."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def broadcast(self, x: Any, /, *, root: int) -> Any:
        """Copy an array of rank `root` to all ranks, in place."""


class Reader:
    """Reads checkpoints together with the other ranks.

    Args:
        folder: Of checkpoints.
        comm: The ranks.
        kinds: The arrays that states may hold.
        seed: Of the training; None accepts any.
        refused: The names of checkpoints that cannot be used are added to it.
    """

    def __init__(self, folder: Path, comm: Readers, kinds: Sequence[Kind], seed: int | None,
                 refused: set[str]) -> None:
        self._folder, self._comm, self._kinds = folder, comm, (*kinds, SlicedTensors())
        self._seed, self._refused = seed, refused

    def newest(self, step: int | None = None) -> Saved | None:
        """Return the newest complete checkpoint; None where there is none; see Checkpoints.

        Args:
            step: Of the checkpoint; None for any.

        Collective: yes. Blocking: yes.
        """
        names, remark = on_rank_0(self._comm, lambda: candidates(self._folder))
        if remark:
            self._warn(f"{self._folder}: {remark}; the newest checkpoint is looked for instead")
        problems = []
        for name in (name for name in names if step in (None, step_of(name))):
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
        manifest = on_rank_0(self._comm, lambda: read_manifest(path))
        if self._seed is not None and manifest["seed"] != self._seed:
            raise CheckpointError(f"it is of seed {manifest['seed']}, not {self._seed}")
        files = {name_of(file): (file, nbytes) for file, nbytes in manifest["files"].items()}
        slices = manifest.get("slices")
        refuse_gaps(slices or {})
        same_size = manifest["size"] == self._comm.size
        wanted = [written_name(self._comm.rank)] if same_size else []
        if self._comm.rank == 0:
            wanted += [written_name(None), SHARDED]
        contents, mapped, layouts = self._opened(
            path, {name: files[name] for name in wanted if name in files},
            files_of(slices or {}, files))
        pieces = mapped.pieces(slices or {}, layouts)
        if not same_size and any(name.startswith("rank-") for name in files):
            self._warn(
                f"{path}: the own state of {count(manifest['size'], 'rank')} (residuals, random "
                f"numbers) does not fit {count(self._comm.size, 'rank')}, and is left out")
        replicated = self._shared(contents.get(written_name(None)))
        own = contents.get(written_name(self._comm.rank))
        sharded = None if slices is None else self._shared(contents.get(SHARDED))
        # Each rank has another `own`.
        with same_on_all(self._comm, "load", error=CheckpointError):
            saved = Saved(name, manifest["step"], manifest["size"], self._rebuilt(replicated),
                          None if own is None else self._rebuilt(own),
                          None if sharded is None else self._rebuilt(sharded, pieces))
        return saved

    def _opened(self, path: Path, wanted: Mapping[str, File], slices: Mapping[int, File],
                ) -> tuple[dict[str, Content], MappedSlices, dict[int, Layout]]:
        """Read and check the files of a checkpoint; each of `slices` is checked by one rank.

        Args:
            wanted: What this rank reads.
            slices: The files with pieces, by the rank that has saved them.

        Returns:
            What was read; the files with pieces; where these have them, found by all ranks.

        Raises:
            CheckpointError: A rank cannot use a file; the same on all ranks.
        """
        contents: dict[str, Content] = {}
        mapped: list[MappedSlices] = []

        def check() -> dict[int, Layout]:
            contents.update({name: read(path / file, nbytes)
                             for name, (file, nbytes) in wanted.items()})
            mapped.append(MappedSlices(path, slices))
            return {rank: verify(path / slices[rank][0], slices[rank][1])
                    for rank in list(slices)[self._comm.rank::self._comm.size]}

        layouts = on_all_ranks(self._comm, "Checkpoints.load", check, CheckpointError,
                               f"rank {self._comm.rank}")
        return contents, mapped[0], {
            rank: layout for checked in layouts for rank, layout in checked.items()}

    def _rebuilt(self, content: Content, pieces: Mapping[str, Any] | None = None) -> Any:
        return rebuild(content.text, {**content.data, **(pieces or {})}, self._kinds)

    def _shared(self, content: Content | None) -> Content:
        """Return on all ranks what rank 0 has read: the network is faster than a shared disk."""
        outline = None if content is None else (
            content.text, {name: x.size for name, x in content.data.items()})
        text, sizes = self._comm.broadcast_object(outline, root=0)
        data = content.data if content is not None else {
            name: np.empty(size, np.uint8) for name, size in sizes.items()}
        for x in data.values():
            self._comm.broadcast(x, root=0)
        return Content(text, data)

    def _warn(self, text: str) -> None:
        if self._comm.rank == 0:
            _log.warning("%s", text)
