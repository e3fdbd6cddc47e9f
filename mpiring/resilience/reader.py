"""Finds the newest checkpoint from which all ranks can resume, and reads it on all ranks."""

import logging
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import CheckpointError
from ..memory.digest import xxh3
from ..operations.consistency import Ranks, same_on_all
from ..sharding.sliced import Range
from ..text import count
from .checkpoint_file import Content, Layout, has_fast_hash, map_file, name_of, read, verify
from .folder import candidates, on_all_ranks, on_rank_0, step_of
from .manifest import (REPLICATED, SHARDED, Entry, own_name, owned_ranges, piece_name, range_text,
                       read_manifest, slices_name)
from .tree import Bytes, Kind, SlicedTensors, rebuild

_log = logging.getLogger("mpiring")

# Path and length.
File = tuple[Path, int]


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was read.

    Attributes:
        name: Name of its folder.
        step: Training step.
        size: Number of ranks that saved it.
        replicated: State of all ranks, saved by rank 0.
        own: State of this rank; None if it saved none, or if the number of ranks was different.
        sharded: State that was cut into slices, for any number of ranks; None if there is none.
            Its `Sliced` leaves have the pieces of all ranks, mapped into memory read-only. A piece
            costs nothing until it is read. Read the pieces that you need (by `load_state_dict` or
            `whole`) before the next `save`, which may delete the files.
    """

    name: str
    step: int
    size: int
    replicated: Any
    own: Any
    sharded: Any


class Readers(Ranks, Protocol):
    """The part of a Communicator that Reader needs."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def broadcast(self, x: Any, /, *, root: int) -> Any:
        """Copy an array of rank `root` to all ranks, in place."""


class Reader:
    """Reads checkpoints together with the other ranks.

    `newest` adds the names of checkpoints that cannot be used to `refused`. `left_out` is the
    reason why it has left out the own state of each rank; "" if it has not.
    """

    def __init__(self, folder: Path, comm: Readers, kinds: Sequence[Kind], seed: int | None,
                 refused: set[str]) -> None:
        self._folder, self._comm, self._kinds = folder, comm, (*kinds, SlicedTensors())
        self._seed, self._refused = seed, refused
        self.left_out = ""

    def newest(self, step: int | None = None) -> Saved | None:
        """Return the newest complete checkpoint, or that of a step; see Checkpoints.load.

        Collective: yes. Blocking: yes.
        """
        names, remark = on_rank_0(self._comm, lambda: candidates(self._folder))
        if remark:
            self._warn(f"{self._folder}: {remark}; the newest checkpoint is used instead")
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
                f"no checkpoint in {self._folder} can be used: {'; '.join(problems)}. To start "
                f"again, use another folder")
        return None

    def _read(self, name: str) -> Saved:
        """Read a checkpoint; all ranks raise the same CheckpointError if a rank cannot use it."""
        path, self.left_out = self._folder / name, ""
        manifest = on_rank_0(self._comm, lambda: read_manifest(path))
        if self._seed is not None and manifest["seed"] != self._seed:
            raise CheckpointError(f"it is of seed {manifest['seed']}, not {self._seed}")
        if any(map(has_fast_hash, manifest["files"])):
            # Without XXH3, no older checkpoint is tried, because this one may be good.
            with same_on_all(self._comm, f"load of {name}"):
                xxh3()
        files = {name_of(file): (path / file, nbytes)
                 for file, nbytes in manifest["files"].items()}
        slices = manifest.get("slices")
        same_size = manifest["size"] == self._comm.size
        own_file = own_name(self._comm.rank)
        wanted = [own_file] if same_size else []
        if self._comm.rank == 0:
            wanted += [REPLICATED, SHARDED]
        contents, pieces = self._read_files(
            {name: files[name] for name in wanted if name in files}, slices or {}, files)
        if not same_size and any(name.startswith("rank-") for name in files):
            self.left_out = (f"{path}: the own state of {count(manifest['size'], 'rank')} does not "
                             f"fit {count(self._comm.size, 'rank')}")
        replicated = self._broadcast(contents.get(REPLICATED))
        sharded = None if slices is None else self._broadcast(contents.get(SHARDED))
        # Only some ranks may fail, because each rank has a different `own`.
        with same_on_all(self._comm, "load", error=CheckpointError):
            saved = Saved(name, manifest["step"], manifest["size"], self._rebuild(replicated),
                          self._rebuild(contents.get(own_file)), self._rebuild(sharded, pieces))
        return saved

    def _read_files(self, wanted: Mapping[str, File], slices: Mapping[str, Entry],
                    files: Mapping[str, File],
                    ) -> tuple[dict[str, Content], dict[str, dict[Range, Bytes]]]:
        """Read the wanted files; check each file with slices on one rank, and map their pieces.

        All ranks raise the same CheckpointError if a rank cannot use a file.
        """
        by_rank = {rank: files[slices_name(rank)] for rank in sorted(
            {rank for entry in slices.values() for rank in entry["ranks"].values()})}
        contents: dict[str, Content] = {}
        mapped: dict[int, Bytes] = {}

        def check() -> dict[int, Layout]:
            contents.update({name: read(*file) for name, file in wanted.items()})
            mapped.update({rank: map_file(*file) for rank, file in by_rank.items()})
            return {rank: verify(*by_rank[rank])
                    for rank in list(by_rank)[self._comm.rank::self._comm.size]}

        checked = on_all_ranks(self._comm, "Checkpoints.load", check, CheckpointError,
                               f"rank {self._comm.rank}")
        return contents, _pieces_of(slices, mapped, dict(ChainMap(*checked)))

    def _rebuild(self, content: Content | None, pieces: Mapping[str, Any] = {}) -> Any:
        return None if content is None else rebuild(
            content.text, {**content.data, **pieces}, self._kinds)

    def _broadcast(self, content: Content | None) -> Content:
        """Broadcast a content that rank 0 has read: the network is faster than a shared disk."""
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


def _pieces_of(by_name: Mapping[str, Entry], files: Mapping[int, Bytes],
               layouts: Mapping[int, Layout]) -> dict[str, dict[Range, Bytes]]:
    """Return the bytes of all pieces, by tensor name and range, in files mapped into memory.

    Raises CheckpointError if a file lacks a piece that the manifest names.
    """
    pieces: dict[str, dict[Range, Bytes]] = {name: {} for name in by_name}
    for name, entry in by_name.items():
        for ends, rank in owned_ranges(entry):
            bounds = layouts[rank].get(piece_name(name, ends))
            if bounds is None:
                raise CheckpointError(f"the file of rank {rank} does not have the elements "
                                      f"{range_text(ends)} of {name}, which the manifest names")
            pieces[name][ends] = files[rank][slice(*bounds)]
    return pieces
