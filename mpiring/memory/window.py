"""Maps memory that the processes of a node share, until the last of them unmaps it.

The memory is an anonymous file. It has no name that a crash could leave behind, and the size of
/dev/shm does not limit it. Garbage collection may unmap it, unlike MPI_Win_free, which would be a
collective call.

A fork of a process gets a private copy, because its writes must not change the memory of ranks.
"""

import ctypes
import errno
import functools
import mmap
import os
import resource
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from .arrays import Array

PAGE_BYTES = mmap.PAGESIZE
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
# Constants of <sys/mman.h> of Linux, which Python's mmap lacks.
_MAP_FIXED, _MAP_NORESERVE, _MREMAP_MAYMOVE_FIXED = 0x10, 0x4000, 3
# Length and descriptor (-1 for none) of each mapping that forks must not share, by address.
_mappings: dict[int, tuple[int, int]] = {}


def create() -> int:
    """Return the descriptor of a new, empty anonymous file.

    Raises OSError if the system has no memfd_create, or no descriptor is left.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "this system has no memfd_create")
    return os.memfd_create("mpiring")


def identity(file: int | str) -> tuple[int, int]:
    """Return the device and number of a file, which identify it on this system."""
    status = os.stat(file)
    return status.st_dev, status.st_ino


def attach(pid: int, descriptor: int, wanted: tuple[int, int]) -> int:
    """Return a descriptor of a file that another process of this node has open.

    In another container the same path may lead to another file, which must not be changed. Raises
    OSError if the file's identity is not the wanted one, or /proc is not accessible.
    """
    path = f"/proc/{pid}/fd/{descriptor}"
    if identity(path) != wanted:
        raise OSError(errno.ENXIO, f"process {pid} is not of this container")
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def segments(descriptor: int, rank: int, size: int, nbytes: int, *,
             private_in_forks: bool = True) -> Sequence[Array]:
    """Allocate this rank's segment of a file, and map the segments of all ranks.

    Each process allocates its own segment, so that the pages are in the memory of its processor.
    A segment may be accessed once its rank has returned from this function.

    `nbytes` is at least 1. The descriptor may be closed afterwards. If not `private_in_forks`, a
    fork of this process also shares the memory, but must not write to it.

    Returns:
        A byte vector for each rank. The memory is unmapped when the last view of any vector dies.

    Raises:
        OSError: There is too little memory, or a limit (`ulimit -f`, `-v`) forbids it.
    """
    stride = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
    everything = _allocated(descriptor, rank, size, stride, private_in_forks)
    return [everything[start:start + nbytes] for start in range(0, size * stride, stride)]


def one_array(descriptor: int, rank: int, size: int, nbytes: int) -> Array:
    """Allocate this rank's share of a file's pages, and map the file as one array of bytes.

    The result is the same memory in all processes. For the rest, see `segments`.
    """
    share = -(-nbytes // (size * PAGE_BYTES)) * PAGE_BYTES
    return _allocated(descriptor, rank, size, share, True)[:nbytes]


def _allocated(descriptor: int, rank: int, size: int, stride: int,
               private_in_forks: bool) -> Array:
    """Allocate part number `rank` of `size` equal parts of a file, and map the complete file."""
    # Check first: an attempt would use all memory, until the system kills a process.
    if size * stride > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise OSError(errno.ENOMEM, f"{size * stride} bytes are more than this node has")
    if rank == 0:
        # Other ranks need not wait for this, because the file also grows when they allocate.
        os.ftruncate(descriptor, size * stride)
    # Without this, a shortage would end the process by a signal at the first access.
    os.posix_fallocate(descriptor, rank * stride, stride)
    return np.asarray(_Mapping(descriptor, size * stride, private_in_forks))


class _Mapping:
    """A mapped file, until the last array in it dies.

    It keeps a descriptor of the file if forks must get a private copy.
    """

    def __init__(self, descriptor: int, nbytes: int, private_in_forks: bool) -> None:
        address = _mapped(None, nbytes, mmap.MAP_SHARED, descriptor)
        if private_in_forks:
            _separate_forks()
            _mappings[address] = nbytes, _duplicated(descriptor)
        weakref.finalize(self, _unmap, address, nbytes).atexit = False
        self.__array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def _mapped(address: int | None, nbytes: int, flags: int, descriptor: int) -> int:
    """Return the address of new memory; raise OSError if the system refuses it."""
    start: int = _system().mmap(address, nbytes, _READ_WRITE, flags, descriptor, 0)
    if start == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return start


def _duplicated(descriptor: int) -> int:
    """Return a duplicate of a descriptor; -1 if duplicates would use up those of the program."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        return -1
    if copy < resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4:
        return copy
    os.close(copy)
    return -1


def _unmap(address: int, nbytes: int) -> None:
    _, descriptor = _mappings.pop(address, (nbytes, -1))
    _system().munmap(address, nbytes)
    if descriptor >= 0:
        os.close(descriptor)


@functools.cache
def _separate_forks() -> None:
    """From now on, give forks private copies of all mappings."""
    # Load it now: a fork may have copied the loader's lock while another thread held it.
    _system()
    os.register_at_fork(after_in_child=_separate)


def _separate() -> None:
    """Replace all mappings of this process, a fork, with private copies at the same addresses.

    The system copies a page when the fork writes to it. Without a descriptor, everything is copied
    now.
    """
    while _mappings:
        address, (nbytes, descriptor) = _mappings.popitem()
        flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
        if descriptor >= 0:
            _mapped(address, nbytes, flags | _MAP_FIXED, descriptor)
            os.close(descriptor)
        else:
            copy = _mapped(None, nbytes, flags | mmap.MAP_ANONYMOUS, -1)
            ctypes.memmove(copy, address, nbytes)
            _system().mremap(copy, nbytes, nbytes, _MREMAP_MAYMOVE_FIXED, address)


@functools.cache
def _system() -> Any:
    """Return the C library, with the types of the functions that this file calls."""
    system = ctypes.CDLL(None, use_errno=True)
    system.mmap.restype = system.mremap.restype = ctypes.c_void_p
    system.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int,
                            ctypes.c_int, ctypes.c_ssize_t]
    system.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int,
                              ctypes.c_void_p]
    system.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return system
