"""Trains a NumPy model across ranks: parameters in, averaged gradients out."""

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from .buckets import TensorSpec
from .communicator import Communicator
from .errors import ConfigError
from .gradients import Gradients, refuse_different
from .memory.arrays import COMPLEX, FLOATING, dtype_name, flat
from .precision import LossScaler, MasterWeights
from .reducers.choice import Wish
from .resilience import Checkpoints
from .statistics import Statistics

__all__ = ["Checkpoints", "DataParallel", "LossScaler", "MasterWeights"]


class DataParallel:
    """Averages the gradients of a model over ranks while they are still being computed.

    Parameters are broadcast from rank 0, in place. A training step writes each
    gradient into its view as soon as it is known, and marks it:

        dp.grads["w1"][...] = dw1
        dp.ready("w1")
        ...
        dp.wait()    # dp.grads now holds the means over ranks

    The views keep the means, so the first write of a step must assign; to
    accumulate over several batches, add in the later ones, and call `ready` in
    the last one only.

    Look views up in `dp.grads` in every step: after the first one, gradients
    move once to new memory, ordered as they really became ready. A view kept
    from before cannot be written to any more, and reads NaN from the second
    step on.

    Args:
        params: Arrays by name, contiguous and floating or complex; the same
            names, shapes and dtypes in the same order on every rank.
        comm: The ranks to average over.
        bucket_bytes: Gradients are fused into messages of about this many bytes; the first
            ones are shorter, to leave early.
        reducer: How gradients become their mean: one of `mpiring.reducers`, or a mapping from
            names or patterns to several; a plain mean by default.
        deterministic: Keep the first order of gradients, so that two runs have equal
            bits even if gradients became ready in different orders.
        order: What `order` was when a checkpoint was saved, to go on from it bit by bit.

    Attributes:
        comm: The ranks.
        params: The arrays that were given, by name.
        grads: A view for each parameter's gradient, of its shape and dtype.

    Raises:
        ConfigError: A parameter cannot be trained on: wrong dtype, not contiguous, read-only.
        BufferMismatchError: The parameters differ between ranks; names the first.

    Collective: yes. Blocking: yes.
    """

    def __init__(self, params: Mapping[str, NDArray[Any]], comm: Communicator, *,
                 bucket_bytes: int = 25 << 20, reducer: Wish = None,
                 deterministic: bool = False, order: Sequence[str] | None = None) -> None:
        if not isinstance(comm, Communicator):
            raise ConfigError(
                f"comm is a {type(comm).__name__}; pass mpiring.init(), or "
                f"mpiring.Communicator(comm) for a communicator of mpi4py's")
        if not isinstance(params, Mapping) or not params:
            raise ConfigError(
                f"rank {comm.rank}: params is {params!r:.80}; pass a dict of the model's arrays")
        tensors = [_spec(name, array) for name, array in params.items()]
        refuse_different(comm, "parameter", [str(tensor) for tensor in tensors])
        for array in params.values():
            comm.broadcast(array, root=0)
        self._gradients = Gradients(
            tensors, comm, bucket_bytes=bucket_bytes, reducer=reducer,
            deterministic=deterministic, order=order)
        self.comm, self.params = comm, dict(params)
        self.grads = self._gradients.views

    def ready(self, name: str) -> None:
        """Mark the gradient of a parameter as written; its bucket leaves once it is full.

        The view must not be touched again before `wait` has returned.

        Args:
            name: As in `params`.

        Raises:
            GradientError: The name is unknown, or was marked in this step already.

        Collective: yes, over a step. Blocking: no.
        """
        self._gradients.ready(name)

    def wait(self) -> None:
        """Return when every gradient in `grads` is the mean over ranks.

        Raises:
            GradientError: Some gradients were not marked ready; names them.
            BufferMismatchError: The ranks' buckets differ.
            StallError: Some ranks did not arrive in time.

        Collective: yes. Blocking: yes.
        """
        self._gradients.wait()

    @property
    def steps(self) -> int:
        """How many steps are complete."""
        return self._gradients.steps

    @property
    def order(self) -> list[str] | None:
        """The names in the order in which gradients are fused; None in the first step."""
        return self._gradients.order

    @property
    def statistics(self) -> Statistics:
        """What communication cost in the last complete step."""
        return self._gradients.statistics

    @property
    def finite(self) -> bool:
        """Whether all means of the last complete step are finite; the same on all ranks.

        A NaN or Inf of any rank is in the means of all. Where it is False, take no step:
        reducers have taken none either.
        """
        return self._gradients.finite

    def rescale(self, factor: float) -> None:
        """Tell reducers, which remember gradients, that the loss is scaled otherwise now.

        Args:
            factor: New scale / old scale.
        """
        self._gradients.rescale(factor)


def _spec(name: str, array: NDArray[Any]) -> TensorSpec:
    if not isinstance(name, str):
        raise ConfigError(f"parameter {name!r}: names must be strings, as str({name!r})")
    try:
        flat(array)
        kind = dtype_name(array.dtype)
    except ConfigError as exc:
        raise ConfigError(f"parameter {name!r}: {exc}") from exc
    if kind not in (*FLOATING, *COMPLEX):
        raise ConfigError(
            f"parameter {name!r} is {kind}, which has no gradient; leave it out of params")
    return TensorSpec(name, array.shape, array.dtype)
