"""Lends pinned host memory for single copies to and from a GPU."""

import threading

from ..memory.arrays import Array
from .base import Event, Gpu

# Idle memory beyond both is freed, the oldest first: pinning a page again costs ten times as much
# as copying it, but pinned memory is lost to all other programs.
_KEEP, _KEEP_BYTES = 16, 256 << 20
# How many slots, the oldest, are tested for whether the GPU has done with them.
_LOOKS = 4

_Slot = tuple[Array, "Event | None"]


class Staging:
    """Pinned host memory, lent for one copy at a time; any thread may call.

    Args:
        gpu: Whose copies it is for.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        # In the order in which they were given back.
        self._idle: list[_Slot] = []
        self._idle_bytes = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Array:
        """Return memory of at least `nbytes`, which nothing uses."""
        # Few lengths, so that slots of one operation fit the next.
        size = 1 << max(nbytes - 1, 4095).bit_length()
        busy: list[_Slot] = []
        while len(busy) < _LOOKS and (found := self._removed(size)) is not None:
            if _is_free(found):
                break
            busy.append(found)
        else:
            found = None
        for slot in busy:
            self._add(slot)
        return self._gpu.pinned(size) if found is None else found[0]

    def give(self, slot: Array, until: Event | None = None) -> None:
        """Take memory back; a copy may use it until an event."""
        self._add((slot, until))
        for _ in range(_LOOKS):
            if len(self._idle) <= _KEEP or self._idle_bytes <= _KEEP_BYTES:
                break
            oldest = self._removed()
            if oldest is not None and not _is_free(oldest):
                self._add(oldest)

    def _add(self, slot: _Slot) -> None:
        with self._lock:
            self._idle.append(slot)
            self._idle_bytes += slot[0].size

    def _removed(self, size: int | None = None) -> _Slot | None:
        """Remove the oldest slot, of a size if one is given, and return it; None if none is."""
        with self._lock:
            for index, (slot, _) in enumerate(self._idle):
                if size is None or slot.size == size:
                    self._idle_bytes -= slot.size
                    return self._idle.pop(index)
        return None


def _is_free(slot: _Slot) -> bool:
    """Return whether no copy uses a slot; not under the lock, since it calls CUDA."""
    until = slot[1]
    return until is None or until.test()
