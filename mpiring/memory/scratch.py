"""Reuses receive buffers, since fresh memory costs a page fault per 4 KiB."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import DTypeLike

from .arrays import Array


def _in_host_memory(nbytes: int) -> Array:
    return np.empty(nbytes, np.uint8)


class Scratch:
    """A small pool of buffers, for schedules of any thread.

    Args:
        keep: How many idle buffers stay in the pool: the largest.
        make: Returns a new buffer of so many bytes.
    """

    def __init__(self, keep: int, make: Callable[[int], Array] = _in_host_memory) -> None:
        self._keep = keep
        self._make = make
        self._idle: list[Array] = []
        self._lock = threading.Lock()

    @contextmanager
    def borrow(self, n: int, dtype: DTypeLike) -> Iterator[Array]:
        """Lend a vector of `n` elements with undefined content."""
        nbytes = n * np.dtype(dtype).itemsize
        buffer = self._take(nbytes)
        yield buffer[:nbytes].view(dtype)
        # Not in a `finally`: after an error, MPI may still write into the buffer.
        with self._lock:
            self._idle.append(buffer)
            self._idle.sort(key=len)
            del self._idle[:-self._keep]

    def _take(self, nbytes: int) -> Array:
        with self._lock:
            for index, buffer in enumerate(self._idle):
                if buffer.nbytes >= nbytes:
                    return self._idle.pop(index)
        return self._make(nbytes)
