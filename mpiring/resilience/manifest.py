"""Writes and reads the manifest of a checkpoint: files, facts, and a hash of the manifest."""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..files import parsed, read
from ..sharding.sliced import Range
from .checkpoint_file import has_fast_hash, name_of, reading

FORMAT = "mpiring checkpoint"
# Version 2 added sharded state. Version 3 is written only if file names have XXH3 hashes.
_OLDEST, _NEWEST = 1, 3
MANIFEST = "manifest.json"
# Entry of a tensor: its dtype, its shape, and the rank that saved each range.
Entry = dict[str, Any]
# Names of files, without their hashes. The first file has the replicated state. The second has the
# tree of the sharded state, with all values that are equal on all ranks.
REPLICATED, SHARDED = "replicated", "sharded"
# Enough for 3 million ranges: a thousand tensors on each of 3,000 ranks.
_MAX_BYTES, _LEVELS = 128 << 20, 5
# Longest file of any file system.
_MOST_BYTES = 1 << 63
_FILE = re.compile(
    r"(replicated|sharded|rank-\d{5,9}|slices-\d{5,9})\.(xxh3-)?[0-9a-f]{32}\.safetensors")
_RANGE = re.compile(r"\d{1,18}:\d{1,18}")


def own_name(rank: int) -> str:
    """Return the name of the file with the state of one rank, without its hash."""
    return f"rank-{rank:05d}"


def slices_name(rank: int) -> str:
    """Return the name of the file with a rank's pieces of sharded state, without its hash."""
    return f"slices-{rank:05d}"


def range_text(ends: Range) -> str:
    """Return a range as a string, for names and the manifest."""
    return f"{ends[0]}:{ends[1]}"


def piece_name(tensor: str, ends: Range) -> str:
    """Return the name of a piece of a tensor in its file."""
    return f"{tensor}[{range_text(ends)}]"


def version_of(files: Iterable[str]) -> int:
    """Return the oldest version of the manifest that allows files of these names."""
    return 3 if any(map(has_fast_hash, files)) else 2


def sealed(manifest: Mapping[str, Any]) -> str:
    """Return the JSON of a manifest with its hash; raise CheckpointError if it is too long."""
    text = json.dumps({**manifest, "sha256": _hash_of(manifest)}, indent=1) + "\n"
    if len(text) > _MAX_BYTES:
        raise CheckpointError(f"{MANIFEST} would have {len(text)} bytes, more than {_MAX_BYTES}; "
                              f"let ranks save fewer, longer slices")
    return text


def _hash_of(manifest: Mapping[str, Any]) -> str:
    text = json.dumps({key: manifest[key] for key in sorted(manifest) if key != "sha256"})
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest; raise CheckpointError if it is not as mpiring wrote it."""
    with reading(MANIFEST):
        text = read(checkpoint / MANIFEST, _MAX_BYTES)
    try:
        manifest = parsed(text, _LEVELS)
    except ValueError as exc:
        raise CheckpointError(f"{MANIFEST} is torn: {exc}") from exc
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{MANIFEST} is not one of mpiring's")
    version = manifest.get("version")
    if version not in range(_OLDEST, _NEWEST + 1):
        raise CheckpointError(f"{MANIFEST} has version {version!r}, but this mpiring reads "
                              f"versions {_OLDEST} to {_NEWEST}")
    if manifest.get("sha256") != _hash_of(manifest):
        raise CheckpointError(f"{MANIFEST} does not have the content that was written")
    problem = _malformed(manifest)
    if problem:
        raise CheckpointError(f"{MANIFEST} is not as mpiring writes it: {problem}")
    problem = _missing(manifest)
    if problem:
        raise CheckpointError(f"the manifest is incomplete: {problem}")
    return manifest


def _malformed(manifest: Mapping[str, Any]) -> str:
    """Return what is wrong with a manifest's facts, or ""; the hash does not prove their origin."""
    def is_number(x: Any, least: int, end: float = math.inf) -> bool:
        return type(x) is int and least <= x < end

    size: Any = manifest.get("size")
    seed = manifest.get("seed")
    files, slices = manifest.get("files"), manifest.get("slices")
    if not is_number(manifest.get("step"), 0) or not is_number(size, 1):
        return "step or size is no number"
    if not isinstance(manifest.get("written"), str) or not isinstance(
            manifest.get("versions"), dict):
        return "it does not say when, or by which versions, it was written"
    if seed is not None and type(seed) is not int:
        return "seed is no number"
    if not isinstance(files, dict) or not all(
            _FILE.fullmatch(name) and is_number(nbytes, 0, _MOST_BYTES)
            for name, nbytes in files.items()):
        return "files are not names and lengths"
    if not any(name.startswith(f"{REPLICATED}.") for name in files):
        return "it has no replicated state"
    if slices is not None and not isinstance(slices, dict):
        return "slices are no object"
    for name, entry in (slices or {}).items():
        if not (isinstance(entry, dict)
                and isinstance(entry.get("shape"), list) and isinstance(entry.get("ranks"), dict)
                and all(is_number(length, 0) for length in entry["shape"])
                and all(_RANGE.fullmatch(ends) and is_number(rank, 0, size)
                        for ends, rank in entry["ranks"].items())):
            return f"{name!r:.80} in slices has no shape and ranks"
    return ""


def _missing(manifest: Mapping[str, Any]) -> str:
    """Return which elements of the sharded state, or which files, the manifest lacks; or ""."""
    files, ranks = {name_of(file) for file in manifest["files"]}, set[int]()
    for name, entry in (manifest.get("slices") or {}).items():
        problem = gap(name, owned_ranges(entry), math.prod(entry["shape"]))
        if problem:
            return problem.partition(";")[0]
        ranks.update(entry["ranks"].values())
    lost = [rank for rank in sorted(ranks) if slices_name(rank) not in files]
    return f"it names no file of rank {lost[0]}" if lost else ""


def gap(name: str, owned: Iterable[tuple[Range, int]], size: int) -> str:
    """Return which elements of a tensor were saved by no rank or by two ranks; or ""."""
    end, before = 0, 0
    for (start, stop), rank in sorted(owned):
        if start < end:
            return (f"elements {start} to {min(end, stop) - 1} of {name} in sharded are saved by "
                    f"rank {before} and by rank {rank}; let each rank save its own slice")
        if start > end:
            return _not_saved(name, end, start)
        end, before = stop, rank
    return _not_saved(name, end, size) if end != size else ""


def _not_saved(name: str, start: int, stop: int) -> str:
    return (f"elements {start} to {stop - 1} of {name} in sharded are saved by no rank; let each "
            f"rank save its own slice, and save on all ranks")


def owned_ranges(entry: Entry) -> Iterator[tuple[Range, int]]:
    """Yield the ranges of a tensor, each with the rank that has saved it."""
    for text, rank in entry["ranks"].items():
        start, _, stop = text.partition(":")
        yield (int(start), int(stop)), rank
