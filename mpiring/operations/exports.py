"""Memory on GPUs that the ranks of a node have opened to each other.

A rank must not free memory that another rank has open. So each rank names the windows that it
does not use any more the next time that a window is made; a window that no rank uses is closed
by all, then freed.
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

from ..gpu.device import Device, DeviceVector
from ..transport.base import Node, Schedule
from .windows import Windows

# How many windows can be given up each time: as many as a barrier takes numbers.
_MOST = 8

_log = logging.getLogger("mpiring")


@functools.cache
def _say_problem(rank: int, device: str, problem: str) -> None:
    """Log, once, why memory is not shared."""
    _log.warning("rank %d cannot share memory of %s with its node (%s): data goes through pinned "
                 "host memory", rank, device, problem)


@dataclass(eq=False)
class _Root:
    """What all vectors in one window have in common; when it dies, the window is given up.

    Attributes:
        memory: This rank's, for users that outlive the communicator.
    """

    memory: DeviceVector


class Exports:
    """The windows in the memory of GPUs of one communicator, on one rank.

    Args:
        windows: Where collectives find them.
    """

    def __init__(self, windows: Windows) -> None:
        self._windows = windows
        # What is open, per rank of the node: in use, or given up by this rank alone.
        self._segments: dict[int, Sequence[DeviceVector]] = {}
        self._given_up: list[int] = []

    def empty(self, node: Node, device: Device, shape: Sequence[int], dtype: DTypeLike,
              number: int) -> Schedule[DeviceVector]:
        """Return a vector in memory that is open to the node's other ranks, where possible.

        Args:
            node: Of `device`'s work.
            shape: Its product is the vector's length.
            number: The window's own, the same on all ranks.

        Collective: within the node. Blocking: no (a schedule).
        """
        yield from self._free(node)
        dtype = np.dtype(dtype)
        n = math.prod(shape)
        memory = device.allocate(n * dtype.itemsize)
        segments = yield from self._opened(node, device, memory)
        if segments is None:
            return memory.view(dtype)
        root = _Root(memory)
        self._segments[number] = segments
        self._windows.add(root, number, cast(Any, segments), node.rank)
        weakref.finalize(root, self._given_up.append, number).atexit = False
        return DeviceVector(device, memory.address, n, dtype, root)

    def _opened(self, node: Node, device: Device,
                memory: DeviceVector) -> Schedule[Sequence[DeviceVector] | None]:
        """Open all ranks' memory; None on all of them where one cannot."""
        problem, handle, opened = "", (0,) * _MOST, []
        try:
            handle = device.gpu.export(memory)
        except OSError as error:
            problem = str(error)
        handles = yield from node.share(*handle)
        # A rank that has none passes zeros.
        if all(any(other) for other in handles):
            try:
                for rank, other in enumerate(handles):
                    opened.append(memory if rank == node.rank else
                                  device.gpu.open(other, memory.nbytes, device))
            except OSError as error:
                problem = str(error)
        if problem:
            _say_problem(node.ranks[node.rank], repr(device), problem)
        answers = yield from node.share(int(len(opened) == node.size))
        if all(ok for ok, in answers):
            return opened
        self._close(opened, node.rank)
        # No rank has it open when it is freed.
        yield (node.barrier(),)
        return None

    def _free(self, node: Node) -> Schedule[None]:
        """Close what all ranks of the node have given up, and free this rank's part of it."""
        offered = (*self._given_up[:_MOST], *(-1 for _ in range(_MOST)))[:_MOST]
        offers = yield from node.share(*offered)
        common = set(offers[0]).intersection(*offers[1:]) - {-1}
        for number in common:
            self._given_up.remove(number)
            self._close(self._segments[number], node.rank)
        if common:
            yield (node.barrier(),)
            for number in common:
                del self._segments[number]

    def _close(self, segments: Sequence[DeviceVector], rank: int) -> None:
        for other, segment in enumerate(segments):
            if other != rank:
                segment.device.gpu.close(segment)
