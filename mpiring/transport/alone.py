"""The meeting place of a rank that shares its node's memory with no other."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .base import Array, Schedule
from .layout import SLOT_BYTES


class Alone:
    """A node of one rank, which waits for nothing and compares nothing; see base.Node.

    Args:
        rank: Of the communicator.
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.size = 0, 1
        self.ranks: Sequence[int] = (rank,)
        self.met, self.memory = True, None

    def test(self) -> bool:
        """Return True: the memory is this rank's."""
        return True

    def slots(self, dtype: np.dtype[Any], size: int | None = None) -> Sequence[Array]:
        """Return one vector, by default as long as in a node memory."""
        return [np.empty(SLOT_BYTES // dtype.itemsize, dtype)[:size]]

    def agrees(self) -> bool:
        """Return True."""
        return True

    def headers(self) -> Sequence[tuple[int, bytes]]:
        """Return nothing: there are no others."""
        return []

    def leave(self) -> None:
        """Do nothing."""

    def barrier(self, *numbers: int) -> "Alone":
        """Return a request that is complete."""
        return self

    def share(self, *numbers: int) -> Schedule[list[tuple[int, ...]]]:
        """Return this rank's numbers, after a yield, as any other node."""
        yield (self,)
        return [numbers]

    def part(self, call: object, x: object) -> Schedule[None]:
        """Return a schedule that does nothing: vectors of one rank are combined as they are."""
        yield ()

    def lane(self, index: int) -> "Alone":
        """Return a further meeting place of the same operation."""
        return self
