"""Writes and reads a file of a checkpoint: a tree's arrays, in the format of safetensors.

The format is a header in JSON and the elements, one array after the other. The package of that
name is not used: elements are hashed and synced while they are written, out of one block of
memory, and its NumPy interface has no bfloat16.

Source: https://github.com/huggingface/safetensors, section "Format".
"""

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError
from .tree import Bytes, Outline

SUFFIX = ".safetensors"
# The key of the tree in the header.
_TREE = "mpiring"
# Bytes of a system call, during which Python's lock is free.
_PIECE_BYTES = 8 << 20
_HASH_DIGITS = 32


class Copy:
    """A copy of a tree, in memory that later copies use again."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._header = b""
        self._nbytes = 0

    def take(self, outline: Outline) -> None:
        """Copy the arrays of a tree."""
        # Long elements first: so all are aligned, without gaps, which the format forbids.
        leaves = sorted(outline.leaves.items(), key=lambda item: -item[1].itemsize)
        header: dict[str, Any] = {"__metadata__": {_TREE: outline.text}}
        end = 0
        for name, leaf in leaves:
            dtype, shape = leaf.stored
            start, end = end, end + leaf.nbytes
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        if self._memory.size < end:
            self._memory = np.empty(0, np.uint8)     # freed before the new memory is allocated
            self._memory = np.empty(end, np.uint8)
        for name, leaf in leaves:
            start, stop = header[name]["data_offsets"]
            leaf.kind.copy(leaf.value, self._memory[start:stop])
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._header, self._nbytes = len(text).to_bytes(8, "little") + text, end

    def write(self, folder: Path, name: str, digest: "Future[str]") -> str:
        """Write the copy to a file with a hash of its content in its name; return the name.

        The file gets this name once it is complete and on the disk.

        Args:
            folder: Where to write it.
            name: Of the file, without the hash.
            digest: The result of `digest`, from another thread.

        Raises:
            OSError: Such as a full disk. What was written is deleted.
        """
        unfinished = folder / f"{name}.unfinished"
        data = self._memory[:self._nbytes].data
        try:
            with open(unfinished, "wb", buffering=0) as file:
                _write_all(file.fileno(), memoryview(self._header))
                _write_all(file.fileno(), data)
                os.fsync(file.fileno())
            complete = f"{name}.{digest.result()}{SUFFIX}"
            os.rename(unfinished, folder / complete)
            sync_folder(folder)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
        return complete

    def digest(self) -> str:
        """Return a hash of the content of the file."""
        found = hashlib.sha256(self._header)
        found.update(self._memory[:self._nbytes].data)
        return found.hexdigest()[:_HASH_DIGITS]


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data[:_PIECE_BYTES]):]


@dataclass(frozen=True)
class Content:
    """The content of a file.

    Attributes:
        text: The tree; see Outline.
        data: The elements of its arrays, by name.
    """

    text: str
    data: Mapping[str, Bytes]


def name_of(file: str) -> str:
    """Return the name of a file without its hash."""
    return file.removesuffix(SUFFIX).rpartition(".")[0]


def read(path: Path, nbytes: int) -> Content:
    """Read a file, and check it.

    Args:
        path: With the name that `Copy.write` gave it.
        nbytes: Its length.

    Raises:
        CheckpointError: It differs from what was written; says how.
    """
    try:
        with open(path, "rb") as file:
            there = os.fstat(file.fileno()).st_size
            if there != nbytes:
                raise CheckpointError(f"{path.name} has {there} bytes instead of {nbytes}")
            return _read(file, path.name, nbytes)
    except FileNotFoundError as exc:
        raise CheckpointError(f"{path.name} is missing") from exc
    except OSError as exc:
        raise CheckpointError(f"{path.name} cannot be read: {exc.strerror or exc}") from exc


def _read(file: Any, name: str, nbytes: int) -> Content:
    damaged = CheckpointError(f"{name} does not have the content that was written")
    digest = hashlib.sha256()

    def take(size: int) -> Bytes:
        data = np.empty(size, np.uint8)
        if file.readinto(data.data) != size:
            raise damaged
        digest.update(data.data)
        return data

    length = int.from_bytes(take(8).tobytes(), "little") if nbytes >= 8 else nbytes
    if length > nbytes - 8:
        raise damaged
    try:
        header = json.loads(take(length).tobytes())
        text = header.pop("__metadata__")[_TREE]
        bounds = {key: entry["data_offsets"] for key, entry in header.items()}
        data, end = {}, 0
        for key, (start, stop) in bounds.items():
            # Checked, since the hash is not verified yet: a flipped bit must not allocate all
            # memory.
            if start != end or not start <= stop <= nbytes - 8 - length:
                raise damaged
            data[key], end = take(stop - start), stop
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise damaged from exc
    if file.read(1) or digest.hexdigest()[:_HASH_DIGITS] != name.split(".")[-2]:
        raise damaged
    return Content(text, data)


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
