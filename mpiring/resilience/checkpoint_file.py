"""Writes and reads a file of a checkpoint: a tree's arrays, in the format of safetensors.

The format is a header in JSON and the elements, one array after the other. The package of that
name is not used. It writes only to a path, without a hash and without syncing the disk. It maps
files without a check, so it would replace no more than the 30 lines of the header. It lacks
complex128, and its functions for arrays of any dtype differ between versions (0.7 takes bytes, 0.8
pointers).

Source: https://github.com/huggingface/safetensors, section "Format".
"""

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError
from ..files import parsed, regular, replacing
from ..memory.digest import xxh3
from .tree import Bytes, Outline

# First byte, and the one after the last, of an array; by its name.
Layout = Mapping[str, tuple[int, int]]
SUFFIX = ".safetensors"
# The key of the tree in the header.
_TREE = "mpiring"
# Bytes of a system call, during which Python's lock is free.
_PIECE_BYTES = 8 << 20
_HASH_DIGITS = 32
# In the name of a file, the beginning of a hash by XXH3; others are SHA-256.
XXH3 = "xxh3-"
# Lists and objects that enclose each other in the header: the tree in it is a string.
_LEVELS = 3


class Copy:
    """A copy of a tree, in memory that later copies use again."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._header = b""
        self._nbytes = 0

    def take(self, outline: Outline) -> None:
        """Copy the arrays of a tree."""
        self._header, bounds = _file_layout(outline)
        self._nbytes = max((stop for _, stop in bounds.values()), default=0)
        if self._memory.size < self._nbytes:
            self._memory = np.empty(0, np.uint8)     # freed before the new memory is allocated
            self._memory = np.empty(self._nbytes, np.uint8)
        _fill(self._memory, outline, bounds)

    def write(self, folder: Path, name: str, digest: "Future[str]") -> str:
        """Write the copy to a file with a hash of its content in its name; return the name.

        The file gets this name once it is complete and on the disk.

        Args:
            folder: Folder to write to.
            name: Name of the file, without the hash.
            digest: Result of `digest`, from another thread.

        Raises:
            OSError: Such as a full disk. The part that was written is deleted.
        """
        data = self._memory[:self._nbytes].data
        with replacing(folder / name, synced=True, links=False) as new:
            _write_all(new.file.fileno(), memoryview(self._header))
            _write_all(new.file.fileno(), data)
            new.name = f"{name}.{digest.result()}{SUFFIX}"
        return new.name

    def digest(self, *, fast: bool) -> str:
        """Return a hash of the content of the file: XXH3 if fast, else SHA-256."""
        content = _hash(fast=fast)
        content.update(self._header)
        content.update(self._memory[:self._nbytes].data)
        return f"{XXH3 * fast}{content.hexdigest()[:_HASH_DIGITS]}"


def _hash(*, fast: bool) -> Any:
    return xxh3() if fast else hashlib.sha256()


def has_fast_hash(file: str) -> bool:
    """Return whether the name of a file has a hash by XXH3."""
    return f".{XXH3}" in file


def write_plain(path: Path, outline: Outline) -> None:
    """Write a tree to a file of this name, without a copy in memory and without a hash.

    Raises:
        OSError: Such as a full disk. The part that was written is deleted.
    """
    header, bounds = _file_layout(outline)
    end = len(header) + max((stop for _, stop in bounds.values()), default=0)
    with replacing(path, synced=True) as new:
        _write_all(new.file.fileno(), memoryview(header))
        # A disk that is full shows now, not as a signal while memory is written to.
        os.posix_fallocate(new.file.fileno(), 0, end)
        memory = np.memmap(new.file, np.uint8, "r+")
        _fill(memory[len(header):], outline, bounds)
        memory.flush()


def _file_layout(outline: Outline) -> tuple[bytes, Layout]:
    """Return the header of a tree's file, and where the arrays follow it."""
    header: dict[str, Any] = {"__metadata__": {_TREE: outline.text}}
    end, bounds = 0, {}
    # Long elements first: so all are aligned, without gaps, which the format forbids.
    for name, leaf in sorted(outline.leaves.items(), key=lambda item: -item[1].itemsize):
        dtype, shape = leaf.stored
        start, end = end, end + leaf.nbytes
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        bounds[name] = start, end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, bounds


