"""Says what every codec does."""

from typing import Protocol

from ...memory.arrays import Array


class Codec(Protocol):
    """Turns vectors of float32 into payloads of bytes, and back.

    Any number of threads may use one codec. Vectors and payloads are contiguous. The first call
    of each method compiles a loop where numba is installed, which takes up to a second.
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

    def decode(self, payload: Array, out: Array) -> None:
        """Overwrite a float32 vector of shape (n,) by what a payload decodes to."""

    def add(self, payload: Array, total: Array) -> None:
        """Add what a payload decodes to, in float32, to a vector of shape (n,), in place."""

    def is_finite(self, payload: Array, n: int) -> bool:
        """Return False if and only if the vector had Inf or NaN, or overflowed in the code.

        What the payload decodes to then contains some number that is not finite.
        """
