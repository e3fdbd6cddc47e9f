"""Keeps pinned host memory, through which single copies to and from a GPU go."""

import threading

from .arrays import Array
from .gpu import Event, Gpu


class Staging:
    """Pinned host memory, lent for one copy at a time; any thread may call.

    Args:
        gpu: Whose copies it is for.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._idle: list[tuple[Array, Event | None]] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Array:
        """Return memory of at least so many bytes, which nothing uses."""
        with self._lock:
            fitting = [place for place, (slot, until) in enumerate(self._idle)
                       if slot.size >= nbytes and (until is None or until.test())]
            if fitting:
                return self._idle.pop(min(fitting, key=lambda place: self._idle[place][0].size))[0]
        # Few lengths, so that slots of one operation suit the next.
        return self._gpu.pinned(1 << max(nbytes - 1, 4095).bit_length())

    def give(self, slot: Array, until: Event | None = None) -> None:
        """Take memory back; a copy may use it until an event."""
        with self._lock:
            self._idle.append((slot, until))
