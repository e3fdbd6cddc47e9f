"""Makes a 64-bit digest of arrays: of their bits, not of the numbers that they mean."""

import hashlib
from collections.abc import Iterable

import numpy as np

from ..errors import ConfigError
from .arrays import Array

# Of the standard library's: 1.2 GB/s on any processor. SHA-256 has 1.8 where there are
# instructions for it, and a third of that elsewhere; CRCs have 32 bits.
_DIGEST_BYTES = 8


def digest(pieces: Iterable[Array | bytes]) -> int:
    """Return a number below 2⁶⁴ that tells these bytes from all others, as far as that goes.

    Args:
        pieces: Contiguous memory, one piece after the other; where one ends does not count.

    Source: BLAKE2b, RFC 7693.
    """
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for piece in pieces:
        state.update(piece if isinstance(piece, bytes) else piece.data)
    return int.from_bytes(state.digest(), "little")


def bytes_of(x: Array) -> Array:
    """Return the bytes of an array's elements, in the order of its indices.

    Args:
        x: Of any shape, strides and dtype but objects.

    Returns:
        A vector of uint8; shares memory with a C-contiguous array.

    Raises:
        ConfigError: It holds Python objects.
    """
    if x.dtype.hasobject:
        raise ConfigError(f"an array of {x.dtype} holds Python objects, which have no bits to "
                          f"compare between processes")
    raw = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    if x.dtype.char in "gG" and np.finfo(np.longdouble).nmant == 63:
        # x86's long double has ten bytes; what follows, up to its size in memory, is anything.
        raw = raw.reshape(-1, np.dtype(np.longdouble).itemsize).copy()
        raw[:, 10:] = 0
    return raw.reshape(-1)
