"""Cuts vectors and their payloads for codecs, and lends scratch memory that stays in the cache."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError
from ...memory.arrays import Array

# Elements in a piece: few enough for a level-2 cache of 1 MiB to hold a piece, its scratch memory
# and its payload, and so many that NumPy's calls, half a microsecond each, cost little.
PIECE = 48 << 10

# Where the compiled loops put what is lost.
NOWHERE, IN_PLACE, APART = 0, 1, 2


class _Scratch(threading.local):
    """A thread's scratch memory, which grows to what the largest blocks need."""

    def __init__(self) -> None:
        self.rows = np.empty((2, 0), np.float32)


_scratch = _Scratch()


def scratch(n: int) -> tuple[Array, Array]:
    """Return two float32 vectors of `n` elements, this thread's until its next call."""
    if _scratch.rows.shape[1] < n:
        _scratch.rows = np.empty((2, max(n, PIECE)), np.float32)
    first, second = _scratch.rows[:, :n]
    return first, second


def pieces(n: int, block: int) -> Iterator[tuple[slice, slice, tuple[int, int]]]:
    """Cut `n` elements into pieces of whole blocks; a shorter last block is a piece of its own.

    Yields:
        Where the piece's elements are, where its blocks are, and its shape: blocks, and elements
        in each.
    """
    whole, step = n // block, max(1, PIECE // block)
    for first in range(0, whole, step):
        last = min(first + step, whole)
        yield slice(first * block, last * block), slice(first, last), (last - first, block)
    if n % block:
        yield slice(whole * block, n), slice(whole, whole + 1), (1, n % block)


def check_size(payload: Array, n: int, size: int) -> None:
    """Refuse a payload that is not as long as that of `n` elements.

    Args:
        size: What it must have, in bytes.

    Raises:
        ConfigError: It has another size.
    """
    if payload.size != size:
        raise ConfigError(f"a payload of {payload.size} bytes for {n} elements; expected {size} "
                          f"bytes, as payload_size({n}) says")


def place_of_lost(x: Array, lost: Array | None) -> int:
    """Return where what is lost of `x` goes: NOWHERE, IN_PLACE or APART."""
    if lost is None:
        return NOWHERE
    return IN_PLACE if lost.ctypes.data == x.ctypes.data else APART


def mixed(key: int) -> int:
    """Return 32 bits that keys, even neighbouring ones, share by chance only.

    Source: Steele, Lea and Flood, OOPSLA 2014 (SplitMix64).
    """
    z = (key + 1) * 0x9e3779b97f4a7c15 & 0xffffffffffffffff
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9 & 0xffffffffffffffff
    z = (z ^ z >> 27) * 0x94d049bb133111eb & 0xffffffffffffffff
    return z >> 32


@dataclass(frozen=True)
class InBlocks(ABC):
    """What codecs share whose payload is a float32 scale for each block, and then codes.

    Args:
        block: Elements that share a scale.
    """

    block: int

    @property
    def alignment(self) -> int:
        """Elements in a block: vectors may be cut at its multiples only."""
        return self.block

    @abstractmethod
    def payload_size(self, n: int) -> int:
        """Return the bytes of the payload of `n` elements."""

    def decode(self, payload: Array, out: Array) -> None:
        """See `Codec.decode`."""
        self._decode(payload, out, False)

    def add(self, payload: Array, total: Array) -> None:
        """See `Codec.add`."""
        self._decode(payload, total, True)

    def is_finite(self, payload: Array, n: int) -> bool:
        """See `Codec.is_finite`; reads the scales only."""
        return bool(np.isfinite(self._parts(payload, n)[0]).all())

    @abstractmethod
    def _decode(self, payload: Array, out: Array, adds: bool) -> None:
        """Write what a payload decodes to, or add it."""

    def _parts(self, payload: Array, n: int) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
        """Return the scales and the codes of a payload."""
        check_size(payload, n, self.payload_size(n))
        scales = 4 * -(-n // self.block)
        return payload[:scales].view(np.float32), payload[scales:]
