"""Masters: weights of 16 bits in float32, in which small updates are not rounded away.

Source: Micikevicius et al., Mixed precision training, ICLR 2018.
"""

from typing import Any

import numpy as np

from ..gpu import vectors
from ..gpu.device import DeviceVector
from ..memory import sixteen
from ..memory.arrays import SIXTEEN_BIT, dtype_name
from ..memory.reduction import quietly
from .update import BLOCK


def has_master(dtype: "np.dtype[Any]") -> bool:
    """Return whether weights of a dtype need masters."""
    return dtype_name(dtype) in SIXTEEN_BIT


def follow(master: Any, weights: Any) -> None:
    """Take over what does not round to the weights: they were changed by hand, or are new.

    Args:
        master: Shape (n,), float32.
        weights: Shape (n,), float16 or bfloat16.
    """
    if isinstance(master, DeviceVector):
        master.device.compute(_follow, master, vectors.bits_of(weights))
        return
    for start in range(0, master.size, BLOCK):
        block = slice(start, start + BLOCK)
        quietly(_follow, np, master[block], weights[block])


def _follow(xp: Any, master: Any, weights: Any) -> None:
    rounded, wide = xp.empty_like(weights), xp.empty_like(master)
    sixteen.narrow(master, rounded, xp)
    changed = rounded.view(np.uint16) != weights.view(np.uint16)
    # Asking a GPU would wait for it.
    if xp is not np or changed.any():
        sixteen.widen(weights, wide, xp)
        xp.copyto(master, wide, where=changed)
