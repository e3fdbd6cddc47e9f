"""Keeps count of batches and samples where ranks have different numbers of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..communicator import Communicator
from ..errors import GradientError
from ..text import ranks_text
from ..training.weighing import Weighing
from .tensors import tensors_in

# What a rank counts in a step.
_NO_BATCH, _SAMPLES, _TOKENS = range(3)


class Uneven:
    """Which ranks still have batches, and how much their gradients weigh.

    Args:
        comm: The ranks.
        weighing: Told in each step how much this rank's gradients weigh. Where it was told their
            tokens, these count; else samples do.

    Attributes:
        root: The lowest rank that had a batch in the last step.
    """

    def __init__(self, comm: Communicator, weighing: Weighing) -> None:
        self.root = 0
        self._comm, self._weighing = comm, weighing
        self._samples = 0

    def arrive(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, syncs: bool) -> None:
        """Begin a step with a batch.

        Args:
            args, kwargs: Of the model; dimension 0 of the first tensor counts samples.
            syncs: Whether gradients are averaged in this step, not only accumulated.

        Raises:
            GradientError: Some ranks gave tokens, and others did not.

        Collective: yes, if `syncs`. Blocking: yes.
        """
        first = next(tensors_in((args, kwargs)), None)
        self._samples += 1 if first is None or first.dim() == 0 else len(first)
        if syncs:
            tokens = self._weighing.tokens
            self._count(_SAMPLES if tokens is None else _TOKENS,
                        self._samples if tokens is None else tokens)
            self._samples = 0

    def others_continue(self) -> bool:
        """Return whether another rank still has a batch; begin a step with nothing.

        Raises:
            GradientError: Some ranks gave tokens, and others did not.

        Collective: yes. Blocking: yes.
        """
        root = self.root
        self._count(_NO_BATCH, 0)
        if self.root == self._comm.size:
            self.root = root
            return False
        return True

    def _count(self, unit: int, mine: float) -> None:
        """Weigh this rank by its share in what all ranks count, and set `root`."""
        # The unit of each rank, and the sum of what they count: exact below 2**53.
        counts = np.zeros(self._comm.size + 1)
        counts[self._comm.rank], counts[-1] = unit, mine
        self._comm.allreduce(counts)
        weighed, others = (np.flatnonzero(counts[:-1] == each) for each in (_TOKENS, _SAMPLES))
        if weighed.size and others.size:
            with_tokens, without = (ranks_text(ranks.tolist()) for ranks in (weighed, others))
            raise GradientError(
                f"rank {self._comm.rank}: in join(), {with_tokens} called weigh(tokens) for this "
                f"step, but {without} did not; call it before the model, on all ranks that have a "
                f"batch, or on none")
        active = np.flatnonzero(counts[:-1])
        self.root = int(active[0]) if active.size else self._comm.size
        self._weighing.use(mine, counts[-1])
