"""The part of a tensor that this rank updates: its weights, gradient and state.

16-bit weights have a master copy in float32, which keeps updates too small for 16 bits.
Source: Micikevicius et al., Mixed precision training, ICLR 2018.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..gpu import vectors
from ..gpu.device import Device
from ..gpu.interface import DeviceVector
from ..gpu.kernels import floating_types
from ..gpu.warps import WarpKernel, warp_kernel
from ..memory import sixteen
from ..memory.arrays import SIXTEEN_BIT, Array, dtype_name
from ..memory.reduction import quietly
from ..sharding.state import SliceState
from .settings import Settings
from .update import BLOCK, Update

MASTER = "master"
# Name of the vector of a direction, which exists only during an update.
DIRECTION = "r"
# Number of elements whose squares a warp of a GPU adds up.
_SQUARES_BLOCK = 4096
# The sum over a block, always in the same order.
_TOTAL = """
        double total = 0;
        for (long long at = 0; at < size; at += TILE) {
            %s x[ROWS];
            load(x, job.x + start + at, size - at);
            #pragma unroll
            for (int row = 0; row < ROWS; ++row) total += %s;
        }
        total = sum_of_lanes(total);
"""


def has_master(dtype: "np.dtype[Any]") -> bool:
    """Return whether weights of this dtype need a master copy."""
    return dtype_name(dtype) in SIXTEEN_BIT


def wide_dtype(dtype: "np.dtype[Any]") -> "np.dtype[Any]":
    """Return the dtype of the state, and of arithmetic on weights of a dtype."""
    return np.dtype(np.float32) if has_master(dtype) else dtype


def state_dtypes(names: Sequence[str], dtype: "np.dtype[Any]") -> dict[str, "np.dtype[Any]"]:
    """Return the dtypes of state vectors for weights, including the masters of 16-bit weights."""
    return dict.fromkeys([*names, *[MASTER] * has_master(dtype)], wide_dtype(dtype))


@dataclass
class Part:
    """The range of a tensor that this rank updates.

    Attributes:
        offset: Index of the first element in the flattened tensor.
        weights: Shape (n,); a view, which the optimizer updates in place.
        gradient: Shape (n,); a view of the bucket, which holds the mean once it has arrived.

        t: Number of the update, from 1.
        scale: Factor of the gradient.
        ratio: Factor of the learning rate; see Layerwise.
    """

    name: str
    offset: int
    weights: Any
    gradient: Any
    _state: SliceState
    _elements: slice
    settings: Settings = field(default_factory=dict)
    t: int = 1
    scale: float = 1.0
    ratio: float = 1.0

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(self.weights.size)

    @property
    def dtype(self) -> "np.dtype[Any]":
        """Dtype of the arithmetic and of the state."""
        return wide_dtype(self.weights.dtype)

    @property
    def device(self) -> Device | None:
        """GPU that holds the weights; None for host memory."""
        return self.weights.device if isinstance(self.weights, DeviceVector) else None

    @property
    def is_sixteen(self) -> bool:
        """Whether weights and gradients have 16 bits."""
        return has_master(self.weights.dtype)

    def vector(self, name: str) -> Any:
        """Return the weights `w` (the master copy for 16 bits), the gradient `g`, or state.

        State vectors start as zeros. Changes to them take effect at once.
        """
        if name == "g":
            return self.gradient
        if name == "w" and not self.is_sixteen:
            return self.weights
        return self._state.vector(MASTER if name == "w" else name, self.dtype)[self._elements]

    def begin(self, settings: Settings, t: int, scale: float) -> None:
        """Begin an update; new or manually changed weights overwrite their master copy."""
        self.settings, self.t, self.scale, self.ratio = settings, t, scale, 1.0
        if self.is_sixteen:
            _update_master(self.vector("w"), self.weights)

    def end(self) -> None:
        """Round the master copy into 16-bit weights: to nearest, ties to even."""
        if self.is_sixteen:
            vectors.convert(self.weights, self.vector("w"))

    def apply(self, update: Update, numbers: Mapping[str, float]) -> None:
        """Run an update on the vectors that it names."""
        for block in self.blocks(update.vectors):
            update(block, numbers)

    def blocks(self, names: Sequence[str], share: slice = slice(None)) -> Iterator[dict[str, Any]]:
        """Yield vectors by name: complete, or in blocks if some need scratch memory.

        Scratch memory holds 16-bit gradients in float32, and `r`, whose content is undefined.
        """
        vectors_of = {name: self.vector(name)[share] for name in names if name != DIRECTION}
        scratched = [name for name in names if name == DIRECTION or name == "g" and self.is_sixteen]
        if not scratched:
            yield vectors_of
            return
        n, dtype, device = next(iter(vectors_of.values())).size, self.dtype, self.device
        # One block on a GPU, since each block costs a launch.
        most = min(n, 2 * BLOCK) if device is None else n
        with ExitStack() as stack:
            scratch = {name: np.empty(most, dtype) if device is None else
                       stack.enter_context(device.scratch.borrow(n, dtype)) for name in scratched}
            for start in range(0, n, max(most, 1)):
                block = {name: x[start:start + most] for name, x in vectors_of.items()}
                for name, x in scratch.items():
                    free = x[:min(most, n - start)]
                    if name == "g":
                        vectors.convert(free, block["g"])
                    block[name] = free
                yield block


def parts_of(state: SliceState, gradient: Any, weights: Iterable[Any]) -> list[Part]:
    """Return the parts of tensors in a slice, given its gradient and the weights of each part."""
    return [Part(tensor.name, tensor.offset, x, gradient[tensor.elements], state, tensor.elements)
            for tensor, x in zip(state.ranges, weights)]


def _update_master(master: Any, weights: Any) -> None:
    """Overwrite float32 values that do not round to 16-bit weights, which the user has changed."""
    if isinstance(master, DeviceVector):
        master.device.launch(_master_kernel(dtype_name(weights.dtype)), _update_master_block,
                             master, weights)
        return
    for start in range(0, master.size, BLOCK):
        block = slice(start, start + BLOCK)
        quietly(_update_master_block, master[block], weights[block])


def _update_master_block(master: Array, weights: Array) -> None:
    rounded, widened = np.empty_like(weights), np.empty_like(master)
    sixteen.narrow(master, rounded)
    changed = rounded.view(np.uint16) != weights.view(np.uint16)
    if changed.any():
        sixteen.widen(weights, widened)
        np.copyto(master, widened, where=changed)


@functools.cache
def _master_kernel(of: str) -> WarpKernel:
    arguments = {"master": "float *", "weights": "const T *"}
    return warp_kernel(f"master_of_{of}", arguments, declarations=floating_types(of), body="""
        float master[ROWS];
        T weights[ROWS];
        load(master, job.master + start, size);
        load(weights, job.weights + start, size);
        #pragma unroll
        for (int row = 0; row < ROWS; ++row)
            if (narrowed(master[row]) != weights[row]) master[row] = widened(weights[row]);
        store(job.master + start, master, size);
