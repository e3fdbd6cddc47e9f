"""Norms of tensors that are cut over ranks: sums of squares in float64, in one allreduce."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..communicator import Communicator
from ..gpu import vectors
from ..gpu.device import Device, DeviceVector
from ..memory.arrays import Array
from ..memory.reduction import quietly
from .parts import Part
from .update import BLOCK

# Numbers that a GPU squares at a time: they take 8 bytes each.
_GPU_BLOCK = 1 << 22


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
        x.device.compute(_queue_squares, x, total)
    else:
        quietly(_add_squares, x, total)


def _add_squares(x: Array, total: Array) -> None:
    for start in range(0, x.size, BLOCK):
        block = x[start:start + BLOCK].astype(np.float64)
        total += np.dot(block, block)


def _queue_squares(xp: Any, x: Any, total: Any) -> None:
    # Not by `dot`, which takes cuBLAS.
    for start in range(0, x.size, _GPU_BLOCK):
        total += xp.square(x[start:start + _GPU_BLOCK], dtype=np.float64).sum()
