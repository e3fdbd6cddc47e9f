"""The node-shared arrays of a communicator: creation, lookup and removal."""

import functools
import logging
import math
import os
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from ..gpu.interface import address_of
from ..memory import window
from ..memory.arrays import Array, slice_of
from .base import Node, Schedule, T
from .layout import NOWHERE

if TYPE_CHECKING:
    from .mpi import MpiNode

_log = logging.getLogger("mpiring")

# A bucket needs only one entry, but a program may pass another part of an array in each call.
_MAX_SLICES = 64


@functools.cache
def _log_problem(rank: int, problem: str) -> None:
    """Log, once, why memory cannot be shared."""
    _log.warning("rank %d cannot share memory with its node (%s): private memory is used, which "
                 "collectives must copy", rank, problem)


def mapped(node: "Node | MpiNode", nbytes: int, *,
           private_in_forks: bool = True) -> Schedule[Sequence[Array] | None]:
    """Return `nbytes` bytes of zeros for each rank of the node, in memory that all share.

    Return None on all ranks if a rank cannot map them, which logs the reason. For
    `private_in_forks`, see `window.segments`. Collective within the node.
    """
    layout = functools.partial(window.segments, private_in_forks=private_in_forks)
    segments, problem = yield from _mapped(node, nbytes, layout)
    if problem:
        _log_problem(node.ranks[node.rank], problem)
    return segments


def mapped_once(node: Node, nbytes: int) -> Schedule[tuple[Array | None, str]]:
    """Return `nbytes` bytes of zeros that exist once per node and that all its ranks share.

    Return None on all ranks if a rank cannot map them; also return this rank's problem. Collective
    within the node.
    """
    return _mapped(node, nbytes, window.one_array)


def _mapped(node: "Node | MpiNode", nbytes: int, layout: Callable[[int, int, int, int], T],
            ) -> Schedule[tuple[T | None, str]]:
    """Map a new file on all ranks of a node; return `layout`'s result, and this rank's problem.

    The function `layout` is `window.segments` or `window.one_array`.
    """
    problem = ""
    descriptor, memory = -1, None
    try:
        descriptor = window.create() if node.rank == 0 else -1
    except OSError as error:
        problem = error.strerror or str(error)
    device, number = window.identity(descriptor) if descriptor >= 0 else (0, 0)
    offers = yield from node.share(os.getpid(), descriptor, device, number)
    try:
        pid, root_descriptor, device, number = offers[0]
        if root_descriptor >= 0:
            if node.rank:
                descriptor = window.attach(pid, root_descriptor, (device, number))
            memory = layout(descriptor, node.rank, node.size, nbytes)
    except OSError as error:
        problem = error.strerror or str(error)
    # The file must not be closed before all other ranks have opened it.
    answers = yield from node.share(int(memory is not None))
    if descriptor >= 0:
        os.close(descriptor)
    return memory if all(ok for ok, in answers) else None, problem


class _Window:
    """A node-shared array.

    Attributes:
        number: Number of the window, the same on all ranks of the node.
        address, nbytes: Address and length of this rank's segment.
        slices: Results of `Windows.slices`, by its arguments.
    """

    def __init__(self, number: int, segments: Sequence[Array], rank: int) -> None:
        self.number = number
        self.segments = segments
        self.address = address_of(segments[rank])
        self.nbytes = segments[rank].nbytes
        self.slices: dict[Any, list[Array]] = {}

    def vectors(self, positions: Sequence[tuple[int, ...]], x: Array) -> list[Array]:
        """Return the vectors in all ranks' segments that correspond to the vector `x`."""
        return [segment[offset:offset + x.nbytes].view(x.dtype)
                for segment, (_, offset) in zip(self.segments, positions)]


class Windows:
    """The node-shared arrays of one communicator, on one rank."""

    def __init__(self) -> None:
        # Windows by the id of their root.
        self._windows: dict[int, _Window] = {}

    def empty(
        self, node: Node, shape: Sequence[int], dtype: DTypeLike, number: int,
    ) -> Schedule[Array]:
        """Return an array in memory that is shared within the node, if possible.

        Its content is undefined: shared memory is initially zero, private memory is not. The
        window's number is unique, and the same on all ranks. Collective within the node.
        """
        dtype = np.dtype(dtype)
        segments = yield from mapped(node, math.prod(shape) * dtype.itemsize)
        if segments is None:
            return np.empty(shape, dtype)
        # A slice is no root, because the `base` of its views would be the segment.
        root = np.frombuffer(segments[node.rank].data, np.uint8)
        self.add(root, number, segments, node.rank)
        return root.view(dtype).reshape(shape)

    def add(self, root: object, number: int, segments: Sequence[Array], rank: int) -> None:
        """Add a window, which ends when its root is freed.

        The root is the `base` of all arrays in this rank's segment.
        """
        self._windows[id(root)] = _Window(number, segments, rank)
        weakref.finalize(root, self._windows.pop, id(root)).atexit = False

    def position_of(self, x: Array) -> tuple[int, int]:
        """Return the number of the window that holds `x`, and the byte offset; or NOWHERE."""
        window, offset = self._find(x)
        return NOWHERE if window is None else (window.number, offset)

    def _find(self, x: Array) -> tuple[_Window | None, int]:
        window = self._windows.get(id(x.base))
        if window is not None and x.nbytes == window.nbytes:
            return window, 0
        if self._windows:
            address = address_of(x)
            for window in tuple(self._windows.values()):
                offset = address - window.address
                if 0 <= offset and offset + x.nbytes <= window.nbytes:
                    return window, offset
        return None, 0

    def slices(
        self, node: Node, positions: Sequence[tuple[int, ...]], x: Array,
    ) -> Sequence[Array] | None:
        """Return the slice of each rank's vector that this rank combines; None as for `vectors`."""
        window = self._common_window(positions, x)
        if window is None:
            return None
        key = x.nbytes, x.dtype, *positions
        slices = window.slices.get(key)
        if slices is None:
            if len(window.slices) >= _MAX_SLICES:
                window.slices.clear()
            slices = window.slices[key] = [
                slice_of(vector, node.rank, node.size) for vector in window.vectors(positions, x)]
        return slices

    def vectors(self, positions: Sequence[tuple[int, ...]], x: Array) -> Sequence[Array] | None:
        """Return each rank's vector in shared memory; None unless all of them are in one window.

        The positions are results of `position_of` on each rank of the node for its vector.
        """
        window = self._common_window(positions, x)
        return None if window is None else window.vectors(positions, x)

    def _common_window(self, positions: Sequence[tuple[int, ...]], x: Array) -> _Window | None:
        number = positions[0][0]
        for position in positions:
            if position[0] != number or number < 0:
                return None
        return self._find(x)[0]
