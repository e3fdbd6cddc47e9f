"""Sees arrays as PyTorch's tensors, and finds the tensors in what a model takes or returns."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..memory.pytrees import leaves


def tensor_of(array: NDArray[Any]) -> torch.Tensor:
    """Return a NumPy array as a tensor of the same shape and memory."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def shared_with(x: Any) -> torch.Tensor:
    """Return a CuPy array, or a tensor, as a tensor of the same shape and memory.

    It has a storage of its own. Replaced in tests.
    """
    if not isinstance(x, torch.Tensor) and x.dtype.name == "bfloat16":
        # Not all versions of DLPack and CuPy hand it over.
        return torch.from_dlpack(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(x)


def seen_as_tensor(x: Any) -> torch.Tensor:
    """Return an array of NumPy or CuPy, or a tensor, as a tensor of the same shape and memory."""
    return tensor_of(x) if isinstance(x, np.ndarray) else shared_with(x)


def tensors_in(nest: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of a nest, also of sets in it, and of the fields of objects in it."""
    for _, leaf in leaves(nest):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, set):
            yield from tensors_in(list(leaf))
        elif hasattr(leaf, "__dict__"):
            for value in vars(leaf).values():
                if isinstance(value, (torch.Tensor, Mapping, list, tuple)):
                    yield from tensors_in(value)
