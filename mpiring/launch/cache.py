"""Saves results of measurements and trials for later jobs, one small JSON file each."""

import hashlib
import json
from pathlib import Path
from typing import Any

from ..saving import save


class Cache:
    """A file with a result.

    Args:
        setting: Its folder, as the setting `tuning_folder`; "" saves nothing.
        prefix: Of the file's name.
        key: Text of all that the result depends on.

    Attributes:
        folder: Its folder; None where nothing is saved.
    """

    def __init__(self, setting: str, prefix: str, key: str) -> None:
        self.folder, self._key = folder_of(setting), key
        name = hashlib.blake2b(key.encode(), digest_size=12).hexdigest()
        self._file = None if self.folder is None else self.folder / f"{prefix}{name}.json"

    def read(self, name: str) -> Any:
        """Return a value that an earlier job has saved; None if none can be read."""
        if self._file is None:
            return None
        try:
            return json.loads(self._file.read_text())[name]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, name: str, value: Any) -> None:
        """Save a value in place of an earlier one.

        Raises:
            OSError: The folder cannot be written to.
        """
        if self._file is None:
            return
        save(self._file, json.dumps({"about": self._key, name: value}, indent=1).encode())


def folder_of(setting: str) -> Path | None:
    """Return the folder of the setting `tuning_folder`; None for "", or without a home."""
    try:
        return Path(setting).expanduser() if setting else None
    except RuntimeError:
        # A container's user may have neither HOME nor an entry in the list of users.
        return None
