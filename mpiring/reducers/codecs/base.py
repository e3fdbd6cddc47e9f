"""What every codec does, and what several share."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError
from ...memory.arrays import Array
from ...memory.reduction import quietly


class Codec(Protocol):
    """Turns vectors of float32 into payloads of bytes, and back.

    Any number of threads may use one codec. Vectors and payloads are contiguous. Where numba is
    installed, the first call of each method compiles a loop, which takes up to a second; without
    it, NumPy gives the same bits.
    """

    @property
    def alignment(self) -> int:
        """Elements in a block, or 1: vectors may be cut at its multiples only."""

    def payload_size(self, n: int) -> int:
        """Return how many bytes the payload of `n` elements has."""

    def encode(self, x: Array, payload: Array, lost: Array | None, key: int) -> None:
        """Encode a vector.

        Args:
            x: float32, shape (n,); only read.
            payload: uint8, shape (payload_size(n),), overwritten.
            lost: None, or float32, shape (n,): overwritten by `x` minus what the payload decodes
                to. May be `x` itself.
            key: Where rounding is random, equal keys and inputs give equal bits.
        """

    def decode(self, payload: Array, out: Array, *, adds: bool = False) -> None:
        """Overwrite a float32 vector of shape (n,) by what a payload decodes to, or add that."""

    def is_finite(self, payload: Array, n: int) -> bool:
        """Return False if and only if the vector had Inf or NaN, or overflowed in the code.

        What the payload decodes to then contains some number that is not finite.
        """


def check_size(payload: Array, n: int, size: int) -> None:
    """Refuse a payload of `n` elements that has not `size` bytes.

    Raises:
        ConfigError: It has another size.
    """
    if payload.size != size:
        raise ConfigError(f"a payload of {payload.size} bytes for {n} elements; expected {size} "
                          f"bytes, as payload_size({n}) says")


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
    """Codecs whose payload is a float32 scale for each block, and then codes.

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

    def is_finite(self, payload: Array, n: int) -> bool:
        """See `Codec.is_finite`; reads the scales only."""
        return bool(np.isfinite(self._fields(payload, n)[0]).all())

    def decode(self, payload: Array, out: Array, *, adds: bool = False) -> None:
        """See `Codec.decode`."""
        scales, codes = self._fields(payload, out.size)
        loop = self._decode_loop()
        if loop is None:
            quietly(self._decode_by_numpy, scales, codes, out, adds)
        else:
            loop(scales, codes, out, out.size, self.block, adds)

    def _decode_by_numpy(self, scales: Array, codes: Array, out: Array, adds: bool) -> None:
        decoded = self._decoded(scales, codes, out.size)
        if adds:
            np.add(out, decoded, out=out)
        else:
            out[...] = decoded

    @abstractmethod
    def _decode_loop(self) -> Callable[..., None] | None:
        """Return the compiled loop that decodes, if there is one."""

    @abstractmethod
    def _decoded(self, scales: Array, codes: Array, n: int) -> Array:
        """Return the `n` elements that a payload decodes to."""

    def _fields(self, payload: Array, n: int) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
        """Return the scales and the codes of a payload, as views."""
        check_size(payload, n, self.payload_size(n))
        scales = 4 * -(-n // self.block)
        return payload[:scales].view(np.float32), payload[scales:]

    def _rows(self, x: Array) -> Array:
        """Return a vector as a row for each block; zeros behind its end."""
        rows = np.zeros((-(-x.size // self.block), self.block), x.dtype)
        rows.reshape(-1)[:x.size] = x
        return rows

    def _spread(self, scales: Array, n: int) -> Array:
        """Return each element's scale."""
        spread: Array = np.repeat(scales, self.block)[:n]
        return spread
