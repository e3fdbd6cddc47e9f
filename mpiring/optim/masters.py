"""Masters: weights of 16 bits in float32, in which small updates are not rounded away.

Source: Micikevicius et al., Mixed precision training, ICLR 2018.
"""

import functools
from typing import Any

import numpy as np

from ..gpu import kernels, vectors
from ..gpu.base import DeviceVector
from ..memory.arrays import SIXTEEN_BIT, Array, dtype_name
from .update import BLOCK

_FOLLOW = """
struct Job { float *master; const unsigned short *weights; long long n; };

extern "C" __global__ void __launch_bounds__(%(threads)d) %(name)s(const Job job) {
    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (long long i = thread; i < job.n; i += (long long)gridDim.x * blockDim.x)
        if (narrowed(job.master[i]) != job.weights[i]) job.master[i] = widened(job.weights[i]);
}
"""


def has_master(dtype: "np.dtype[Any]") -> bool:
    """Return whether weights of a dtype need masters."""
    return dtype_name(dtype) in SIXTEEN_BIT


def follow(master: Any, weights: Any) -> None:
    """Take over what does not round to the weights: they were changed by hand, or are new.

    Args:
        master: Shape (n,), float32.
        weights: Shape (n,), float16 or bfloat16.
    """
    if not isinstance(master, DeviceVector):
        _follow(master, weights)
    elif master.size:
        master.device.launch(kernel(weights.dtype), master.size, master=master.address,
                             weights=weights.address, n=master.size)


def _follow(master: Array, weights: Array) -> None:
    for start in range(0, master.size, BLOCK):
        here = slice(start, start + BLOCK)
        rounded, wide = np.empty_like(weights[here]), np.empty_like(master[here])
        vectors.convert(rounded, master[here])
        changed = rounded.view(np.uint16) != weights[here].view(np.uint16)
        if changed.any():
            vectors.convert(wide, weights[here])
            np.copyto(master[here], wide, where=changed)


@functools.lru_cache(maxsize=None)
def kernel(dtype: "np.dtype[Any]") -> kernels.Kernel:
    """Return the kernel of `follow` on a GPU, for weights of a dtype."""
    of = dtype_name(dtype)
    name = f"mpiring_masters_of_{of}"
    return kernels.Kernel(
        name, kernels.SIXTEEN[of] + _FOLLOW % {"threads": kernels.THREADS, "name": name},
        np.dtype([("master", "u8"), ("weights", "u8"), ("n", "i8")], align=True))
