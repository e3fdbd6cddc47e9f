"""Keeps count of batches and samples where ranks have different numbers of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..communicator import Communicator
from .tensors import tensors_in


class Uneven:
    """Which ranks still have batches, and how much their gradients weigh.

    Args:
        comm: The ranks.

    Attributes:
        root: The lowest rank that had a batch in the last step.
        weight: Factor of this rank's gradient, so that the mean over ranks is the mean over
            samples.
    """

    def __init__(self, comm: Communicator) -> None:
        self.root = 0
        self.weight = 1.0
        self._comm = comm
        self._samples = 0

    def arrive(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, syncs: bool) -> None:
        """Begin a step with a batch.

        Args:
            args, kwargs: Of the model; dimension 0 of the first tensor counts samples.
            syncs: Whether gradients are averaged in this step, not only accumulated.

        Collective: yes, if `syncs`. Blocking: yes.
        """
        first = next(tensors_in((args, kwargs)), None)
        self._samples += 1 if first is None or first.dim() == 0 else len(first)
        if syncs:
            total = self._count(self._samples)
            self.weight = self._samples * self._comm.size / max(total, 1)
            self._samples = 0

    def others_continue(self) -> bool:
        """Return whether another rank still has a batch; begin a step with nothing.

        Collective: yes. Blocking: yes.
        """
        root, self.weight = self.root, 0.0
        self._count(None)
        if self.root == self._comm.size:
            self.root = root
            return False
        return True

    def _count(self, samples: int | None) -> int:
        """Return the samples of all ranks, and set `root`; None where this rank has no batch."""
        mine = np.zeros(self._comm.size + 1, np.int64)
        if samples is not None:
            mine[self._comm.rank], mine[-1] = 1, samples
        self._comm.allreduce(mine)
        active = np.flatnonzero(mine[:-1])
        self.root = int(active[0]) if active.size else self._comm.size
        return int(mine[-1])
