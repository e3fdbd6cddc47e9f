"""Norms of tensors that are cut over ranks: sums of squares in float64, in one allreduce."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..communicator import Communicator
from ..gpu import vectors
from ..gpu.base import DeviceVector
from ..memory.arrays import Array
from ..memory.reduction import quietly
from .parts import Part
from .update import BLOCK


def norms(comm: Communicator, parts: Sequence[Part], names: Sequence[str], kinds: Sequence[str],
          blocks: Callable[[Part, slice], Iterator[Mapping[str, Any]]], *,
          scatters: bool) -> Mapping[str, Mapping[str, float]]:
    """Return the norms of whole tensors, by tensor and kind; the same bits on all ranks.

    Where all ranks have all parts, each takes its share of every one: for less work, and so that
    ranks of different processors agree.

    Args:
        parts: Of this rank.
        names: Of all tensors.
        kinds: The vectors whose norms are wanted, as in the blocks.
        blocks: Returns what there is of a part, block by block, given the elements.
        scatters: Each rank has its own parts only.

    Collective: yes. Blocking: yes.
    """
    sums = np.zeros((len(names), len(kinds)))
    row = {name: i for i, name in enumerate(names)}
    rank, size = (0, 1) if scatters else (comm.rank, comm.size)
    for part in parts:
        n = part.size
        for block in blocks(part, slice(rank * n // size, (rank + 1) * n // size)):
            for column, kind in enumerate(kinds):
                sums[row[part.name], column] += sum_of_squares(block[kind])
    comm.allreduce(sums)
    return {name: dict(zip(kinds, map(math.sqrt, sums[i].tolist()))) for name, i in row.items()}


def sum_of_squares(x: Any) -> float:
    """Return the sum of the squares of a vector, in float64."""
    if isinstance(x, DeviceVector):
        x = vectors.on_host(x)
    total = np.zeros(1)
    quietly(_add_squares, x, total)
    return float(total[0])


def _add_squares(x: Array, total: Array) -> None:
    for start in range(0, x.size, BLOCK):
        block = x[start:start + BLOCK].astype(np.float64)
        total += np.dot(block, block)
