"""The interface of codecs, and the base of codecs with blocks."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError
from ...gpu.interface import DeviceVector
from ...gpu.warps import WarpKernel, warp_kernel
from ...memory.arrays import Array
from ...memory.reduction import quietly


class Codec(ABC):
    """Converts float32 vectors to payloads of bytes, and back.

    Each codec consists of NumPy operations, of loops that numba compiles, and of kernels for GPUs.
    All give the same bits. With numba, the first call of each method compiles a loop, which takes
    up to a second.

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
            x.device.launch(self._encode_kernel(), self._encode_arrays, x, lost, mixed(key),
                            *fields)
        elif (loop := self._encode_loop()) is None:
            quietly(self._encode_arrays, x, lost, mixed(key), *fields)
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
            out.device.launch(self._decode_kernel(), self._decode_arrays, out, adds, *fields)
        elif (loop := self._decode_loop()) is None:
            quietly(self._decode_arrays, out, adds, *fields)
        else:
            loop(*fields, out, out.size, *self._loop_numbers(None), adds)

    def is_finite(self, payload: Any, n: int) -> bool:
        """Return false if and only if the vector had Inf or NaN, or encoding overflowed.

        The decoded vector then has a number that is not finite. On a GPU, the result is always
        true, because reading the payload would synchronize with the GPU.
        """
        fields = self._fields(payload, n)
        return isinstance(payload, DeviceVector) or self._are_finite(fields)

    def _encode_arrays(self, x: Array, lost: Array | None, seed: int, *fields: Array) -> None:
        self._write(x, fields, seed)
        if lost is not None:
            decoded = np.empty_like(x)
            self._read(fields, decoded)
            np.subtract(x, decoded, out=lost)

    def _decode_arrays(self, out: Array, adds: bool, *fields: Array) -> None:
        decoded = np.empty_like(out) if adds else out
        self._read(fields, decoded)
        if adds:
            np.add(out, decoded, out=out)

    @abstractmethod
    def _fields(self, payload: Any, n: int) -> Sequence[Any]:
        """Return the vectors that make up a payload of `n` elements, as views.

        Raises:
            ConfigError: The payload has another size.
        """

    @abstractmethod
    def _write(self, x: Array, fields: Sequence[Array], seed: int) -> None:
        """Write the fields of a vector's payload, by NumPy; `seed` is the mixed key."""

    @abstractmethod
    def _read(self, fields: Sequence[Array], out: Array) -> None:
        """Overwrite `out` by the decoded fields, by NumPy."""

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

    @abstractmethod
    def _encode_kernel(self) -> WarpKernel:
        """Return the kernel that encodes: of `x`, `lost`, the mixed key, and the fields."""

    @abstractmethod
    def _decode_kernel(self) -> WarpKernel:
        """Return the kernel that decodes: of `out`, `adds`, and the fields."""


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

    Attributes:
        code_type: C++ type of the codes.
        encode_text, decode_text: Statements of the kernels; see `warp_kernel`.
    """

    block: int
    code_type: ClassVar[str]
    encode_text: ClassVar[str]
    decode_text: ClassVar[str]

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

    @functools.cache  # noqa: B019  # equal codecs share it
    def _encode_kernel(self) -> WarpKernel:
        return warp_kernel(f"{type(self).__name__}_{self.block}_encode", {
            "x": "const float *", "lost": "float *", "seed": "unsigned int", "scales": "float *",
            "codes": f"{self.code_type} *"}, self.encode_text, block=self.block)

    @functools.cache  # noqa: B019  # equal codecs share it
    def _decode_kernel(self) -> WarpKernel:
        return warp_kernel(f"{type(self).__name__}_{self.block}_decode", {
            "out": "float *", "adds": "bool", "scales": "const float *",
            "codes": f"const {self.code_type} *"}, self.decode_text, block=self.block)

    def _rows(self, x: Array) -> Array:
        """Return a vector as rows, one per block, padded with zeros."""
        rows = np.zeros((-(-x.size // self.block), self.block), x.dtype)
        rows.reshape(-1)[:x.size] = x
        return rows

    def _spread(self, scales: Array, n: int) -> Array:
        """Return each element's scale."""
        return np.repeat(scales, self.block)[:n]
