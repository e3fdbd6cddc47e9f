"""Updates one rank's slice of a model with an mpiring optimizer, and saves it by tensor."""

from collections.abc import Callable, Sequence
from typing import Any

from ..buckets.bucket import Bucket
from ..communicator import Communicator
from ..errors import ConfigError
from ..memory.arrays import Array
from ..memory.reduction import Reduction
from ..operations.consistency import same_on_all
from ..optim import state
from ..optim.optimizer import Optimizer, TrainedModel
from ..sharding.sliced import Sliced
from .layout import FlatModel

_EXAMPLE = "mpiring.optim.SGD or functools.partial(mpiring.optim.AdamW, lr=1e-3)"
# Name of the weights among the vectors of a state.
_WEIGHTS = "w"


class _Gradients:
    """Gradient of one update, with the interface of an Averager."""

    steps, step_label, device = 0, "", None
    scatters, step_started, finite, replicas = False, False, True, None

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = buckets
        self.compared: dict[str, str] = {}
        self.tensors = {tensor.name: tensor for bucket in buckets
                        for tensor in bucket.plan.tensors}

    def refuse_claim(self, *, scatters: bool) -> None:
        """Accept any claim: there is only one optimizer."""

    def claim(self, optimizer: object, *, scatters: bool) -> None:
        """Accept any claim: there is only one optimizer."""

    def bounds(self, bucket: Bucket) -> list[int]:
        """Return bounds that give this rank the complete bucket."""
        return [0, bucket.plan.size]

    def own_slice(self, bucket: Bucket) -> slice:
        """Return the complete bucket as a slice."""
        return slice(0, bucket.plan.size)


class _Slice:
    """A rank's slice of a model, with the interface that an optimizer expects of a model."""

    def __init__(self, comm: Communicator, weights: FlatModel, gradients: Any) -> None:
        self.comm, self.gradients, self._weights = comm, gradients, weights

    def vector(self, name: str) -> Array:
        """Return this rank's elements of a tensor."""
        return self._weights.views[name]

    def wait(self) -> None:
        """Return at once: gradients are complete."""


class SliceStore:
    """A rank's slice of a model: weights, and an optimizer with its state.

    The weights are vectors, initially zeros.

    Raises:
        ConfigError: The optimizer is not elementwise, or ranks made different optimizers.

    Collective: yes. Blocking: yes.
    """

    def __init__(self, model: FlatModel, comm: Communicator,
                 optimizer: Callable[[TrainedModel], Optimizer]) -> None:
        self._tensors, self._comm = model.tensors, comm
        self._ranges = model.ranges(comm.rank)
        weights, gradients = (model.slice_of(comm.rank) for _ in range(2))
        self.weights, self._gradients = weights.flats, gradients.flats
        self._slice = _Slice(comm, weights, _Gradients(gradients.buckets))
        self.optimizer = _make_optimizer(optimizer, self._slice, comm.rank)
        # The first update makes the state (a collective operation) and compiles code for seconds.
        # This must not happen while other ranks wait for this rank. Zero weights stay zero.
        self.update([self.weights] * min(comm.size, 2), 1.0)
        self.optimizer.steps = 0

    def update(self, gradients: Sequence[Sequence[Array]], rate: float) -> None:
        """Update the weights once, with the mean of some gradients; see Store."""
        for mean, *sources in zip(self._gradients, *gradients):
            Reduction("mean", mean.dtype, len(sources)).combine(sources, mean)
        self.optimizer.update(1.0, lambda index: None, rate=rate)

    def sliced(self) -> dict[str, Any]:
        """Return a copy of weights and state for this rank's ranges of all tensors."""
        saved = self._state_with_weights()
        return {**saved, "tensors": {
            name: {vector: Sliced(self._tensors[name].shape, {self._ranges[name]: x}, x.dtype)
                   for vector, x in vectors.items()}
            for name, vectors in saved["tensors"].items()}}

    def whole(self) -> dict[str, Any]:
        """Return a copy of weights and state of the complete model, on all ranks; collective."""
        state_of_slice = self.sliced()
        return {**state_of_slice, "tensors": state.gathered(self._comm, state_of_slice["tensors"])}

    def load(self, saved: Any) -> None:
        """Load a result of `whole`, or the results of `sliced` from all ranks; collective.

        All ranks raise ConfigError if the state belongs to another model or optimizer.
        """
        loaded = self._state_with_weights()
        with same_on_all(self._comm, "the state of a ParameterServer",
                         remedy="load the same state on every rank") as same:
            loaded["steps"], leaves = state.checked(
                saved, loaded["optimizer"], self._tensors, {
                    name: {vector: x.dtype for vector, x in vectors.items()}
                    for name, vectors in loaded["tensors"].items()})
            loaded["tensors"] = {
                name: {vector: leaf.read(*self._ranges[name]) for vector, leaf in vectors.items()}
                for name, vectors in leaves.items()}
            same.update(saved)
        self.optimizer.load_alone(loaded)
        for name, vectors in loaded["tensors"].items():
            self._slice.vector(name)[...] = vectors[_WEIGHTS]

    def _state_with_weights(self) -> dict[str, Any]:
        """Return a copy of the optimizer state, with the weights as an additional vector."""
        saved = self.optimizer.state_dict()
        for name, vectors in saved["tensors"].items():
            vectors[_WEIGHTS] = self._slice.vector(name).copy()
        return saved


def refuse_other_than_makers(optimizer: Any) -> None:
    """Raise ConfigError unless the argument may be a function that makes optimizers."""
    if not callable(optimizer) or isinstance(optimizer, Optimizer):
        raise ConfigError(f"optimizer={optimizer!r:.80}: pass what makes one, as {_EXAMPLE}")


def _make_optimizer(optimizer: Any, model: _Slice, rank: int) -> Optimizer:
    try:
        result = optimizer(model)
    except TypeError as exc:
        raise ConfigError(f"rank {rank}: optimizer={optimizer!r:.200} cannot be made of a model "
                          f"alone: {exc}; pass {_EXAMPLE}") from exc
    if not isinstance(result, Optimizer):
        raise ConfigError(f"rank {rank}: optimizer={optimizer!r:.80} makes a "
                          f"{type(result).__name__}; pass one of mpiring.optim, as {_EXAMPLE}")
    if not result.elementwise or result.sharded:
        raise ConfigError(
            f"rank {rank}: {result!r} cannot update a slice alone: it takes norms of whole "
            f"tensors, which are cut over ranks, or shards what is one rank's already; pass SGD, "
            f"Adam or AdamW, without max_norm or sharded=True")
    return result
