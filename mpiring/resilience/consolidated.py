"""Converts a checkpoint with sliced state to one file with complete arrays, without MPI."""

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..arguments import path
from ..errors import CheckpointError
from .checkpoint_file import read_plain, write_plain
from .reader import Reader, Saved
from .tree import (STORED_KINDS, Arrays, DeviceArrays, Kind, Scalars, SlicedTensors, outline,
                   rebuild)


class _OneRank:
    """The part of a communicator that Reader needs, for a process without one."""

    rank, size = 0, 1

    def allgather_object(self, obj: Any, *, label: str = "") -> list[Any]:
        """Return the object of the only rank."""
        return [obj]

    def broadcast_object(self, obj: Any, *, root: int) -> Any:
        """Return the object."""
        return obj

    def broadcast(self, x: Any, *, root: int) -> Any:
        """Return the array."""
        return x


def consolidate(folder: Path, out: Path, step: int | None = None) -> Saved:
    """Write a checkpoint, by default the newest, to one file for `load_file`; return it.

    The file has the safetensors format. The names of its arrays are their paths in the state, such
    as `replicated/...` and `sharded/...`. The ranks' own states are left out. The sharded state is
    never in memory as a whole. A job may be writing to the folder.

    Raises:
        CheckpointError: There is no such checkpoint, or the file cannot be written.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder of checkpoints")
    kinds = [kind for kind in STORED_KINDS if kind.name != SlicedTensors.name]
    saved = Reader(folder, _OneRank(), kinds, None, set()).newest(step)
    if saved is None:
        raise CheckpointError(f"{folder} holds no checkpoint" + (
            f" of step {step}" if step is not None else ""))
    tree = {"step": saved.step, "size": saved.size, "replicated": saved.replicated,
            "sharded": saved.sharded}
    try:
        write_plain(out, outline(tree, [*kinds, SlicedTensors()], "checkpoint"))
    except OSError as exc:
        raise CheckpointError(f"{out} cannot be written: {exc.strerror or exc}") from exc
    return saved


def load_file(file: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of a file from `python -m mpiring checkpoint consolidate`.

    Args:
        file: Path of the file.

    Returns:
        `step`, `size` (the number of ranks that saved the checkpoint), `replicated` and `sharded`
        as they were saved, but with complete arrays instead of `Sliced` leaves.

    Raises:
        CheckpointError: This command has not written the file.

    Collective: no.
    """
    return load_as(file, (Arrays(), Scalars(), DeviceArrays()))


def load_as(file: str | os.PathLike[str], kinds: Sequence[Kind]) -> dict[str, Any]:
    """Return the content of a file; its slices are joined to arrays of the first of the kinds."""
    content = read_plain(Path(path("file", file)))
    whole_kind = copy.copy(kinds[0])
    whole_kind.name = SlicedTensors.name
    tree = rebuild(content.text, content.data, [*kinds, whole_kind])
    if not isinstance(tree, dict) or "sharded" not in tree:
        raise CheckpointError(f"{file} was not written by python -m mpiring checkpoint consolidate")
    return tree
