"""Writes and reads the manifest of a checkpoint: facts about it, in JSON with a hash of itself."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

FORMAT = "mpiring checkpoint"
# What is written, and the oldest that is read. Since 2 there is sharded state.
VERSION, OLDEST = 2, 1
MANIFEST = "manifest.json"


def sealed(manifest: Mapping[str, Any]) -> str:
    """Return JSON of a manifest, with a hash of itself."""
    return json.dumps({**manifest, "sha256": _hash_of(manifest)}, indent=1) + "\n"


def _hash_of(manifest: Mapping[str, Any]) -> str:
    text = json.dumps({key: manifest[key] for key in sorted(manifest) if key != "sha256"})
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint.

    Raises:
        CheckpointError: It differs from what was written, or is not mpiring's; says why.
    """
    try:
        found = json.loads((checkpoint / MANIFEST).read_text("utf-8"))
    except FileNotFoundError as exc:
        raise CheckpointError(f"{MANIFEST} is missing") from exc
    except OSError as exc:
        raise CheckpointError(f"{MANIFEST} cannot be read: {exc.strerror or exc}") from exc
    except ValueError as exc:
        raise CheckpointError(f"{MANIFEST} is torn: {exc}") from exc
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise CheckpointError(f"{MANIFEST} is not one of mpiring's")
    if found.get("version") not in range(OLDEST, VERSION + 1):
        raise CheckpointError(f"{MANIFEST} has version {found.get('version')!r}, but this mpiring "
                              f"reads versions {OLDEST} to {VERSION}")
    if found.get("sha256") != _hash_of(found):
        raise CheckpointError(f"{MANIFEST} does not have the content that was written")
    return found
