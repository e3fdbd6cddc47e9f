"""Weighs ranks by their tokens, so that the mean over ranks is the mean over all tokens."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..arguments import number
from ..communicator import Communicator
from ..engine.handle import Handle
from ..errors import GradientError
from ..operations.agreement import Call

# Above this number, float64 cannot represent all whole numbers.
_MAX_TOKENS = 2**53


class Weighing:
    """The factor of this rank's gradients in the mean over ranks, step by step.

    The gradient of each rank is the mean over the rank's tokens. A rank with n of the N tokens of a
    step gets the factor n * size / N. All ranks' tokens are summed in the background.

    Attributes:
        model: Number of the model on the communicator as a string for messages, which ranks
            compare; "" for the first model.
        tokens: Number of tokens of this rank in the current step; None if `begin` was not called.
        samples: Number of samples of this rank in the current step; None if there was no batch.
        counting: Function that calls `use` when the first gradient of a step is ready; None
            outside of `join()`.
    """

    def __init__(self, comm: Communicator) -> None:
        self.model = comm.next_model()
        self.tokens: float | None = None
        self.samples: int | None = None
        self.counting: Callable[[], object] | None = None
        self._comm = comm
        self._factor = 1.0
        # Whether gradients of the current step have been weighed.
        self._is_used = False
        # Sum of all ranks' tokens, once the operation is complete.
        self._total = np.empty(1)
        self._handle: Handle[None] | None = None

    def begin(self, tokens: Any) -> None:
        """Set the number of tokens over which this rank's gradients in the current step are a mean.

        Raises ConfigError if it is not a finite number from 0. Raises GradientError if this is the
        second call in a step, or gradients were already weighed. Collective, unless `counting`.
        """
        tokens = number(f"rank {self._comm.rank}: weigh(tokens): tokens", tokens,
                        lambda x: 0 <= x <= _MAX_TOKENS, "a number from 0 to 2**53")
        if self.tokens is not None:
            raise GradientError(
                f"rank {self._comm.rank}: weigh({tokens:.15g}) after weigh({self.tokens:.15g}) in "
                f"one step; call it once per step, with the tokens of all its batches, before "
                f"gradients are complete: after that it counts for the next step")
        if self._is_used:
            raise GradientError(
                f"rank {self._comm.rank}: weigh({tokens:.15g}) comes too late: gradients of this "
                f"step were complete before; call it before backward(), or the first ready()")
        self.tokens = tokens
        if self.counting is None:
            total = self._total = np.array([tokens])
            self._handle = self._comm.submit(
                Call("weigh(tokens)", self.model, nbytes=total.nbytes),
                lambda collectives: collectives.allreduce(total, op="sum", algorithm="auto"))

    @property
    def factor(self) -> float:
        """The factor of this rank's gradients in the current step; read it when one is ready.

        With a factor of 0, gradients count as zeros even if they are NaN, as a mean over no tokens
        is. Blocks until the ranks' tokens are summed. Collective if `counting`.
        """
        if self._handle is not None:
            self._handle.wait()
            self._handle = None
            self.use(self.tokens or 0, self._total[0])
        elif self.counting is not None and not self._is_used:
            self.counting()
        self._is_used = True
        return self._factor

    def use(self, tokens: float, total: float) -> None:
        """Weigh gradients by `tokens`, of `total` on all ranks; if `total` is 0, the mean is 0."""
        self._is_used = True
        self._factor = tokens * self._comm.size / total if total else 0.0

    def end_step(self) -> float | None:
        """Reset the factor to 1, and return `tokens` of the step that ends."""
        tokens, self.tokens, self.samples = self.tokens, None, None
        self._factor, self._is_used = 1.0, False
        return tokens
