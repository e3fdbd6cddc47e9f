"""Maps memory that the processes of a node share, until the last of them unmaps it.

The memory is an anonymous file: it has no name that a crash could leave behind, and the size of
/dev/shm does not limit it. Garbage collection may unmap it; MPI_Win_free would be a collective
call.
"""

import ctypes
import errno
import functools
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from .arrays import Array

PAGE_BYTES = mmap.PAGESIZE


def create() -> int:
    """Return the descriptor of a new, empty anonymous file.

    Raises:
        OSError: The system has no memfd_create, or no descriptor is left.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "this system has no memfd_create")
    return os.memfd_create("mpiring")


def identity(descriptor: int) -> tuple[int, int]:
    """Return the device and number of an open file, which no other file of this system has."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def attach(pid: int, descriptor: int, wanted: tuple[int, int]) -> int:
    """Return a descriptor of a file that another process of this node has open.

    Args:
        pid, descriptor: Of that process.
        wanted: The file's identity. In another container the same path may lead to another file,
            which must not be touched.

    Raises:
        OSError: The process lives in another container, or /proc is closed.
    """
    path = f"/proc/{pid}/fd/{descriptor}"
    found = os.stat(path)
    if (found.st_dev, found.st_ino) != wanted:
        raise OSError(errno.ENXIO, f"process {pid} is not of this container")
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def segments(descriptor: int, rank: int, size: int, nbytes: int) -> Sequence[Array]:
    """Allocate this rank's segment of a file, and map those of all ranks.

    Each process allocates its own, so that the pages lie in the memory of its own processor. A
    segment may be touched once its rank has returned from this function.

    Args:
        descriptor: From `create` or `attach`; may be closed afterwards.
        rank, size: Among the processes that share the file.
        nbytes: Length of each segment, at least 1.

    Returns:
        Per rank a byte vector; the memory is unmapped when the last view of any of them dies.

    Raises:
        OSError: Memory is too short, or a limit (`ulimit -f`, `-v`) forbids it.
    """
    stride = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
    everything = _allocated(descriptor, rank, size, stride)
    return [everything[start:start + nbytes] for start in range(0, size * stride, stride)]


def whole(descriptor: int, rank: int, size: int, nbytes: int) -> Array:
    """Allocate this rank's share of a file's pages, and map the file as one array.

    Args:
        descriptor, rank, size: As for `segments`.
        nbytes: Of the array, at least 1.

    Returns:
        A byte vector, the same memory in all processes. A share may be touched once its rank has
        returned from this function.

    Raises: as `segments`.
    """
    share = -(-nbytes // (size * PAGE_BYTES)) * PAGE_BYTES
    return _allocated(descriptor, rank, size, share)[:nbytes]


def _allocated(descriptor: int, rank: int, size: int, stride: int) -> Array:
    """Allocate number `rank` of `size` equal parts of a file, and map all of it."""
    # An attempt would take all memory, until the system kills a process.
    if size * stride > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise OSError(errno.ENOMEM, f"{size * stride} bytes are more than this node has")
    os.ftruncate(descriptor, size * stride)
    # Without this, a shortage would show as a fatal signal at the first touch.
    os.posix_fallocate(descriptor, rank * stride, stride)
    return np.asarray(_Mapping(descriptor, size * stride))


class _Mapping:
    """A mapped file, until the last array in it dies.

    Python's mmap, before 3.13, would keep a descriptor open as long.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        system = _system()
        address = system.mmap(
            None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
        if address == ctypes.c_void_p(-1).value:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        weakref.finalize(self, system.munmap, address, nbytes).atexit = False
        self.__array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


@functools.cache
def _system() -> Any:
    """Return the C library, with the types of what is called here."""
    system = ctypes.CDLL(None, use_errno=True)
    system.mmap.restype = ctypes.c_void_p
    system.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int,
                            ctypes.c_int, ctypes.c_ssize_t]
    system.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return system