""")


def add_squares(x: Any, total: Any) -> None:
    """Add the squares of a float32 or float64 vector to a float64 array of shape (1,).

    On a GPU, queue the addition.
    """
    if isinstance(x, DeviceVector):
        count = -(-x.size // _SQUARES_BLOCK)
        with x.device.scratch.borrow(count, np.float64) as sums:
            x.device.launch(_squares_kernel(x.dtype.name), _square, x, sums)
            x.device.launch(_sum_kernel(), _sum, sums, total)
    else:
        quietly(_add_squares, x, total)


def _add_squares(x: Array, total: Array) -> None:
    for start in range(0, x.size, BLOCK):
        block = x[start:start + BLOCK].astype(np.float64)
        total += np.dot(block, block)


def _square(x: Array, sums: Array) -> None:
    sums[...] = 0
    _add_squares(x, sums[:1])


def _sum(sums: Array, total: Array) -> None:
    total += sums.sum()


@functools.cache
def _squares_kernel(of: str) -> WarpKernel:
    """Return the kernel that writes the sum of squares of each block of `x`."""
    return warp_kernel(
        f"squares_of_{of}", {"x": "const T *", "sums": "double *"}, block=_SQUARES_BLOCK,
        declarations=floating_types(of), body=_TOTAL % ("T", "(double)x[row] * x[row]")
        + "        if (lane == 0) job.sums[block] = total;\n")


@functools.cache
def _sum_kernel() -> WarpKernel:
    """Return the kernel by which one warp adds all of `x` to `total`."""
    return warp_kernel(
        "sum", {"x": "const double *", "total": "double *"}, block=1 << 62,
        body=_TOTAL % ("double", "x[row]")
        + "        if (lane == 0) job.total[0] += total;\n")
