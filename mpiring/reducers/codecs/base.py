"""The interface of codecs, and the base of codecs with blocks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError
from ...gpu.device import DeviceVector
from ...memory.arrays import Array
from ...memory.reduction import quietly


class Codec(ABC):
    """Converts float32 vectors to payloads of bytes, and back.

    Each codec consists of array operations, which NumPy and CuPy run, and of loops that numba
    compiles. All give the same bits, except that CuPy flushes subnormal numbers to zero. With
    numba, the first call of each method compiles a loop, which takes up to a second.

    Codecs are thread-safe. Vectors and payloads are contiguous. All arguments of a call are in host
    memory, or all are on one GPU, which queues the work.
    """

    @property
    def alignment(self) -> int:
        """Number of elements in a block, or 1: vectors may be cut only at multiples of it."""
        return 1

    @abstractmethod
    def payload_size(self, n: int) -> int:
        """Return the number of bytes in the payload of `n` elements."""

    def encode(self, x: Any, payload: Any, lost: Any, key: int) -> None:
        """Encode a vector.

        Args:
            x: float32, shape (n,); only read.
            payload: uint8, shape (payload_size(n),); overwritten.
            lost: None, or float32, shape (n,). Overwritten by `x` minus the decoded payload. May be
                `x` itself.
            key: Key of random rounding; equal keys and inputs give equal bits.
        """
        fields = self._fields(payload, x.size)
        if isinstance(x, DeviceVector):
            x.device.compute(self._encode_arrays, x, payload, lost, key)
        elif (loop := self._encode_loop()) is None:
            quietly(self._encode_arrays, np, x, payload, lost, key)
        else:
            loop(x, *fields, lost, x.size, *self._loop_numbers(key), lost is not None)

    def decode(self, payload: Any, out: Any, *, adds: bool = False) -> None:
        """Decode a payload.

        Args:
            payload: uint8; the payload that `encode` has written.
            out: float32, shape (n,). Overwritten by the decoded vector.
            adds: If true, add the decoded vector to `out` instead.
        """
        fields = self._fields(payload, out.size)
        if isinstance(out, DeviceVector):
            out.device.compute(self._decode_arrays, payload, out, adds)
        elif (loop := self._decode_loop()) is None:
            quietly(self._decode_arrays, np, payload, out, adds)
        else:
            loop(*fields, out, out.size, *self._loop_numbers(None), adds)

    def is_finite(self, payload: Any, n: int) -> bool:
        """Return false if and only if the vector had Inf or NaN, or encoding overflowed.

        The decoded vector then has a number that is not finite. On a GPU, the result is always
        true, because reading the payload would synchronize with the GPU.
        """
        fields = self._fields(payload, n)
        return isinstance(payload, DeviceVector) or self._are_finite(fields)

    def _encode_arrays(self, xp: Any, x: Any, payload: Any, lost: Any, key: int) -> None:
        """Encode by array operations.

        Args:
            xp: Array module, NumPy or CuPy.
        """
        self._write(xp, x, self._fields(payload, x.size), key)
        if lost is not None:
            decoded = xp.empty_like(x)
            self._read(xp, self._fields(payload, x.size), decoded)
            xp.subtract(x, decoded, out=lost)

    def _decode_arrays(self, xp: Any, payload: Any, out: Any, adds: bool) -> None:
        decoded = xp.empty_like(out) if adds else out
        self._read(xp, self._fields(payload, out.size), decoded)
        if adds:
            xp.add(out, decoded, out=out)

    @abstractmethod
    def _fields(self, payload: Any, n: int) -> Sequence[Any]:
        """Return the vectors that make up a payload of `n` elements, as views.

        Raises:
            ConfigError: The payload has another size.
        """

    @abstractmethod
    def _write(self, xp: Any, x: Any, fields: Sequence[Any], key: int) -> None:
        """Write the fields of a vector's payload, by array operations."""

    @abstractmethod
    def _read(self, xp: Any, fields: Sequence[Any], out: Any) -> None:
        """Overwrite `out` by the decoded fields, by array operations."""

    @abstractmethod
    def _are_finite(self, fields: Sequence[Array]) -> bool:
        """Return whether the encoded vector was finite, from the fields."""

    @abstractmethod
    def _encode_loop(self) -> Callable[..., None] | None:
        """Return the compiled loop that encodes, if there is one."""

    @abstractmethod
    def _decode_loop(self) -> Callable[..., None] | None:
        """Return the compiled loop that decodes, if there is one."""

    def _loop_numbers(self, key: int | None) -> Sequence[Any]:
        """Return additional arguments of the loops: to encode with a key, to decode without one."""
        return ()


def check_size(payload: Any, n: int, size: int) -> None:
    """Raise ConfigError unless the payload of `n` elements has `size` bytes."""
    if payload.size != size:
        raise ConfigError(f"a payload of {payload.size} bytes for {n} elements; expected {size} "
                          f"bytes, as payload_size({n}) says")


def mixed(key: int) -> int:
    """Return a 32-bit hash of a key; even neighboring keys have equal hashes only by chance.

    Source: Steele, Lea and Flood, OOPSLA 2014 (SplitMix64).
    """
    z = (key + 1) * 0x9e3779b97f4a7c15 & 0xffffffffffffffff
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9 & 0xffffffffffffffff
    z = (z ^ z >> 27) * 0x94d049bb133111eb & 0xffffffffffffffff
    return z >> 32


@dataclass(frozen=True)
class BlockCodec(Codec):
    """A codec with a payload of float32 scales, one per block, followed by codes.

    Args:
        block: Number of elements that share a scale.
    """

    block: int

    @property
    def alignment(self) -> int:
        """Number of elements in a block: vectors may be cut only at multiples of it."""
        return self.block

    def _are_finite(self, fields: Sequence[Array]) -> bool:
        return bool(np.isfinite(fields[0]).all())

    def _fields(self, payload: Any, n: int) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
        """Return the scales and the codes of a payload, as views."""
        check_size(payload, n, self.payload_size(n))
        scales = 4 * -(-n // self.block)
        return payload[:scales].view(np.float32), payload[scales:]

    def _loop_numbers(self, key: int | None) -> Sequence[Any]:
        return (self.block,)

    def _rows(self, xp: Any, x: Any) -> Any:
        """Return a vector as rows, one per block, padded with zeros."""
        rows = xp.zeros((-(-x.size // self.block), self.block), x.dtype)
        rows.reshape(-1)[:x.size] = x
        return rows

    def _spread(self, xp: Any, scales: Any, n: int) -> Any:
        """Return each element's scale."""
        return xp.repeat(scales, self.block)[:n]