def _fill(memory: Bytes, outline: Outline, bounds: Layout) -> None:
    for name, (start, stop) in bounds.items():
        leaf = outline.leaves[name]
        leaf.kind.copy(leaf.value, memory[start:stop])


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
        path: Path with the name that `Copy.write` gave it.
        nbytes: Length of the file.

    Raises:
        CheckpointError: It differs from what was written; says how.
    """
    with _opened(path, nbytes) as source:
        content = source.content()
        source.refuse_other_digest()
    return content


def verify(path: Path, nbytes: int) -> Layout:
    """Read a file without keeping it, and check it; return where it has its arrays.

    Args, Raises: as for `read`.
    """
    with _opened(path, nbytes) as source:
        _, layout = source.header()
        source.refuse_other_digest()
    return layout


def map_file(path: Path, nbytes: int) -> Bytes:
    """Map a file into memory, read-only; nothing is read or checked but its length.

    Args, Raises: as for `read`.
    """
    with _opened(path, nbytes) as source:
        memory: Bytes = np.memmap(source.file, np.uint8, "r")
    return memory


def tree_text(path: Path, nbytes: int | None) -> str:
    """Return the text of the tree in a file, without reading its arrays.

    Args:
        path: Name of the file.
        nbytes: Its length; None for any.

    Raises:
        CheckpointError: It cannot be read, or it is damaged.
    """
    with _opened(path, nbytes) as source:
        return source.header()[0]


def read_plain(path: Path) -> Content:
    """Read a file of `write_plain`.

    Raises:
        CheckpointError: It is not such a file.
    """
    with _opened(path) as source:
        return source.content()


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """Raise CheckpointError if a file of this name cannot be read in the block; says why."""
    try:
        yield
    except FileNotFoundError as exc:
        raise CheckpointError(f"{name} is missing") from exc
    # The length of a file is no reason to end a job: there may be a hole in it.
    except (OSError, MemoryError) as exc:
        reason = getattr(exc, "strerror", None) or exc
        raise CheckpointError(f"{name} cannot be read: {reason}") from exc


@contextlib.contextmanager
def _opened(path: Path, nbytes: int | None = None) -> Iterator["_Source"]:
    """Open a file.

    Args:
        path: Path of the file.
        nbytes: Length of the file; None for any.

    Raises:
        CheckpointError: It cannot be read, or has another length.
    """
    with reading(path.name), open(path, "rb", opener=regular) as file:
        length = os.fstat(file.fileno()).st_size
        if nbytes not in (None, length):
            raise CheckpointError(f"{path.name} has {length} bytes instead of {nbytes}")
        yield _Source(file, path, length, CheckpointError(
            f"{path.name} does not have the content that was written" if nbytes is not None else
            f"{path} is not a file that was written by mpiring, or it is damaged"))


class _Source:
    """A file that is hashed while it is read.

    Args:
        file: The file, open at its beginning.
        path: Name of the file.
        length: Number of its bytes.
        damaged: The error that is raised if the content is not as it was written.
    """

    def __init__(self, file: io.BufferedReader, path: Path, length: int,
                 damaged: CheckpointError) -> None:
        self.file, self._path, self._left, self._damaged = file, path, length, damaged
        self._digest = _hash(fast=has_fast_hash(path.name))

    def take(self, size: int) -> Bytes:
        """Return the next bytes."""
        # Checked, since the hash is not verified yet: a flipped bit must not allocate all memory.
        if not 0 <= size <= self._left:
            raise self._damaged
        data = np.empty(size, np.uint8)
        if self.file.readinto(data.data) != size:
            raise self._damaged
        self._digest.update(data.data)
        self._left -= size
        return data

    def header(self) -> tuple[str, dict[str, tuple[int, int]]]:
        """Read the header; return the tree, and where the file has its arrays."""
        length = int.from_bytes(self.take(8).tobytes(), "little")
        origin = end = 8 + length
        layout = {}
        try:
            header = parsed(self.take(length).tobytes(), _LEVELS)
            text = header.pop("__metadata__")[_TREE]
            if not isinstance(text, str):
                raise self._damaged
            for name, entry in header.items():
                start, stop = (origin + index(offset) for offset in entry["data_offsets"])
                if start != end or stop < start:
                    raise self._damaged
                layout[name], end = (start, stop), stop
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise self._damaged from exc
        if end - origin != self._left:
            raise self._damaged
        return text, layout

    def content(self) -> Content:
        """Read all."""
        text, layout = self.header()
        return Content(text, {name: self.take(stop - start)
                              for name, (start, stop) in layout.items()})

    def refuse_other_digest(self) -> None:
        """Read the rest; raise CheckpointError if the content is not what the file's name says."""
        while self._left:
            self.take(min(self._left, _PIECE_BYTES))
        expected = self._path.name.split(".")[-2].removeprefix(XXH3)
        if self._digest.hexdigest()[:_HASH_DIGITS] != expected:
            raise self._damaged
