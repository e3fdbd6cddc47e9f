"""Locks the pages of host memory that is not CUDA's own, for as long as it is mapped."""

import logging
import threading
import weakref
from collections.abc import Callable

import numpy as np

from ..memory.arrays import Array
from ..memory.window import PAGE_BYTES

# cudaSuccess and cudaErrorHostMemoryAlreadyRegistered of CUDA's runtime; HIP has the same.
_SUCCESS, _ALREADY = 0, 712

_log = logging.getLogger("mpiring")
_pinned: set[int] = set()
_pinning = threading.Lock()


def pin(memory: Array, gpu: str, register: Callable[[int, int], tuple[int, str]],
        unregister: Callable[[int], None]) -> None:
    """Lock the pages of host memory, for as long as its array lives; idempotent.

    Where that is refused, copies take longer, and a warning is logged. Memory that does not begin
    at a page is left alone: other memory may lie in its pages, and CUDA refuses copies of memory
    that is locked in part.

    Args:
        gpu: Whose copies it is for, for the message.
        register: Locks so many bytes from an address on; returns CUDA's status and its text.
        unregister: Unlocks what was locked from an address on.
    """
    root, address = memory, memory.ctypes.data
    while isinstance(root.base, np.ndarray):
        root = root.base
    if address % PAGE_BYTES:
        return
    with _pinning:
        if address in _pinned:
            return
        status, text = register(address, memory.nbytes)
        if status == _SUCCESS:
            _pinned.add(address)
    if status == _SUCCESS:
        # New memory may be mapped at the same address later.
        weakref.finalize(root, _unpin, address, unregister).atexit = False
    elif status != _ALREADY:
        _log.warning("%d bytes of host memory cannot be locked for %s (%s): copies wait for each "
                     "other", memory.nbytes, gpu, text)


def _unpin(address: int, unregister: Callable[[int], None]) -> None:
    # Without the lock, which the thread may have in which memory is collected.
    unregister(address)
    _pinned.discard(address)
