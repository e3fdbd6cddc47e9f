"""Updates one rank's slice of a model with an mpiring optimizer, and saves it by tensor."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from .. import Communicator, ConfigError
from ..provisional import Array, memory, optimizers, same_on_all, sharding
from .layout import FlatModel

_EXAMPLE = "mpiring.optim.SGD or functools.partial(mpiring.optim.AdamW, lr=1e-3)"
# Name of the weights among the vectors of a state.
_WEIGHTS = "w"


class SliceStore:
    """A rank's slice of a model: weights, and the method that updates them, with its state.

    The weights are vectors, initially zeros.

    Raises:
        ConfigError: The optimizer is not elementwise, or ranks made different optimizers.

    Collective: yes. Blocking: yes.
    """

    def __init__(self, model: FlatModel, comm: Communicator,
                 optimizer: Callable[[Any], optimizers.Optimizer]) -> None:
        self._tensors, self._comm = model.tensors, comm
        self._method = _method_of(optimizer, optimizers.BareTensors(comm, model.tensors))
        self.weights, self._gradients = (
            [np.zeros_like(x) for x in model.slices[comm.rank]] for _ in range(2))
        states = [sharding.SliceState(bucket.plan, bounds[comm.rank], bounds[comm.rank + 1], None)
                  for bucket, bounds in zip(model.buckets, model.bounds)]
        self._buckets = [
            optimizers.parts_of(state, gradient, [weights[tensor.elements]
                                                  for tensor in state.ranges])
            for state, gradient, weights in zip(states, self._gradients, self.weights)]
        self._parts = list(chain.from_iterable(self._buckets))
        # The first update makes the state and compiles code for seconds. This must not happen while
        # other ranks wait for this rank. Zero weights stay zero.
        self.update([self.weights] * min(comm.size, 2), 1.0)
        self._method.steps = 0

    def update(self, gradients: Sequence[Sequence[Array]], rate: float) -> None:
        """Update the weights once, with the mean of some workers' gradients, in rank order.

        Each gradient is shaped like the weights; `rate` is a factor of the learning rate.
        """
        for mean, *sources in zip(self._gradients, *gradients):
            memory.Reduction("mean", mean.dtype, len(sources)).combine(sources, mean)
        current = self._method.current
        for settings in {id(settings): settings for settings in current.values()}.values():
            settings["lr"] *= rate
        self._method.update(self._buckets, current)

    def sliced(self) -> dict[str, Any]:
        """Return a copy of weights and state for this rank's ranges of all tensors."""
        saved = self._method.saved(self._parts)
        weights = sharding.slices_of(
            {name: tensor.shape for name, tensor in self._tensors.items()}, self._dtypes(),
            ((part.name, _WEIGHTS, part.offset, part.weights.copy()) for part in self._parts))
        return {**saved, "tensors": {
            name: vectors | weights[name] for name, vectors in saved["tensors"].items()}}

    def whole(self) -> dict[str, Any]:
        """Return a copy of weights and state of the complete model, on all ranks; collective."""
        state_of_slice = self.sliced()
        tensors = optimizers.gathered(self._comm, state_of_slice["tensors"])
        return {**state_of_slice, "tensors": tensors}

    def load(self, saved: Any) -> None:
        """Load a result of `whole`, or the results of `sliced` from all ranks; collective.

        All ranks raise ConfigError if the state belongs to another model or optimizer.
        """
        with same_on_all(self._comm, "the state of a ParameterServer",
                         remedy="load the same state on every rank") as same:
            content = self._method.checked(saved, self._parts)
            _, leaves = optimizers.checked(
                saved, self._method.name, self._tensors, self._dtypes())
            weights = [leaves[part.name][_WEIGHTS].read(part.offset, part.offset + part.size)
                       for part in self._parts]
            same.update(saved)
        self._method.load(content)
        for part, x in zip(self._parts, weights):
            part.weights[...] = x

    def _dtypes(self) -> dict[str, dict[str, "np.dtype[Any]"]]:
        """Return the dtypes of the weights among the vectors of a state, by tensor."""
        return {name: {_WEIGHTS: tensor.dtype} for name, tensor in self._tensors.items()}


def refuse_other_than_makers(optimizer: Any) -> None:
    """Raise ConfigError unless the argument may be a function that makes optimizers."""
    if not callable(optimizer) or isinstance(optimizer, optimizers.Optimizer):
        raise ConfigError(f"optimizer={optimizer!r:.80}: pass what makes one, as {_EXAMPLE}")


def _method_of(optimizer: Any, tensors: optimizers.BareTensors) -> optimizers.Method:
    rank = tensors.comm.rank
    try:
        result = optimizer(tensors)
    except TypeError as exc:
        raise ConfigError(f"rank {rank}: optimizer={optimizer!r:.200} cannot be made of a model "
                          f"alone: {exc}; pass {_EXAMPLE}") from exc
    if not isinstance(result, optimizers.Optimizer):
        raise ConfigError(f"rank {rank}: optimizer={optimizer!r:.80} makes a "
                          f"{type(result).__name__}; pass one of mpiring.optim, as {_EXAMPLE}")
    if not result.elementwise or result.sharded:
        raise ConfigError(
            f"rank {rank}: {result!r} cannot update a slice alone: it takes norms of whole "
            f"tensors, which are cut over ranks, or shards what is one rank's already; pass SGD, "
            f"Adam or AdamW, without max_norm or sharded=True")
    return result.method
