"""Describes checkpoints, lists their arrays, and finds damage, without loading them."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..files import UNFINISHED
from ..memory.pytrees import leaves
from ..sharding.sliced import Sliced
from ..text import first_few
from .checkpoint_file import name_of, tree_text, verify
from .consolidated import consolidate
from .folder import DELETING, candidates, step_of
from .manifest import MANIFEST, REPLICATED, SHARDED, own_name, read_manifest
from .reader import Saved
from .tree import STORED_KINDS, Leaf, Stored as Stored, rebuild

_STEP, _DAMAGED = "-step-", "damaged"
# Largest number of other folders that an error names.
_NAMED = 3


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in a folder.

    Its state tells whether it is complete. The manifest is empty if it cannot be read.
    """

    path: Path
    state: str
    manifest: dict[str, Any]

    @property
    def step(self) -> int | None:
        """Training step; None if the name of the folder contains none."""
        return step_of(self.path.name) if _is_named(self.path) else None

    @property
    def is_damaged(self) -> bool:
        """Whether the manifest or the length of a file shows damage."""
        return self.state.startswith(_DAMAGED)

    @property
    def nbytes(self) -> int:
        """Total length of its files, in bytes."""
        return sum(self.manifest.get("files", {}).values())


def checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the checkpoints in a folder, the newest last; raise CheckpointError without any."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder of checkpoints")
    try:
        entries = sorted(entry for entry in folder.iterdir() if entry.is_dir())
        usable, _ = candidates(folder)
    except OSError as exc:
        raise CheckpointError(f"{folder} cannot be read: {exc.strerror or exc}") from exc
    checkpoints = [_described(entry, usable) for entry in entries if _is_checkpoint(entry)]
    if not checkpoints:
        raise CheckpointError(f"no checkpoints in {folder}{_hint(folder, entries)}")
    return checkpoints


def _is_checkpoint(entry: Path) -> bool:
    return _is_named(entry) or entry.name.startswith((UNFINISHED, DELETING))


def _hint(folder: Path, entries: Sequence[Path]) -> str:
    """Return which folder the user may have meant, given the folders inside; or ""."""
    if (folder / MANIFEST).is_file():
        return (f": it is a checkpoint itself; name the folder that contains it, "
                f"{folder.resolve().parent}")
    inside = []
    for entry in entries:
        with contextlib.suppress(OSError):
            inside += [entry] if any(map(_is_checkpoint, entry.iterdir())) else []
    return f"; there are some in {first_few([*map(str, inside)], _NAMED)}" if inside else ""


def _is_named(entry: Path) -> bool:
    return _STEP in entry.name and not entry.name.startswith(".")


def _described(path: Path, usable: list[str]) -> Checkpoint:
    """Describe a checkpoint; a job may resume from the `usable` ones, the newest first."""
    if not _is_named(path):
        doing = "written" if path.name.startswith(UNFINISHED) else "deleted"
        return Checkpoint(path, f"incomplete: it is being {doing}, or its job has ended", {})
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return Checkpoint(path, f"{_DAMAGED}: {error}", {})
    for file, nbytes in manifest["files"].items():
        if not (path / file).is_file():
            return Checkpoint(path, f"{_DAMAGED}: {file} is missing", manifest)
        if (path / file).stat().st_size != nbytes:
            return Checkpoint(path, f"{_DAMAGED}: {file} has another length", manifest)
    if path.name not in usable:
        return Checkpoint(path, "incomplete: its job ended before it was the newest", manifest)
    return Checkpoint(path, "complete, newest" if path.name == usable[0] else "complete", manifest)


def chosen(folder: Path, step: int | None) -> Checkpoint:
    """Return the newest complete checkpoint, or the newest of a step, or raise CheckpointError."""
    matching = [each for each in checkpoints(folder) if each.manifest
                and (each.state.startswith("complete") if step is None else each.step == step)]
    if not matching:
        raise CheckpointError(f"{folder} holds no checkpoint" + (
            f" of step {step}" if step is not None else ""))
    return matching[-1]


def damaged_files(checkpoint: Checkpoint) -> Iterator[str]:
    """Read all files, compare their hashes, and yield a message about each damaged file."""
    for file, nbytes in checkpoint.manifest["files"].items():
        try:
            verify(checkpoint.path / file, nbytes)
        except CheckpointError as error:
            yield str(error)


def arrays_of(checkpoint: Checkpoint) -> Iterator[tuple[str, str, Stored, int]]:
    """Yield the arrays of a checkpoint: state, name, dtype and shape, number of bytes.

    The states of single ranks are represented by the state of rank 0. It raises CheckpointError if
    a file cannot be read.
    """
    files = {name_of(file): (checkpoint.path / file, nbytes)
             for file, nbytes in checkpoint.manifest["files"].items()}
    for state, name in (("replicated", REPLICATED), ("sharded", SHARDED), ("own", own_name(0))):
        if name in files:
            for path, leaf, nbytes in arrays_in(*files[name]):
                yield state, path, leaf, nbytes


def arrays_in(path: Path, nbytes: int | None = None) -> Iterator[tuple[str, Stored, int]]:
    """Yield the arrays of a file: name, dtype and shape, number of bytes.

    It raises CheckpointError if the file cannot be read, or does not have the expected `nbytes`.
    """
    tree = rebuild(tree_text(path, nbytes), defaultdict(lambda: None), STORED_KINDS)
    for keys, leaf in leaves(tree):
        if isinstance(leaf, Stored):
            yield "/".join(map(str, keys)), leaf, Leaf(leaf, None, leaf.dtype, leaf.shape).nbytes


def consolidated(folder: Path, out: Path, step: int | None) -> tuple[Saved, int]:
    """Write one file with complete arrays; return its content, and the number of joined tensors.

    For the arguments and errors, see `consolidate`.
    """
    saved = consolidate(folder, out, step)
    return saved, sum(isinstance(leaf, Sliced) for _, leaf in leaves(saved.sharded))
