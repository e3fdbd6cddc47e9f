"""Reads and writes files in folders that other users may write to."""

import contextlib
import errno
import json
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

# The prefix of files and folders that are not complete.
UNFINISHED = ".writing-"
_AS_LISTS = bytes.maketrans(b"{}", b"[]")
_OTHERS = bytes({*range(256)}.difference(b'[]{}"'))


def regular(name: str | os.PathLike[str], flags: int, *, mode: int = 0o666,
            dir_fd: int | None = None) -> int:
    """Open a regular file and nothing else: an `opener` for Python's `open`.

    It refuses a pipe, so that it never waits for the other end. When it writes, it does not follow
    symbolic links. When it reads, it follows a symbolic link of this user or of root.

    With O_NOFOLLOW among the flags, it follows no link. `mode` has the permissions of a new file.

    Raises:
        OSError: os.open fails, or the name belongs to a link, a pipe, a folder or a device.
    """
    follows = not flags & (os.O_WRONLY | os.O_RDWR | os.O_NOFOLLOW)
    flags |= os.O_NONBLOCK | os.O_CLOEXEC
    try:
        if follows and os.lstat(name, dir_fd=dir_fd).st_uid not in (os.geteuid(), 0):
            # It may be a link of another user. The name may change before it is opened.
            follows = False
        descriptor = os.open(name, flags | (0 if follows else os.O_NOFOLLOW), mode, dir_fd=dir_fd)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed; delete it, or "
                      "name its target", os.fspath(name)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(name))
    return descriptor


def read(path: Path, max_bytes: int, *, private: bool = False, links: bool = True) -> bytes:
    """Return the content of a regular file of at most `max_bytes`; raise OSError for other files.

    If `private`, refuse links, and files that another user may have written. Unless `links`, refuse
    links, also those of this user.
    """
    flags = 0 if links and not private else os.O_NOFOLLOW
    with open(path, "rb", opener=lambda name, given: regular(name, given | flags)) as file:
        status = os.fstat(file.fileno())
        if private and status.st_uid != os.geteuid():
            raise OSError(errno.EPERM, "it is not a file of this user", str(path))
        if private and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise OSError(errno.EPERM, "others may write to it", str(path))
        content = file.read(min(status.st_size, max_bytes) + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes} bytes", str(path))
    return content


def parsed(text: bytes, levels: int, build: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Return the value of a JSON text in UTF-8; raise ValueError for any other text.

    `levels` limits the nested lists and objects, because Python's parser is recursive. `build`
    returns the value of an object, given the values of its items.
    """
    # Without escaped quotes, every second quote ends a string.
    bare = text.replace(b"\\\\", b"").replace(b'\\"', b"").translate(_AS_LISTS, _OTHERS)
    brackets = b"".join(bare.replace(b'""', b"").split(b'"')[::2])
    for _ in range(levels):
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise ValueError(f"it is not JSON of at most {levels} levels")
    return json.loads(text.decode(), object_hook=build)


@dataclass
class Unfinished:
    """A file that is being written, and its name when complete, which the block may change."""

    file: BinaryIO
    name: str


@contextlib.contextmanager
def replacing(path: Path, *, private: bool = False, synced: bool = False,
              links: bool = True) -> Iterator[Unfinished]:
    """Yield a new file that replaces an earlier one when the block ends.

    A concurrent reader sees the old content or the new content. If the block raises, the new
    file is deleted. If the name is a symbolic link, the link is replaced and its target is kept.

    Only this user can read a `private` file. Content and name of a `synced` one are on the disk
    when the block has ended. Unless `links`, a folder that is a symbolic link is refused.

    Raises:
        OSError: The file cannot be written.
    """
    # A descriptor, because others may rename the folder as soon as the file is complete.
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
                     | (0 if links else os.O_NOFOLLOW))
    scratch = f"{UNFINISHED}{os.urandom(8).hex()}"
    try:
        opener = partial(regular, mode=0o600 if private else 0o666, dir_fd=folder)
        with open(scratch, "x+b", opener=opener) as file:
            new = Unfinished(file, path.name)
            yield new
            file.flush()
            if synced:
                os.fsync(file.fileno())
        os.rename(scratch, new.name, src_dir_fd=folder, dst_dir_fd=folder)
        if synced:
            os.fsync(folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(scratch, dir_fd=folder)
        raise
    finally:
        os.close(folder)


def save(path: Path, content: bytes) -> None:
    """Write a private file, replacing an earlier one; make its folder if needed.

    Any number of processes may save the same file at the same time. Raises OSError if the folder
    cannot be written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, private=True) as new:
        new.file.write(content)


def sync_folder(folder: Path) -> None:
    """Sync the entries of a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
