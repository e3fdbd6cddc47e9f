"""Queues barriers of a node's ranks on CUDA streams, by NVIDIA's stream memory operations.

The driver writes this rank's word and waits for the words of the other ranks, without a kernel and
without the host. ctypes calls its one function. The alternatives, and why each was dropped:

- CuPy has no stream memory operations. NVIDIA's package `cuda-bindings` has them, but one function
  is not worth a dependency.
- `cuStreamWriteValue32_v2` and `cuStreamWaitValue32_v2` need one call per rank. Drivers have them
  and `cuStreamBatchMemOp_v2` since CUDA 11.7, or none of the three.
- The functions without `_v2` need an option of the kernel module. Only they are described by the
  device attribute CAN_USE_STREAM_MEM_OPS. It is 0 on GPUs that have the new functions.
- A stream can wait for an IPC event of another process only after that process has recorded the
  event. The hosts would have to meet first.
- A kernel that waits for words keeps a multiprocessor busy. Without MPS, it would use up the time
  slice of its process.
- A function of the host, by `cudaLaunchHostFunc`, needs Python's lock between two kernels.

The sources are cuda.h of CUDA 13.0, and src/ce_coll.cc of NCCL, which has the same barrier. By
default, a write also waits until the results of earlier work are visible.
"""

import ctypes
import functools
import threading
from typing import Any

import numpy as np

from .interface import Flags, address_of

# The fields of CUstreamBatchMemOpParams that are not 0. In its flags, 0 means
# CU_STREAM_WAIT_VALUE_GEQ, a cyclic comparison, and CU_STREAM_WRITE_VALUE_DEFAULT.
_OPERATION = np.dtype({"names": ["operation", "address", "value"], "formats": ["u4", "u8", "u4"],
                       "offsets": [0, 8, 16], "itemsize": 48})
# CU_STREAM_MEM_OP_WAIT_VALUE_32 and CU_STREAM_MEM_OP_WRITE_VALUE_32.
_WAIT, _WRITE = 1, 2
ALL_BITS = (1 << 32) - 1


@functools.cache
def driver() -> Any:
    """Return the driver's function for a batch of operations, or raise OSError."""
    # If a stream is full, the function waits until the GPU has done some work, which may wait for
    # other ranks. It must not hold Python's lock meanwhile, as PyDLL would.
    library = ctypes.CDLL("libcuda.so.1")
    try:
        batch = library.cuStreamBatchMemOp_v2
    except AttributeError as error:
        raise OSError(f"{error}; install a driver for CUDA 12 or newer") from error
    batch.argtypes = ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint
    return batch


class Barrier:
    """The operations by which this rank meets the others, which differ only in the number."""

    def __init__(self, flags: Flags) -> None:
        words = list(flags.words)
        own = words.pop(flags.rank)
        self._operations = np.zeros(1 + len(words), _OPERATION)
        self._operations["operation"] = [_WRITE] + len(words) * [_WAIT]
        self._operations["address"] = [address_of(word) for word in (own, *words)]
        self._values = self._operations["value"]
        self._batch = driver()
        self._arguments = len(self._operations), address_of(self._operations), 0
        self._lock = threading.Lock()

    def queue(self, stream: int, number: int) -> int:
        """Queue the barrier on the stream at a pointer; return CUDA's status."""
        # The driver copies the operations.
        with self._lock:
            self._values.fill(number & ALL_BITS)
            return int(self._batch(stream, *self._arguments))
