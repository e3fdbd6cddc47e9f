"""Norms of tensors that are cut over ranks: sums of squares in float64, in one allreduce."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from ..communicator import Communicator
from ..gpu import kernels, vectors
from ..gpu.base import DeviceVector
from ..gpu.device import Device
from ..memory.arrays import Array
from ..memory.reduction import quietly
from .parts import Part
from .update import BLOCK

# How many threads of a GPU add up elements, each every so-manieth of them, one step after the
# other: in an order that does not depend on the GPU.
_LANES = (1 << 16, 256, 1)

_SUM = """
typedef %(kind)s T;
struct Job { const T *x; double *out; long long n, lanes; };

extern "C" __global__ void __launch_bounds__(%(threads)d) %(name)s(const Job job) {
    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (long long lane = thread; lane < job.lanes; lane += (long long)gridDim.x * blockDim.x) {
        double total = 0;
        for (long long i = lane; i < job.n; i += job.lanes) {
            const double y = job.x[i];
            total += %(term)s;
        }
        job.out[lane] = total;
    }
}
"""


def norms(comm: Communicator, parts: Sequence[Part], names: Sequence[str], kinds: Sequence[str],
          blocks: Callable[[Part, slice], Iterator[Mapping[str, Any]]], *, scatters: bool,
          device: Device | None) -> Mapping[str, Mapping[str, float]]:
    """Return the norms of whole tensors, by tensor and kind; the same bits on all ranks.

    Where all ranks have all parts, each takes its share of every one: for less work, and so that
    ranks of different processors agree.

    Args:
        parts: Of this rank.
        names: Of all tensors.
        kinds: The vectors whose norms are wanted, as in the blocks.
        blocks: Returns what there is of a part, block by block, given the elements.
        scatters: Each rank has its own parts only.
        device: The GPU where parts are; None for host memory.

    Collective: yes. Blocking: yes.
    """
    sums = vectors.zeros(len(names) * len(kinds), np.float64, device)
    rows = {name: i * len(kinds) for i, name in enumerate(names)}
    rank, size = (0, 1) if scatters else (comm.rank, comm.size)
    for part in parts:
        n, row = part.size, rows[part.name]
        for block in blocks(part, slice(rank * n // size, (rank + 1) * n // size)):
            for i, kind in enumerate(kinds, row):
                add_squares(block[kind], sums[i:i + 1])
    total = sums if device is None else vectors.on_host(sums)
    comm.allreduce(total)
    return {name: dict(zip(kinds, map(math.sqrt, total[row:row + len(kinds)].tolist())))
            for name, row in rows.items()}


def add_squares(x: Any, total: Any) -> None:
    """Add the sum of the squares of a vector to a number; on a GPU, queue to replace it.

    Args:
        x: Shape (n,), float32 or float64.
        total: Shape (1,), float64.
    """
    if isinstance(x, DeviceVector):
        _add_on_device(x, total)
    else:
        quietly(_add_squares, x, total)


def _add_squares(x: Array, total: Array) -> None:
    for start in range(0, x.size, BLOCK):
        block = x[start:start + BLOCK].astype(np.float64)
        total += np.dot(block, block)


def _add_on_device(x: DeviceVector, total: DeviceVector) -> None:
    if not x.size:
        return
    device = x.device
    with ExitStack() as stack:
        one, other = (stack.enter_context(device.scratch.borrow(lanes, np.float64))
                      for lanes in _LANES[:2])
        outs: list[Any] = [one, other, total]
        terms: Any = x
        for lanes, out in zip(_LANES, outs):
            device.launch(kernel(terms.dtype, squares=terms is x), lanes, x=terms.address,
                          out=out.address, n=terms.size, lanes=lanes)
            terms = out


@functools.lru_cache(maxsize=None)
def kernel(dtype: "np.dtype[Any]", *, squares: bool) -> kernels.Kernel:
    """Return the kernel that adds up elements, or their squares, of each of `lanes` lanes."""
    name = f"mpiring_sums_of_{dtype.name}{'_squares' if squares else ''}"
    return kernels.Kernel(name, _SUM % {
        "kind": {4: "float", 8: "double"}[dtype.itemsize], "name": name,
        "threads": kernels.THREADS, "term": "y * y" if squares else "y"},
        np.dtype([("x", "u8"), ("out", "u8"), ("n", "i8"), ("lanes", "i8")], align=True))
