"""What every codec does, and what several share."""

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
    """Turns vectors of float32 into payloads of bytes, and back.

    Each codec is written as array operations, which NumPy and CuPy run, and as loops that numba
    compiles. The bits are the same; CuPy's kernels alone take subnormal numbers for zero. Where
    numba is installed, the first call of each method compiles a loop, which takes up to a second.

    Any number of threads may use one codec. Vectors and payloads are contiguous, and all of one
    call are in host memory, or all on one GPU, where work is queued.
    """

    @property
    def alignment(self) -> int:
        """Elements in a block, or 1: vectors may be cut at its multiples only."""
        return 1

    @abstractmethod
    def payload_size(self, n: int) -> int:
        """Return how many bytes the payload of `n` elements has."""

    def encode(self, x: Any, payload: Any, lost: Any, key: int) -> None:
        """Encode a vector.

        Args:
            x: float32, shape (n,); only read.
            payload: uint8, shape (payload_size(n),), overwritten.
            lost: None, or float32, shape (n,): overwritten by `x` minus what the payload decodes
                to. May be `x` itself.
            key: Where rounding is random, equal keys and inputs give equal bits.
        """
        fields = self._fields(payload, x.size)
        if isinstance(x, DeviceVector):
            x.device.compute(self._encode_arrays, x, payload, lost, key)
        elif (loop := self._encode_loop()) is None:
            quietly(self._encode_arrays, np, x, payload, lost, key)
        else:
            loop(x, *fields, lost, x.size, *self._loop_numbers(key), lost is not None)

    def decode(self, payload: Any, out: Any, *, adds: bool = False) -> None:
        """Overwrite a float32 vector of shape (n,) by what a payload decodes to, or add that."""
        fields = self._fields(payload, out.size)
        if isinstance(out, DeviceVector):
            out.device.compute(self._decode_arrays, payload, out, adds)
        elif (loop := self._decode_loop()) is None:
            quietly(self._decode_arrays, np, payload, out, adds)
        else:
            loop(*fields, out, out.size, *self._loop_numbers(None), adds)

    def is_finite(self, payload: Any, n: int) -> bool:
        """Return False if and only if the vector had Inf or NaN, or overflowed in the code.

        What the payload decodes to then contains some number that is not finite. On a GPU it
        returns True: reading the payload would wait for the GPU.
        """
        fields = self._fields(payload, n)
        return isinstance(payload, DeviceVector) or self._are_finite(fields)

    def _encode_arrays(self, xp: Any, x: Any, payload: Any, lost: Any, key: int) -> None:
        """Encode by array operations.

        Args:
            xp: NumPy or CuPy; the arrays are its own.
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
        """Return the vectors that a payload of `n` elements consists of, as views.

        Raises:
            ConfigError: It has another size.
        """

    @abstractmethod
    def _write(self, xp: Any, x: Any, fields: Sequence[Any], key: int) -> None:
        """Write the fields of a vector's payload, by array operations."""

    @abstractmethod
    def _read(self, xp: Any, fields: Sequence[Any], out: Any) -> None:
        """Overwrite `out` by what fields decode to, by array operations."""

    @abstractmethod
    def _are_finite(self, fields: Sequence[Array]) -> bool:
        """Return whether all was finite, by the fields."""

    @abstractmethod
    def _encode_loop(self) -> Callable[..., None] | None:
        """Return the compiled loop that encodes, if there is one."""

    @abstractmethod
    def _decode_loop(self) -> Callable[..., None] | None:
        """Return the compiled loop that decodes, if there is one."""

    def _loop_numbers(self, key: int | None) -> Sequence[Any]:
        """Return what the loops are given besides: to encode by a key, or, for None, to decode."""
        return ()


def check_size(payload: Any, n: int, size: int) -> None:
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
class BlockCodec(Codec):
    """Codecs whose payload is a float32 scale for each block, and then codes.

    Args:
        block: Elements that share a scale.
    """

    block: int

    @property
    def alignment(self) -> int:
        """Elements in a block: vectors may be cut at its multiples only."""
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
        """Return a vector as a row for each block; zeros behind its end."""
        rows = xp.zeros((-(-x.size // self.block), self.block), x.dtype)
        rows.reshape(-1)[:x.size] = x
        return rows

    def _spread(self, xp: Any, scales: Any, n: int) -> Any:
        """Return each element's scale."""
        return xp.repeat(scales, self.block)[:n]
