"""Writes and reads the manifest of a checkpoint: facts about it, in JSON with a hash of itself."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..files import parsed, read

FORMAT = "mpiring checkpoint"
# What is written, and the oldest that is read. Since 2 there is sharded state.
VERSION, OLDEST = 2, 1
MANIFEST = "manifest.json"
# 3 million ranges of slices, which is a thousand tensors on each of 3,000 ranks.
_MOST_BYTES, _LEVELS = 128 << 20, 5
_FILE = re.compile(r"(replicated|sharded|rank-\d{5,9}|slices-\d{5,9})\.[0-9a-f]{32}\.safetensors")
_RANGE = re.compile(r"\d{1,18}:\d{1,18}")


def sealed(manifest: Mapping[str, Any]) -> str:
    """Return JSON of a manifest, with a hash of itself.

    Raises:
        CheckpointError: It is longer than what is read.
    """
    text = json.dumps({**manifest, "sha256": _hash_of(manifest)}, indent=1) + "\n"
    if len(text) > _MOST_BYTES:
        raise CheckpointError(f"{MANIFEST} would have {len(text)} bytes, more than {_MOST_BYTES}; "
                              f"let ranks save fewer, longer slices")
    return text


def _hash_of(manifest: Mapping[str, Any]) -> str:
    text = json.dumps({key: manifest[key] for key in sorted(manifest) if key != "sha256"})
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint.

    Raises:
        CheckpointError: It differs from what was written, or is not mpiring's; says why.
    """
    try:
        manifest = parsed(read(checkpoint / MANIFEST, _MOST_BYTES), _LEVELS)
    except FileNotFoundError as exc:
        raise CheckpointError(f"{MANIFEST} is missing") from exc
    except OSError as exc:
        raise CheckpointError(f"{MANIFEST} cannot be read: {exc.strerror or exc}") from exc
    except ValueError as exc:
        raise CheckpointError(f"{MANIFEST} is torn: {exc}") from exc
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{MANIFEST} is not one of mpiring's")
    version = manifest.get("version")
    if version not in range(OLDEST, VERSION + 1):
        raise CheckpointError(f"{MANIFEST} has version {version!r}, but this mpiring reads "
                              f"versions {OLDEST} to {VERSION}")
    if manifest.get("sha256") != _hash_of(manifest):
        raise CheckpointError(f"{MANIFEST} does not have the content that was written")
    problem = _malformed(manifest)
    if problem:
        raise CheckpointError(f"{MANIFEST} is not as mpiring writes it: {problem}")
    return manifest


def _malformed(manifest: Mapping[str, Any]) -> str:
    """Return which fact of a manifest is none, or "": its hash proves no origin."""
    def is_number(x: Any, least: int, end: float = math.inf) -> bool:
        return type(x) is int and least <= x < end

    size, seed = manifest.get("size"), manifest.get("seed")
    files, slices = manifest.get("files"), manifest.get("slices")
    if not is_number(manifest.get("step"), 0) or not isinstance(size, int) or size < 1:
        return "step or size is no number"
    if seed is not None and type(seed) is not int:
        return "seed is no number"
    if not isinstance(files, dict) or not all(
            _FILE.fullmatch(name) and is_number(nbytes, 0) for name, nbytes in files.items()):
        return "files are not names and lengths"
    if not any(name.startswith("replicated.") for name in files):
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
