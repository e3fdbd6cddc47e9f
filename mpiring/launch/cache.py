"""Saves results of measurements and trials for later jobs, one small JSON file each."""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from ..files import parsed, read, save

_log = logging.getLogger("mpiring")

# The tuning results of ten algorithms at ten sizes need 5 kB.
_MAX_BYTES, _LEVELS = 1 << 20, 4


class Cache:
    """A file with a result; its `folder` is None if nothing is saved.

    Args:
        setting: Folder, as in the setting `tuning_folder`; "" saves nothing.
        key: Description of everything that the result depends on.
    """

    def __init__(self, setting: str, prefix: str, key: str) -> None:
        self.folder, self._key = folder_of(setting), key
        name = hashlib.blake2b(key.encode(), digest_size=12).hexdigest()
        self._file = None if self.folder is None else self.folder / f"{prefix}{name}.json"

    def read(self, name: str) -> Any:
        """Return a value that an earlier job of this user saved; None if there is none."""
        if self._file is None:
            return None
        try:
            saved = parsed(read(self._file, _MAX_BYTES, private=True), _LEVELS)
            if saved["about"] != self._key:
                raise ValueError(f"it is about {saved['about']!r:.200}")
            return saved[name]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.info("%s is not used: %r", self._file, error)
            return None

    def write(self, name: str, value: Any) -> None:
        """Save a value, replacing an earlier one; raise OSError if the folder is not writable."""
        if self._file is not None:
            save(self._file, json.dumps({"about": self._key, name: value}, indent=1).encode())


def folder_of(setting: str) -> Path | None:
    """Return the folder of the setting `tuning_folder`; None for "" or without a home folder."""
    try:
        return Path(setting).expanduser() if setting else None
    except RuntimeError:
        # A container's user may have neither HOME nor an entry in the user database.
        return None
