"""Writes and reads a file of a checkpoint: a tree's arrays, in the safetensors format.

The format is a header in JSON, followed by the elements of one array after the other. The
safetensors package is not used, because it would replace only the 30 lines for the header. It
writes only to a path, without a hash and without syncing the disk, and maps files without a check.
It lacks complex128, and its functions for arrays of any dtype differ between versions (0.7 accepts
bytes, 0.8 pointers).

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

# Offsets of the first byte of each array and of the byte after its last, by name.
Layout = Mapping[str, tuple[int, int]]
SUFFIX = ".safetensors"
# Key of the tree in the header.
_TREE = "mpiring"
# Number of bytes per system call.
_PIECE_BYTES = 8 << 20
_HASH_DIGITS = 32
# Prefix of an XXH3 hash in the name of a file; a hash without a prefix is SHA-256.
XXH3 = "xxh3-"
# Depth of the JSON header, in which the tree is a string.
_LEVELS = 3


class Copy:
    """A copy of a tree, in memory that later copies reuse."""

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
        """Write the copy to a file whose name includes a hash of its content; return the name.

        The file gets this name once it is complete and on the disk.

        Raises:
            OSError: The file cannot be written, for example because the disk is full. The
                incomplete file is deleted.
        """
        data = self._memory[:self._nbytes].data
        with replacing(folder / name, synced=True, links=False) as new:
            _write_all(new.file.fileno(), memoryview(self._header))
            _write_all(new.file.fileno(), data)
            new.name = f"{name}.{digest.result()}{SUFFIX}"
        return new.name

    def digest(self, *, fast: bool) -> str:
        """Return a hash of the file's content: XXH3 if `fast`, otherwise SHA-256."""
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
    Raises OSError as `Copy.write` does.
    """
    header, bounds = _file_layout(outline)
    end = len(header) + max((stop for _, stop in bounds.values()), default=0)
    with replacing(path, synced=True) as new:
        _write_all(new.file.fileno(), memoryview(header))
        # This raises if the disk is full; otherwise, a write to the memory would raise a signal.
        os.posix_fallocate(new.file.fileno(), 0, end)
        memory = np.memmap(new.file, np.uint8, "r+")
        _fill(memory[len(header):], outline, bounds)
        memory.flush()


def _file_layout(outline: Outline) -> tuple[bytes, Layout]:
    """Return the header of a tree's file, and the offsets of its arrays after the header."""
    header: dict[str, Any] = {"__metadata__": {_TREE: outline.text}}
    end, bounds = 0, {}
    # In descending order of element size, all arrays are aligned without gaps, which the format
    # forbids.
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
    """The content of a file: its tree as text (see Outline), and the arrays' elements, by name."""

    text: str
    data: Mapping[str, Bytes]


def name_of(file: str) -> str:
    """Return the name of a file without its hash."""
    return file.removesuffix(SUFFIX).rpartition(".")[0]


def read(path: Path, nbytes: int) -> Content:
    """Read a file of this length; raise CheckpointError unless it has the content of its name."""
    with _open_source(path, nbytes) as source:
        content = source.content()
        source.refuse_other_digest()
    return content


def verify(path: Path, nbytes: int) -> Layout:
    """Check a file like `read`, without keeping it; return the offsets of its arrays."""
    with _open_source(path, nbytes) as source:
        _, layout = source.header()
        source.refuse_other_digest()
    return layout


def map_file(path: Path, nbytes: int) -> Bytes:
    """Map a file of this length into memory, read-only, without a check of its content."""
    with _open_source(path, nbytes) as source:
        memory: Bytes = np.memmap(source.file, np.uint8, "r")
    return memory


def tree_text(path: Path, nbytes: int | None) -> str:
    """Return the text of the tree in a file, of this length if given, without reading its arrays.

    Raises CheckpointError if the file cannot be read, or its header is damaged.
    """
    with _open_source(path, nbytes) as source:
        return source.header()[0]


def read_plain(path: Path) -> Content:
    """Read a file of `write_plain`; raise CheckpointError for any other file."""
    with _open_source(path) as source:
        return source.content()


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """Raise CheckpointError with the reason if the block cannot read a file of this name."""
    try:
        yield
    except FileNotFoundError as exc:
        raise CheckpointError(f"{name} is missing") from exc
    # A sparse file may be longer than the memory; this must not end the job.
    except (OSError, MemoryError) as exc:
        reason = getattr(exc, "strerror", None) or exc
        raise CheckpointError(f"{name} cannot be read: {reason}") from exc


@contextlib.contextmanager
def _open_source(path: Path, nbytes: int | None = None) -> Iterator["_Source"]:
    """Open a file; raise CheckpointError if it cannot be read, or has another length than given."""
    with reading(path.name), open(path, "rb", opener=regular) as file:
        length = os.fstat(file.fileno()).st_size
        if nbytes not in (None, length):
            raise CheckpointError(f"{path.name} has {length} bytes instead of {nbytes}")
        yield _Source(file, path, length, CheckpointError(
            f"{path.name} does not have the content that was written" if nbytes is not None else
            f"{path} is not a file that was written by mpiring, or it is damaged"))


class _Source:
    """A file that is hashed while it is read; `damaged` is raised if its content has changed."""

    def __init__(self, file: io.BufferedReader, path: Path, length: int,
                 damaged: CheckpointError) -> None:
        self.file, self._path, self._remaining, self._damaged = file, path, length, damaged
        self._digest = _hash(fast=has_fast_hash(path.name))

    def take(self, size: int) -> Bytes:
        # The hash is not verified yet: a flipped bit must not cause a huge allocation.
        if not 0 <= size <= self._remaining:
            raise self._damaged
        data = np.empty(size, np.uint8)
        if self.file.readinto(data.data) != size:
            raise self._damaged
        self._digest.update(data.data)
        self._remaining -= size
        return data

    def header(self) -> tuple[str, dict[str, tuple[int, int]]]:
        """Read the header; return the tree, and the offsets of the arrays in the file."""
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
        if end - origin != self._remaining:
            raise self._damaged
        return text, layout

    def content(self) -> Content:
        text, layout = self.header()
        return Content(text, {name: self.take(stop - start)
                              for name, (start, stop) in layout.items()})

    def refuse_other_digest(self) -> None:
        """Read the rest; raise CheckpointError if its hash is not the one in the file's name."""
        while self._remaining:
            self.take(min(self._remaining, _PIECE_BYTES))
        expected = self._path.name.split(".")[-2].removeprefix(XXH3)
        if self._digest.hexdigest()[:_HASH_DIGITS] != expected:
            raise self._damaged
