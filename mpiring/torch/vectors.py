"""Lends tensors to a collective as vectors of NumPy, by a copy where they are not contiguous."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..errors import ConfigError
from ..memory.arrays import Array
from ..transport.base import Schedule, T
from .tensors import array_of


class Loan:
    """The tensors of one operation, as vectors.

    Tensors that are strided in another way than row after row are copied, and those that
    the operation writes are copied back when it is complete.

    Attributes:
        nbytes: Of all of them.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def numbers(self, tensor: torch.Tensor, *, written: bool) -> Array:
        """Return a tensor's elements, to calculate with.

        Args:
            tensor: Dense, on the CPU, of any shape and strides.
            written: The operation changes it.

        Raises:
            ConfigError: It is none of that, or NumPy cannot calculate with its dtype.
        """
        return array_of(self._contiguous(tensor, written))

    def raw(self, tensor: torch.Tensor, *, written: bool) -> Array:
        """Return a tensor's bytes; of any dtype, otherwise as `numbers`."""
        contiguous = self._contiguous(tensor, written)
        # Where there is one element, PyTorch takes any stride for contiguous, but not here.
        flat = contiguous.as_strided((contiguous.numel(),), (1,))
        raw: Array = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
        return raw

    def _contiguous(self, tensor: torch.Tensor, written: bool) -> torch.Tensor:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise ConfigError(
                f"a {tensor.layout} tensor on {tensor.device}: this collective takes dense "
                f"tensors on the CPU")
        if written and any(step == 0 and n > 1 for step, n in zip(
                tensor.stride(), tensor.shape)):
            raise ConfigError(f"a tensor of shape {tuple(tensor.shape)} and strides "
                              f"{tensor.stride()}, several of whose elements are one: it cannot "
                              f"take a result; pass tensor.clone()")
        self.nbytes += tensor.nbytes
        plain = tensor.detach()
        contiguous = plain.resolve_conj().resolve_neg().contiguous()
        if written and contiguous is not plain and contiguous.data_ptr() != plain.data_ptr():
            self._copies.append((plain, contiguous))
        return contiguous

    def settled(self, schedule: Schedule[T]) -> Schedule[T]:
        """Run a schedule, then copy back into the tensors that had to be copied."""
        result = yield from schedule
        for tensor, copy in self._copies:
            tensor.copy_(copy)
        return result


def only(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the one tensor of a list of one.

    Raises:
        ConfigError: It is no such list.
    """
    if len(tensors) != 1:
        raise ConfigError(f"{len(tensors)} tensors: expected one, of this rank's one device")
    return tensors[0]


def check_count(tensors: Sequence[torch.Tensor], size: int, what: str) -> None:
    """Raise ConfigError unless there is one tensor per rank."""
    if len(tensors) != size:
        raise ConfigError(f"{len(tensors)} {what} tensors: expected {size}, one per rank")


def check_alike(tensors: Sequence[torch.Tensor], model: torch.Tensor, what: str) -> None:
    """Raise ConfigError unless all tensors have the shape and dtype of `model`."""
    for i, tensor in enumerate(tensors):
        if tensor.shape != model.shape or tensor.dtype != model.dtype:
            raise ConfigError(
                f"{what} tensor {i} is {described(tensor)}: expected {described(model)}, as the "
                f"others are")


def check_multiple(long: torch.Tensor, short: torch.Tensor, size: int, what: str) -> None:
    """Raise ConfigError unless `long` has `size` times as many elements as `short`."""
    if long.dtype != short.dtype or long.numel() != size * short.numel():
        raise ConfigError(
            f"the {what} tensor is {described(long)}: expected {size} times {described(short)}")


def described(tensor: torch.Tensor) -> str:
    """Return a tensor's dtype and shape as a text."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def equal_parts(x: Array, count: int) -> list[Array]:
    """Cut a vector into `count` equal views."""
    n = x.size // count
    return [x[i * n:(i + 1) * n] for i in range(count)]


def by_splits(x: Array, rows: int, splits: Sequence[int], size: int, what: str) -> list[Array]:
    """Cut a vector into one view per rank.

    Args:
        x: A whole number of `rows`.
        rows: Length of the tensor's first dimension.
        splits: How many rows each rank has; none for equal shares.
        size: How many ranks there are.
        what: For the message.

    Raises:
        ConfigError: The rows cannot be shared like that.
    """
    if not splits and rows % size:
        raise ConfigError(f"the {what} tensor has {rows} rows, which {size} ranks cannot share "
                          f"evenly; pass {what}_split_sizes")
    counts = list(splits) or [rows // size] * size
    if len(counts) != size or sum(counts) != rows or min(counts) < 0:
        raise ConfigError(f"{what}_split_sizes={counts}: expected {size} numbers that add up to "
                          f"the tensor's {rows} rows")
    width = x.size // rows if rows else 0
    bounds = np.cumsum([0, *counts]) * width
    return [x[start:stop] for start, stop in zip(bounds, bounds[1:])]


def with_own(contributions: list[Array], rank: int, own: Array) -> list[Array]:
    """Return the contributions, but this rank's in the memory of its result, `own`."""
    own[...] = contributions[rank]
    return [*contributions[:rank], own, *contributions[rank + 1:]]


def rows_of(tensor: torch.Tensor) -> int:
    """Return the length of the first dimension; 1 for a number."""
    return tensor.shape[0] if tensor.dim() else 1


def in_turn(schedules: Sequence[Schedule[Any]]) -> Schedule[None]:
    """Run schedules one after the other."""
    for schedule in schedules:
        yield from schedule
