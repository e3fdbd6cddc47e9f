"""GPU memory that the ranks of a node have opened to each other.

A rank must not free memory that another rank has open. Therefore, whenever a window is created,
each rank names the windows that it no longer uses. All ranks close the windows that no rank uses,
and then free them.
"""

import functools
import logging
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike

from ..gpu.device import Device
from ..gpu.interface import DeviceVector
from ..transport.base import Node, Schedule
from ..transport.windows import Windows

# Number of windows that can be closed at a time: a barrier carries this many numbers.
_MAX_CLOSED = 8

_log = logging.getLogger("mpiring")


@functools.cache
def log_problem(rank: int, device: str, problem: str) -> None:
    """Log, once, why memory cannot be shared."""
    _log.warning("rank %d cannot share memory of %s with its node (%s): data goes through pinned "
                 "host memory", rank, device, problem)


@dataclass(eq=False)
class _Root:
    """Common owner of all vectors in one window; when it is freed, the rank gives up the window.

    It keeps the memory of this rank for users that outlive the communicator.
    """

    memory: DeviceVector


class Exports:
    """The windows in GPU memory of one communicator, on one rank."""

    def __init__(self, windows: Windows) -> None:
        self._windows = windows
        # Segments of open windows, by number. This rank no longer uses the windows in _given_up.
        self._segments: dict[int, Sequence[DeviceVector]] = {}
        self._given_up: list[int] = []
        # Memory of other ranks that is open, by its address.
        self._opened: dict[int, DeviceVector] = {}

    def empty(self, node: Node, device: Device, shape: Sequence[int], dtype: DTypeLike,
              number: int) -> Schedule[DeviceVector]:
        """Return a vector in memory that is open to the node's other ranks, if possible.

        The node's barriers wait for queued work on `device`. The window's number is unique, and the
        same on all ranks. Collective within the node.
        """
        yield from self._free_windows(node, device)
        dtype = np.dtype(dtype)
        n = math.prod(shape)
        memory = device.allocate(n * dtype.itemsize)
        segments = yield from self.open(node, device, memory)
        if segments is None:
            return memory.view(dtype)
        root = _Root(memory)
        self._segments[number] = segments
        self._windows.add(root, number, cast(Any, segments), node.rank)
        weakref.finalize(root, self._given_up.append, number).atexit = False
        return DeviceVector(device, memory.address, n, dtype, root)

    def open(self, node: Node, device: Device,
             memory: DeviceVector) -> Schedule[Sequence[DeviceVector] | None]:
        """Open the memory of all ranks; return None on all ranks if one of them fails."""
        problem, handle, opened = "", (0,) * _MAX_CLOSED, []
        try:
            handle = device.gpu.export(memory)
        except OSError as error:
            problem = str(error)
        handles = yield from node.share(*handle)
        # A rank that has failed passes zeros.
        if all(any(other) for other in handles):
            try:
                for rank, other in enumerate(handles):
                    opened.append(memory if rank == node.rank else
                                  self._open(other, memory.nbytes, device))
            except OSError as error:
                problem = str(error)
        if problem:
            log_problem(node.ranks[node.rank], repr(device), problem)
        answers = yield from node.share(int(len(opened) == node.size))
        if all(ok for ok, in answers):
            return opened
        self._close(opened)
        # After this barrier, no rank has the memory open, so it can be freed.
        yield (node.barrier(),)
        return None

    def _free_windows(self, node: Node, device: Device) -> Schedule[None]:
        """Close the windows that all ranks of the node have given up; free this rank's segments."""
        if self._given_up:
            # Queued work may still use the memory of all ranks.
            yield (device.event(),)
        offered = (*self._given_up[:_MAX_CLOSED], *(-1 for _ in range(_MAX_CLOSED)))[:_MAX_CLOSED]
        offers = yield from node.share(*offered)
        common = set(offers[0]).intersection(*offers[1:]) - {-1}
        for number in common:
            self._given_up.remove(number)
            self._close(self._segments[number])
        if common:
            yield (node.barrier(),)
            for number in common:
                del self._segments[number]

    def _open(self, handle: Sequence[int], nbytes: int, device: Device) -> DeviceVector:
        memory = device.gpu.open(handle, nbytes, device)
        self._opened[memory.address] = memory
        return memory

    def _close(self, segments: Sequence[DeviceVector]) -> None:
        for segment in segments:
            if self._opened.pop(segment.address, None) is not None:
                segment.device.gpu.close(segment)

    def close(self) -> None:
        """Close all memory of other ranks, when no queued work uses it any more."""
        self._close(list(self._opened.values()))
