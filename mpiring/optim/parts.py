"""What an optimiser works on: this rank's part of a tensor, its weights, gradient and state."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..gpu import vectors
from ..gpu.device import DeviceVector
from ..training.slices import Piece
from . import masters
from .settings import Settings
from .update import BLOCK, Update

MASTER = "master"
# What is calculated for a while only.
DIRECTION = "r"


def wide(dtype: "np.dtype[Any]") -> "np.dtype[Any]":
    """Return the dtype of the arithmetic on weights of a dtype, and of the state."""
    return np.dtype(np.float32) if masters.has_master(dtype) else dtype


@dataclass
class Part:
    """The range of a tensor that this rank updates.

    Attributes:
        piece: Where it lies.
        settings: Of the tensor, in this step.
        t: The number of the update, from 1.
        scale: Factor of the gradient.
        ratio: Factor of the rate; see Layerwise.
    """

    piece: Piece
    settings: Settings
    t: int = 1
    scale: float = 1.0
    ratio: float = 1.0

    @property
    def name(self) -> str:
        """Of the tensor."""
        return self.piece.name

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(self.piece.weights.size)

    @property
    def dtype(self) -> "np.dtype[Any]":
        """Of the arithmetic, and of the state."""
        return wide(self.piece.weights.dtype)

    @property
    def is_sixteen(self) -> bool:
        """Whether weights and gradients are of 16 bits."""
        return masters.has_master(self.piece.weights.dtype)

    def vector(self, name: str) -> Any:
        """Return the weights `w` (their master, in 16 bits), the gradient `g`, or state."""
        if name == "g":
            return self.piece.gradient
        if name == "w" and not self.is_sixteen:
            return self.piece.weights
        return self.piece.vector(MASTER if name == "w" else name, self.dtype)

    def begin(self) -> None:
        """Let the master follow weights of 16 bits that were changed by hand, or are new."""
        if self.is_sixteen:
            masters.follow(self.vector("w"), self.piece.weights)

    def end(self) -> None:
        """Round the master into weights of 16 bits: to nearest, ties to even."""
        if self.is_sixteen:
            vectors.convert(self.piece.weights, self.vector("w"))

    def apply(self, update: Update, numbers: Mapping[str, float]) -> None:
        """Update the vectors that an update names."""
        for block in self.blocks(update.vectors):
            update(block, numbers)

    def blocks(self, names: Sequence[str], share: slice = slice(None)) -> Iterator[dict[str, Any]]:
        """Yield vectors by name: as a whole, or in blocks where some are lent.

        Those lent are gradients of 16 bits, widened, and `r`, of undefined content.

        Args:
            share: The elements.
        """
        vectors_of = {name: self.vector(name)[share] for name in names if name != DIRECTION}
        lent = [*["g"] * ("g" in names and self.is_sixteen), *[DIRECTION] * (DIRECTION in names)]
        if not lent:
            yield vectors_of
            return
        first = next(iter(vectors_of.values()))
        n, dtype = first.size, self.dtype
        device = first.device if isinstance(first, DeviceVector) else None
        # Not in blocks on a GPU, since each costs a launch.
        most = min(n, 2 * BLOCK) if device is None else n
        with ExitStack() as stack:
            scratch = {name: np.empty(most, dtype) if device is None else
                       stack.enter_context(device.scratch.borrow(n, dtype)) for name in lent}
            for start in range(0, n, max(most, 1)):
                block = {name: x[start:start + most] for name, x in vectors_of.items()}
                for name, x in scratch.items():
                    free = x[:min(most, n - start)]
                    if name == "g":
                        vectors.convert(free, block["g"])
                    block[name] = free
                yield block
