"""Lays a model out as flat vectors by dtype, each cut into one slice per rank."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..buckets.bucket import Bucket, BucketPlan, TensorSpec, refuse_changed
from ..communicator import Communicator
from ..errors import BufferMismatchError, ConfigError
from ..memory.arrays import COMPLEX, FLOATING, Array, cut, dtype_name
from ..memory.tensors import array_of, is_tensor
from ..operations.consistency import same_on_all
from ..sharding.sliced import Range
from ..sharding.state import ranges_in
from ..training.fused import Views


class FlatModel:
    """Memory for the tensors of a model: a vector for each dtype, cut into one slice per rank.

    Args:
        tensors: In order.
        size: Number of ranks.
        holder: What the user calls `views`.

    Attributes:
        tensors: By name.
        buckets: The memory of each dtype.
        flats: The vectors, zeros at first.
        bounds: The offsets that cut each vector into slices, which start on cache lines.
        views: The tensors in them, by name.
        slices: Of all vectors, by rank.
        nbytes: Of all vectors.
    """

    def __init__(self, tensors: Sequence[TensorSpec], size: int, holder: str) -> None:
        self.tensors = {tensor.name: tensor for tensor in tensors}
        dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
        self.buckets = [
            Bucket(i, BucketPlan(tuple(tensor for tensor in tensors if tensor.dtype == dtype)),
                   np.empty) for i, dtype in enumerate(dtypes)]
        self.flats = [bucket.flat for bucket in self.buckets]
        self.bounds = [bucket.bounds(size) for bucket in self.buckets]
        self.views = Views({name: view for bucket in self.buckets
                            for name, view in bucket.views.items()}, holder)
        self.slices = list(zip(*map(cut, self.flats, self.bounds)))
        self.nbytes = sum(flat.nbytes for flat in self.flats)

    def ranges(self, rank: int) -> dict[str, Range]:
        """Return the range of each tensor that is in a rank's slices, by name; perhaps empty."""
        return dict.fromkeys(self.tensors, (0, 0)) | {
            part.name: part.ends for bucket, bounds in zip(self.buckets, self.bounds)
            for part in ranges_in(bucket.plan, bounds[rank], bounds[rank + 1])}

    def slice_of(self, rank: int) -> "FlatModel":
        """Return new memory for a rank's slices, with the same elements at the same offsets."""
        ranges = self.ranges(rank)
        return FlatModel([TensorSpec(name, (ranges[name][1] - ranges[name][0],), tensor.dtype)
                          for name, tensor in self.tensors.items()], 1, "")


class ModelArrays:
    """The arrays of a model, also after its user has replaced some by their like.

    Args:
        model: NumPy arrays or PyTorch's tensors in host memory, by name; or a PyTorch module, of
            which parameters and saved floating buffers are meant.
        comm: The ranks.
        call: What takes the model, for messages.

    Attributes:
        tensors: In order.

    Raises:
        ConfigError: The model is none of that, or has no gradients.
        BufferMismatchError: The models differ between ranks; names the first difference.

    Collective: yes. Blocking: yes.
    """

    def __init__(self, model: Any, comm: Communicator, call: str) -> None:
        self._model, self._rank = model, comm.rank
        self._buffers: set[str] = set()
        with same_on_all(comm, call, error=BufferMismatchError,
                         remedy="build the same model, in the same order, on every rank") as same:
            if hasattr(model, "named_parameters"):
                # Buffers that are not saved are constants, as masks of -Inf, which have no
                # differences.
                saved = model.state_dict()
                self._buffers = {name for name, x in model.named_buffers()
                                 if name in saved and x.is_floating_point()}
            elif not isinstance(model, Mapping) or not model:
                raise ConfigError(
                    f"rank {comm.rank}: params is {model!r:.80}; pass a dict of the model's "
                    f"arrays, for a PyTorch module dict(module.named_parameters())")
            self._arrays = arrays_of(self._tensors_now(), comm.rank, "parameter")
            self._marks = _marks_of(self._tensors_now())
            self.tensors = _specs_of(self._arrays)
            same["parameters"] = [str(tensor) for tensor in self.tensors]

    def now(self) -> dict[str, Array]:
        """Return the arrays of the model as it is now, by name.

        Raises:
            ConfigError: Shapes or dtypes are no longer those of before.
        """
        given = self._tensors_now()
        marks = _marks_of(given)
        if marks != self._marks:
            arrays = arrays_of(given, self._rank, "parameter")
            refuse_changed(self._rank, self.tensors, _specs_of(arrays))
            self._arrays, self._marks = arrays, marks
        return self._arrays

    def _tensors_now(self) -> Any:
        if not hasattr(self._model, "named_parameters"):
            return self._model
        tensors = dict(self._model.named_parameters())
        if self._buffers:
            tensors.update((name, x) for name, x in self._model.named_buffers()
                           if name in self._buffers)
        return tensors


def _marks_of(tensors: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Return what changes when a tensor is replaced while the memory of the old one is kept."""
    return [(name, x.data_ptr() if is_tensor(x) else id(x), getattr(x, "shape", None))
            for name, x in tensors.items()]


def arrays_of(tensors: Any, rank: int, noun: str) -> dict[str, Array]:
    """Return a model's tensors, or others like them, as arrays of the same memory.

    Args:
        tensors: NumPy arrays or PyTorch's tensors in host memory, by name.
        rank: Of this process, for messages.
        noun: What each of them is, for messages.

    Raises:
        ConfigError: They are none of that, or have no gradient.
    """
    if not isinstance(tensors, Mapping):
        raise ConfigError(f"rank {rank}: {noun}s are {tensors!r:.80}; pass a dict of arrays")
    arrays = {}
    for name, x in tensors.items():
        if not isinstance(name, str):
            raise ConfigError(f"rank {rank}: {noun} {name!r}: names must be strings, as "
                              f"str({name!r})")
        try:
            array = array_of(x).reshape(tuple(x.shape)) if is_tensor(x) else x
            if not isinstance(array, np.ndarray) or not array.flags.writeable:
                raise ConfigError(f"it is {type(x).__name__}; expected a NumPy array or a PyTorch "
                                  f"tensor in host memory, writeable")
            if dtype_name(array.dtype) not in (*FLOATING, *COMPLEX):
                raise ConfigError(f"it is {array.dtype}, which has no gradient; leave it out")
        except ConfigError as exc:
            raise ConfigError(f"rank {rank}: {noun} {name!r}: {exc}") from exc
        arrays[name] = array
    return arrays


def _specs_of(arrays: Mapping[str, Array]) -> list[TensorSpec]:
    return [TensorSpec(name, array.shape, array.dtype) for name, array in arrays.items()]
