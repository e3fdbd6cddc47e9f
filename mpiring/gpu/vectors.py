"""Copies vectors, and does simple arithmetic on them, in host memory and on GPUs.

Work on a GPU is queued, in the order of the calls, unless a function says that it waits.
"""

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ..memory import sixteen
from ..memory.arrays import Array, dtype_name
from ..memory.reduction import quietly
from . import warps
from .device import Device
from .interface import DeviceVector, await_event


def copy_to(out: Any, x: Any) -> None:
    """Copy a vector to another of the same length and dtype.

    If only one of the two is on a GPU, the other must be in pinned memory.
    """
    if type(out) is np.ndarray and type(x) is np.ndarray:
        np.copyto(out, x)
    elif not out.size:
        # Even an empty copy would queue a mark.
        return
    elif not isinstance(out, DeviceVector):
        if isinstance(x, DeviceVector):
            x.device.to_host(x, out)
        else:
            np.copyto(out, x)
    elif isinstance(x, DeviceVector):
        out.device.combine("sum", [x], 1, [out])
    else:
        out.device.to_device(x, out)


def empty(n: int, dtype: DTypeLike, device: Device | None) -> Any:
    """Return a new vector of undefined content, on a GPU or, without one, in host memory."""
    if device is None:
        return np.empty(n, dtype)
    return device.allocate(n * np.dtype(dtype).itemsize).view(dtype)


def zeros(n: int, dtype: DTypeLike, device: Device | None) -> Any:
    """Return a new vector of zeros, on a GPU or, without one, in host memory."""
    if device is None:
        return np.zeros(n, dtype)
    x = empty(n, dtype, device)
    device.clear(x)
    return x


def moved(x: Array, device: Device | None) -> Any:
    """Return the elements of a vector in any host memory on a GPU; without a GPU, the vector."""
    if device is None:
        return x
    out = empty(x.size, x.dtype, device)
    slot = device.staging.acquire(x.nbytes)
    host = slot[:x.nbytes].view(x.dtype)
    host[...] = x
    device.staging.release(slot, device.to_device(host, out))
    return out


def on_host(x: Any) -> Array:
    """Return a copy of a vector in host memory; wait until the copy is complete."""
    if not isinstance(x, DeviceVector):
        copy: Array = x.copy()
        return copy
    staging = x.device.staging
    slot = staging.acquire(x.nbytes)
    host = slot[:x.nbytes].view(x.dtype)
    await_event(x.device.to_host(x, host))
    copy = host.copy()
    staging.release(slot)
    return copy


def clear(x: Any) -> None:
    """Fill a vector with zeros."""
    if isinstance(x, DeviceVector):
        x.device.clear(x)
    else:
        x[...] = 0


def add(out: Any, x: Any) -> None:
    """Add a floating vector to another, in place, without warnings."""
    if isinstance(out, DeviceVector):
        out.device.combine("sum", [out, x], 1, [out])
    else:
        quietly(np.add, out, x, out)


def divide(x: Any, divisor: float) -> None:
    """Divide a floating vector, in place, without warnings."""
    if isinstance(x, DeviceVector):
        x.device.combine("sum", [x], divisor, [x])
    else:
        quietly(np.divide, x, x.dtype.type(divisor), x)


def multiply(x: Any, factor: float) -> None:
    """Multiply a vector of float32, in place, without warnings."""
    if isinstance(x, DeviceVector):
        x.device.launch(warps.multiplying(), _multiply, x, factor)
    else:
        quietly(_multiply, x, factor)


def convert(out: Any, x: Any) -> None:
    """Convert a floating vector to float32, or from it, rounding to nearest.

    One of the vectors is float32. In host memory, uint16 stands for bfloat16.
    """
    if not isinstance(x, DeviceVector):
        quietly(_convert, out, x)
    elif x.dtype == np.float32:
        x.device.launch(warps.narrowing(dtype_name(out.dtype)),
                        lambda x, lost, seed, out: _convert(out, x), x, None, 0, out)
    else:
        x.device.launch(warps.widening(dtype_name(x.dtype)),
                        lambda out, adds, x: _convert(out, x), out, False, x)


def _multiply(x: Array, factor: float) -> None:
    np.multiply(x, x.dtype.type(factor), out=x)


def _convert(out: Array, x: Array) -> None:
    if x.dtype.itemsize == 2:
        sixteen.widen(x, out)
    elif out.dtype.itemsize == 2:
        sixteen.narrow(x, out)
    else:
        out[...] = x
