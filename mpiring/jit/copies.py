"""Copies around the caches, compiled by numba: stores that do not load the cache line first.

An ordinary store loads its cache line and writes it back later, which doubles the traffic. Data
stored around the caches is in no cache afterwards, so this is worthwhile only for data that would
not stay in a cache anyway.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..memory.arrays import Array, data_address
from . import cache

# Bytes of a block, which is stored to all outputs while it is in the level-1 cache. Measured.
_BLOCK_BYTES = 16 << 10


def stream(x: Array, outs: Sequence[Array]) -> bool:
    """Copy a vector to others; return False, without copying, if there is no code for it.

    All vectors are contiguous, of one shape and dtype; no out overlaps another or `x`.
    """
    machine_code = code()
    if machine_code is None:
        return False
    q = len(outs)
    addresses = (ctypes.c_int64 * q)(*map(data_address, outs))
    machine_code.call(data_address(x), x.nbytes, ctypes.addressof(addresses), q)
    return True


def code(*, compiles: bool = False) -> cache.Code | None:
    """Return the code of `stream`; None if there is none.

    If `compiles`, compile it if necessary, which takes a second; otherwise, use only saved code.
    """
    return cache.code("long copies", _stream, "int64 int64 int64 int64 -> int64",
                      compiles=compiles)


def _stream(intrinsics: Any) -> Callable[..., Any]:
    """Return the function to compile.

    Its arguments are the address and the number of bytes of x, the address of the outputs'
    addresses, and the number of outputs.
    """
    words_at = intrinsics.pointer_to(np.dtype(np.int64))
    inlined, copy_bytes, line_bytes = (
        intrinsics.inlined, intrinsics.copy_bytes, intrinsics.LINE_BYTES)
    stream_line, end_stream = intrinsics.stream_line, intrinsics.end_stream

    @inlined
    def stream_block(target, source, nbytes):  # type: ignore[no-untyped-def]
        head = min(-target % line_bytes, nbytes)
        copy_bytes(target, source, head)
        end = head + (nbytes - head) // line_bytes * line_bytes
        for at in range(head, end, line_bytes):
            stream_line(target + at, source + at)
        copy_bytes(target + end, source + end, nbytes - end)

    def run(source, nbytes, outs_at, q):  # type: ignore[no-untyped-def]
        outs = words_at(outs_at)
        for start in range(0, nbytes, _BLOCK_BYTES):
            for s in range(q):
                stream_block(outs[s] + start, source + start, min(_BLOCK_BYTES, nbytes - start))
        end_stream()
        return 0

    return run
