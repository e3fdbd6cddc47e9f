"""Combines long private vectors of a node's ranks, piece by piece, in compiled code.

What collectives.shared.staged does, to the bit and to the barrier: a rank with this code and one
without may do it together.
"""

import ctypes
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np

from ..memory import machine
from ..memory.arrays import Array, data_address
from ..memory.sums import SCRATCH_BYTES, adding
from .base import Node, Schedule
from .layout import SLOT_BYTES
from .node_memory import SharedNode

# The words of a call: the vector's address and length, the length of its slices, ranks, rank, what
# is divided by; the number of barriers, of the piece, and whether its barrier is waited for; the
# address of scratch memory, and how often to look at a barrier. Behind them, per rank, the
# addresses of flags, of slots, of sources; at last those of what is written to.
X, N, WIDTH, P, R, DIVISOR, COUNT, PIECE, WAITS, SCRATCH, SPINS, FLAGS = range(12)

# A call works on so many pieces at most: some milliseconds.
_PIECES = 32
# How often it looks at a barrier, for some 3 us: after that the engine knows better. 20 to 5000 are
# the same.
_SPINS = 50


def combine(node: Node, x: Array, divisor: float, width: int) -> Schedule[bool]:
    """Add up private vectors over the ranks of a node, in place; return whether there is code.

    Args:
        x: Shape (n,), contiguous, in host memory, of a dtype of `sums.DTYPES`.
        divisor: Of the sums.
        width: Numbers in a slice of a piece, see `staged`.

    Collective: no. Blocking: no (a schedule).
    """
    address = data_address(x)
    if not isinstance(node, SharedNode) or node.size == 1 or address % x.itemsize:
        return False
    if divisor != int(divisor):
        # A share of the number of ranks: the words of a call are whole numbers.
        return False
    found = code(x.dtype.name)
    if found is None:
        return False
    p, scratch = node.size, ctypes.create_string_buffer(SCRATCH_BYTES)
    flags, slots = node.addresses()
    words = array("q", [address, x.size, width, p, node.rank, int(divisor), node.count, 0, 0,
                        ctypes.addressof(scratch), _SPINS, *flags, *slots, *[0] * (p + 2)])
    while found.call(words.buffer_info()[0]):
        yield (node.arrived(words[COUNT]),)
    node.arrived(words[COUNT])
    return True


def code(name: str, *, compiles: bool = False) -> machine.Code | None:
    """Return the code for a dtype; None where there is none.

    Args:
        name: Of a dtype of `sums.DTYPES`.
        compiles: Compile it if need be, for a second; else only what is on disk is taken.
    """
    find = machine.code if compiles else machine.saved
    return find(f"sums of private vectors of {name}", _pipeline, "int64 -> int64", name)


def _pipeline(intrinsics: Any, name: str) -> Callable[..., Any]:
    """Return what numba compiles: it works until a rank is late, and returns whether one was."""
    words_at, store_release = intrinsics.pointer_to(np.dtype(np.int64)), intrinsics.store_release
    meet = _meeting(intrinsics)
    lay, combine, take = _moves(intrinsics, name)

    def run(address):  # type: ignore[no-untyped-def]
        words = words_at(address)
        pieces = -(-words[N] // (words[WIDTH] * words[P]))
        for _ in range(_PIECES):
            j = words[PIECE]
            if words[WAITS] == 0:
                if j < pieces:
                    lay(words, j)
                if j > 0:
                    combine(words, address, j - 1)
                words[COUNT] += 1
                store_release(words[FLAGS + words[R]], words[COUNT])
                words[WAITS] = 1
            if not meet(words):
                return 1
            words[WAITS] = 0
            if j > 0:
                take(words, j - 1)
            words[PIECE] = j + 1
            if j == pieces:
                return 0
        return 1

    return run


def _meeting(intrinsics: Any) -> Any:
    """Return a function that waits a while for all ranks to come to a barrier."""
    load_acquire, relax = intrinsics.load_acquire, intrinsics.relax

    @intrinsics.inlined
    def meet(words):  # type: ignore[no-untyped-def]
        r, p = 0, words[P]
        for _ in range(words[SPINS]):
            while r < p and load_acquire(words[FLAGS + r]) >= words[COUNT]:
                r += 1
            if r == p:
                return True
            relax()
        return False

    return meet


def _places(inlined: Any, itemsize: int) -> tuple[Any, Any]:
    """Return functions: where piece j lies in the slot of rank s, and its bounds."""
    half_bytes = SLOT_BYTES // 2

    @inlined
    def slot(words, s, j):  # type: ignore[no-untyped-def]
        return words[FLAGS + words[P] + s] + (j & 1) * half_bytes

    @inlined
    def bounds(words, s, j):  # type: ignore[no-untyped-def]
        """Return the address of piece j, where its slice s starts and stops, and its bytes."""
        step = words[WIDTH] * words[P]
        size = min(step, words[N] - j * step)
        start = min(s * words[WIDTH], size)
        stop = min(start + words[WIDTH], size)
        return (words[X] + j * step * itemsize, start * itemsize, stop * itemsize,
                size * itemsize)

    return slot, bounds


def _moves(intrinsics: Any, name: str) -> tuple[Any, Any, Any]:
    """Return functions that lay out a piece, combine this rank's slice of it, take the others'."""
    itemsize = np.dtype(name).itemsize
    inlined, copy_bytes = intrinsics.inlined, intrinsics.copy_bytes
    words_at, add_up = intrinsics.pointer_to(np.dtype(np.int64)), adding(intrinsics, name)
    slot, bounds = _places(inlined, itemsize)

    @inlined
    def lay(words, j):  # type: ignore[no-untyped-def]
        piece, start, stop, size = bounds(words, words[R], j)
        mine = slot(words, words[R], j)
        copy_bytes(mine, piece, start)
        copy_bytes(mine + stop, piece + stop, size - stop)

    @inlined
    def combine(words, address, j):  # type: ignore[no-untyped-def]
        p, r = words[P], words[R]
        piece, start, stop, _ = bounds(words, r, j)
        sources_at = address + 8 * (FLAGS + 2 * p)
        sources = words_at(sources_at)
        for s in range(p):
            sources[s] = slot(words, s, j) + start
        sources[p], sources[p + 1] = piece + start, sources[r]
        sources[r] = piece + start
        add_up(sources_at, p, (stop - start) // itemsize, words[DIVISOR], words[SCRATCH],
               sources_at + 8 * p, 2)

    @inlined
    def take(words, j):  # type: ignore[no-untyped-def]
        for s in range(words[P]):
            if s != words[R]:
                piece, start, stop, _ = bounds(words, s, j)
                copy_bytes(piece + start, slot(words, s, j) + start, stop - start)

    return lay, combine, take
