"""Lays out a model as one flat vector per dtype, each cut into one slice per rank."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .. import BufferMismatchError, Communicator, ConfigError
from ..provisional import Array, buckets, memory, same_on_all, training


class FlatModel:
    """Memory for the tensors of a model: a vector for each dtype, cut into one slice per rank.

    `flats` has one vector for each dtype, initially zeros, which are the memory of the `buckets`.
    `bounds` are the offsets that cut each vector into slices, which start on cache lines. `slices`
    has the slices of all vectors, by rank. `holder` names `views` in messages.
    """

    def __init__(self, tensors: Sequence[buckets.TensorSpec], size: int, holder: str) -> None:
        self.tensors = {tensor.name: tensor for tensor in tensors}
        dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
        plans = [buckets.BucketPlan(tuple(tensor for tensor in tensors if tensor.dtype == dtype))
                 for dtype in dtypes]
        self.buckets = [buckets.Bucket(i, plan, np.empty) for i, plan in enumerate(plans)]
        self.flats = [bucket.flat for bucket in self.buckets]
        self.bounds = [bucket.bounds(size) for bucket in self.buckets]
        self.views = training.Views({name: view for bucket in self.buckets
                                     for name, view in bucket.views.items()}, holder)
        self.slices = list(zip(*map(memory.cut, self.flats, self.bounds)))
        self.nbytes = sum(flat.nbytes for flat in self.flats)


class ModelArrays:
    """The arrays of a model; the user may replace them with arrays of the same shape and dtype.

    A model is a dict of NumPy arrays or PyTorch tensors in host memory, or a PyTorch module. A
    module stands for its parameters and its saved floating-point buffers. `call` names the
    function that accepts the model, for messages.

    Raises:
        ConfigError: The model is neither a dict nor a module, or a tensor has no gradient.
        BufferMismatchError: The models differ between ranks; the message has the first difference.

    Collective: yes. Blocking: yes.
    """

    def __init__(self, model: Any, comm: Communicator, call: str) -> None:
        self._model, self._rank = model, comm.rank
        self._buffers: set[str] = set()
        with same_on_all(comm, call, error=BufferMismatchError,
                         remedy="build the same model, in the same order, on every rank") as same:
            if hasattr(model, "named_parameters"):
                # Buffers that are not saved are constants like masks of -Inf: subtracting two of
                # them gives NaN.
                saved = model.state_dict()
                self._buffers = {name for name, x in model.named_buffers()
                                 if name in saved and x.is_floating_point()}
            elif not isinstance(model, Mapping) or not model:
                raise ConfigError(
                    f"rank {comm.rank}: params is {model!r:.80}; pass a dict of the model's "
                    f"arrays, for a PyTorch module dict(module.named_parameters())")
            tensors = self._current_tensors()
            self._arrays = arrays_of(tensors, comm.rank, "parameter")
            self._identities = _identities_of(tensors)
            self.tensors = _specs_of(self._arrays)
            same["parameters"] = [str(tensor) for tensor in self.tensors]

    def arrays(self) -> dict[str, Array]:
        """Return the current arrays by name; raise ConfigError if a shape or dtype has changed."""
        tensors = self._current_tensors()
        identities = _identities_of(tensors)
        if identities != self._identities:
            arrays = arrays_of(tensors, self._rank, "parameter")
            buckets.refuse_changed(self._rank, self.tensors, _specs_of(arrays))
            self._arrays, self._identities = arrays, identities
        return self._arrays

    def _current_tensors(self) -> Any:
        if not hasattr(self._model, "named_parameters"):
            return self._model
        buffers = self._model.named_buffers() if self._buffers else ()
        return dict(self._model.named_parameters()) | {
            name: x for name, x in buffers if name in self._buffers}


def _identities_of(tensors: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Return values that change if a tensor is replaced while its old memory is kept alive."""
    return [(name, x.data_ptr() if memory.is_tensor(x) else id(x), getattr(x, "shape", None))
            for name, x in tensors.items()]


def arrays_of(tensors: Any, rank: int, noun: str) -> dict[str, Array]:
    """Return a model's tensors, or its gradients, as arrays that share their memory.

    `noun` is a word for one of the tensors, for messages.

    Raises:
        ConfigError: A tensor has another type, or a dtype without gradient.
    """
    if not isinstance(tensors, Mapping):
        raise ConfigError(f"rank {rank}: {noun}s are {tensors!r:.80}; pass a dict of arrays")
    arrays = {}
    for name, x in tensors.items():
        if not isinstance(name, str):
            raise ConfigError(f"rank {rank}: {noun} {name!r}: names must be strings, as "
                              f"str({name!r})")
        try:
            array = memory.array_of(x).reshape(tuple(x.shape)) if memory.is_tensor(x) else x
            if not isinstance(array, np.ndarray) or not array.flags.writeable:
                raise ConfigError(f"it is {type(x).__name__}; expected a NumPy array or a PyTorch "
                                  f"tensor in host memory, writeable")
            if memory.dtype_name(array.dtype) not in (*memory.FLOATING, *memory.COMPLEX):
                raise ConfigError(f"it is {array.dtype}, which has no gradient; leave it out")
        except ConfigError as exc:
            raise ConfigError(f"rank {rank}: {noun} {name!r}: {exc}") from exc
        arrays[name] = array
    return arrays


def _specs_of(arrays: Mapping[str, Array]) -> list[buckets.TensorSpec]:
    return [buckets.TensorSpec(name, array.shape, array.dtype) for name, array in arrays.items()]
