"""Tensors that are only partly present on a rank, such as sharded optimizer state."""

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import DTypeLike

from ..errors import ConfigError
from ..memory.arrays import Array
from ..memory.pytrees import mapped
from ..transport.base import Schedule

# Start and stop index.
Range = tuple[int, int]
# Vectors as long as their tensor, by the names of the tensor and of the vector.
Leaves = dict[str, dict[str, Any]]


class Sliced:
    """A tensor of which only some ranges are present.

    In a state to be saved, the ranges belong to one rank; in a loaded state, to all ranks.
    The constructor does not copy. Memory-mapped pieces are read only by `read` and `whole`.

    Args:
        shape: Shape of the complete tensor.
        pieces: Elements that are present, by their range (start, stop) of the flattened tensor in
            C order, without padding. Each piece is a vector in host memory. Ranges do not overlap;
            empty ranges are ignored.
        dtype: Dtype of the elements; needed if there are no pieces.

    Attributes:
        shape, dtype: Shape and dtype of the complete tensor.
        pieces: Pieces in the order of their ranges.

    Raises:
        ConfigError: A piece is not a vector of this dtype, or ranges overlap or exceed the tensor.
    """

    def __init__(self, shape: Iterable[int], pieces: Mapping[Range, Array],
                 dtype: DTypeLike | None = None) -> None:
        self.shape = tuple(map(int, shape))
        self.pieces = {(int(start), int(stop)): pieces[start, stop]
                       for start, stop in sorted(pieces) if start != stop}
        if dtype is None and not pieces:
            raise ConfigError(f"a tensor of shape {self.shape} has no pieces here; give its dtype, "
                              f"as Sliced(shape, {{}}, dtype)")
        self.dtype: np.dtype[Any] = np.dtype(
            np.asarray(next(iter(pieces.values()))).dtype if dtype is None else dtype)
        end = 0
        for (start, stop), piece in self.pieces.items():
            self._refuse(start, stop, piece)
            if start < end:
                self._refuse_twice(start, min(end, stop))
            end = stop

    def _refuse(self, start: int, stop: int, piece: Array) -> None:
        if not 0 <= start < stop <= self.size:
            raise ConfigError(f"elements {start} to {stop - 1} are not in a tensor of shape "
                              f"{self.shape}, which has {self.size}")
        if not isinstance(piece, np.ndarray) or piece.shape != (stop - start,):
            raise ConfigError(
                f"the piece of elements {start} to {stop - 1} is a {type(piece).__name__} of shape "
                f"{getattr(piece, 'shape', None)}; expected a numpy.ndarray of shape "
                f"{(stop - start,)}")
        if piece.dtype != self.dtype:
            raise ConfigError(f"the piece of elements {start} to {stop - 1} has dtype "
                              f"{piece.dtype}; expected {self.dtype}")

    def _refuse_twice(self, start: int, stop: int) -> NoReturn:
        raise ConfigError(f"elements {start} to {stop - 1} of a tensor of shape {self.shape} are "
                          f"in two pieces; pass each element once")

    def __repr__(self) -> str:
        ranges = ", ".join(f"{start}:{stop}" for start, stop in self.pieces)
        return f"Sliced(shape={self.shape}, dtype={self.dtype}, pieces of [{ranges}])"

    def __iter__(self) -> NoReturn:
        """Raise ConfigError; PyTorch optimizers iterate over state that is not a tensor."""
        raise ConfigError(
            f"a sliced tensor of shape {self.shape} was passed instead of a complete one; convert "
            f"the state with mpiring.torch.whole(state), or mpiring.resilience.whole(state) for "
            f"arrays")

    @property
    def size(self) -> int:
        """Number of elements of the complete tensor."""
        return math.prod(self.shape)

    def read(self, start: int, stop: int) -> Array:
        """Return elements of the flattened tensor, as a new vector.

        Args:
            start, stop: Range of the elements.

        Raises:
            ConfigError: Some elements are in no piece; names them.
        """
        if not 0 <= start <= stop <= self.size:
            raise ConfigError(f"elements {start} to {stop - 1} are not in a tensor of shape "
                              f"{self.shape}, which has {self.size}")
        elements = np.empty(stop - start, self.dtype)
        ranges, position = list(self.pieces), start
        first = max(0, bisect.bisect_right(ranges, (start, self.size)) - 1)
        for piece_start, piece_stop in ranges[first:]:
            if position >= stop or piece_start > position:
                break
            end = min(piece_stop, stop)
            if end > position:
                piece = self.pieces[piece_start, piece_stop]
                elements[position - start:end - start] = (
                    piece[position - piece_start:end - piece_start])
                position = end
        if position < stop:
            after = [piece_start for piece_start, _ in ranges if piece_start > position]
            raise ConfigError(
                f"elements {position} to {min([stop, *after]) - 1} of a tensor of shape "
                f"{self.shape} are missing: these pieces are not of all ranks; use Saved.sharded "
                f"of a checkpoint, or state_dict() of the optimizer")
        return elements

    def whole(self) -> Array:
        """Return the complete tensor, as a new array.

        Raises:
            ConfigError: Some elements are in no piece; names them.
        """
        return self.read(0, self.size).reshape(self.shape)

    def merged(self, others: Iterable["Sliced"]) -> "Sliced":
        """Return a tensor with these pieces and the pieces of other objects.

        Args:
            others: Other pieces of the same tensor.

        Raises:
            ConfigError: Their shapes or dtypes differ, or pieces overlap.
        """
        pieces = dict(self.pieces)
        for other in others:
            if (other.shape, other.dtype) != (self.shape, self.dtype):
                raise ConfigError(
                    f"cannot merge pieces of a {other.dtype} tensor of shape {other.shape} with "
                    f"pieces of a {self.dtype} tensor of shape {self.shape}")
            duplicates = pieces.keys() & other.pieces.keys()
            if duplicates:
                self._refuse_twice(*min(duplicates))
            pieces.update(other.pieces)
        return Sliced(self.shape, pieces, self.dtype)


