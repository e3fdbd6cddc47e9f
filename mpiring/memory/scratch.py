"""Reuses memory, since fresh memory costs a page fault per 4 KiB."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import DTypeLike

from .arrays import Array

# Length of a thread's scratch memory, which stays in the level-2 cache. Measured.
BLOCK_BYTES = 256 << 10


class Block:
    """Scratch memory for one combination of vectors.

    NumPy takes a microsecond to return the address of the memory, BLOCK_BYTES bytes.
    """

    def __init__(self) -> None:
        self.memory = np.empty(BLOCK_BYTES, np.uint8)
        self.address = self.memory.ctypes.data


class _ThreadScratch(threading.local):
    """Idle blocks of each thread: one, or more if a signal handler interrupted a combination."""

    def __init__(self) -> None:
        self._idle = [Block()]

    def acquire(self) -> Block:
        """Return an idle block; `release` it, except after an error."""
        return self._idle.pop() if self._idle else Block()

    def release(self, block: Block) -> None:
        """Return a block to the pool."""
        self._idle.append(block)


thread_scratch = _ThreadScratch()


class Scratch:
    """A small pool of buffers, for schedules of any thread.

    Up to `keep` idle buffers, the largest ones, stay in the pool. `make` returns a new buffer of a
    number of bytes.
    """

    def __init__(self, keep: int, make: Callable[[int], Array] = lambda nbytes: np.empty(
            nbytes, np.uint8)) -> None:
        self._keep = keep
        self._make = make
        self._idle: list[Array] = []
        self._lock = threading.Lock()

    @contextmanager
    def borrow(self, n: int, dtype: DTypeLike) -> Iterator[Array]:
        """Lend a vector of `n` elements with undefined content."""
        nbytes = n * np.dtype(dtype).itemsize
        buffer = self._acquire(nbytes)
        yield buffer[:nbytes].view(dtype)
        # Not in a `finally`, because after an error MPI may still write into the buffer.
        with self._lock:
            self._idle.append(buffer)
            self._idle.sort(key=len)
            del self._idle[:-self._keep]

    def _acquire(self, nbytes: int) -> Array:
        with self._lock:
            for index, buffer in enumerate(self._idle):
                if buffer.nbytes >= nbytes:
                    return self._idle.pop(index)
        return self._make(nbytes)