def whole(nest: Any) -> Any:
    """Return a copy of a pytree in which each `Sliced` is a complete array.

    Args:
        nest: Pytree of dicts, lists and tuples, like `Saved.sharded`; other leaves are kept.

    Raises:
        ConfigError: Elements of a tensor are in no piece; names them.

    Collective: no.
    """
    return mapped(nest, lambda leaf: leaf.whole() if isinstance(leaf, Sliced) else leaf)


def slices_of(shapes: Mapping[str, Iterable[int]],
              dtypes: Mapping[str, Mapping[str, "np.dtype[Any]"]],
              pieces: Iterable[tuple[str, str, int, Array]]) -> Leaves:
    """Return sliced vectors by tensor and name, from the pieces of this rank.

    Dtypes include vectors of other ranks. A piece is the tensor, the name of the vector, the first
    element, and the elements.
    """
    ranges: dict[str, dict[str, dict[Range, Array]]] = {
        name: {vector: {} for vector in by_vector} for name, by_vector in dtypes.items()}
    for name, vector, start, x in pieces:
        ranges[name][vector][start, start + x.size] = x
    return {name: {vector: Sliced(shapes[name], x, dtypes[name][vector])
                   for vector, x in by_vector.items()} for name, by_vector in ranges.items()}


class AllgatherCollectives(Protocol):
    """The collectives that `gather` needs."""

    def allgather_bytes(self, payload: Array) -> Schedule[list[Array]]:
        """Return the schedule that returns the bytes of all ranks."""

    def allgather(self, x: Array, *, bounds: Sequence[int]) -> Schedule[None]:
        """Return the schedule that copies every rank's slice of a vector to all."""


def gather(collectives: AllgatherCollectives, slices: Sequence[Sliced], *,
           keep: bool = True) -> Schedule[list[Array]]:
    """Return the schedule that returns complete tensors from the ranges of all ranks.

    The tensors are the same on all ranks. Each rank has at most one range of each, in rank order.
    If not `keep`, this rank only sends its ranges, and the result is empty. Raises ConfigError if
    elements of a tensor are missing on all ranks, or not in rank order.
    """
    ranges = np.array([next(iter(x.pieces), (0, 0)) for x in slices], np.int64).reshape(-1, 2)
    rows = yield from collectives.allgather_bytes(ranges.reshape(-1).view(np.uint8))
    tensors = []
    # `ends` holds the (start, stop) of all ranks for one tensor.
    for leaf, ends in zip(slices, np.stack([row.view(np.int64).reshape(-1, 2) for row in rows], 1)):
        bounds = [0]
        for start, stop in ends.tolist():
            bounds.append(stop if start == bounds[-1] < stop else bounds[-1])
        if bounds[-1] != leaf.size:
            raise ConfigError(f"ranks have the ranges {ends.tolist()} of a tensor of shape "
                              f"{leaf.shape}; expected all elements, in the order of ranks")
        x = np.empty(leaf.size, leaf.dtype)
        for (start, stop), piece in leaf.pieces.items():
            x[start:stop] = piece
        if x.size:
            yield from collectives.allgather(x, bounds=bounds)
        if keep:
            tensors.append(x.reshape(leaf.shape))
    return tensors
