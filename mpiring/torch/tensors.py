"""Sees PyTorch's CPU tensors as NumPy arrays of the same memory, and arrays as tensors."""

from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import ConfigError

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.bfloat16: _BFLOAT16,
    **{getattr(torch, name): np.dtype(name) for name in (
        "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
        "float16", "float32", "float64", "complex64", "complex128")}}


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return NumPy's name of a dtype.

    Raises:
        ConfigError: Collectives cannot calculate with it.
    """
    found = _DTYPES.get(dtype)
    if found is None:
        known = ", ".join(str(one).removeprefix("torch.") for one in _DTYPES)
        raise ConfigError(f"{dtype} cannot be reduced; expected one of {known}")
    return found


def array_of(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a contiguous CPU tensor's elements as a vector of the same memory.

    Args:
        tensor: Any shape; strided, on the CPU, contiguous.

    Raises:
        ConfigError: It is none of that, or of a dtype that cannot be reduced.
    """
    dtype = numpy_dtype(tensor.dtype)
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise ConfigError(
            f"a {tensor.layout} tensor on {tensor.device}: expected a dense one on the CPU")
    if not tensor.is_contiguous():
        raise ConfigError(
            f"tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()} is not "
            f"contiguous; pass tensor.contiguous()")
    flat = tensor.detach().view(-1)
    if dtype is _BFLOAT16:
        # NumPy knows its name only from ml_dtypes, and PyTorch does not hand it over.
        array: NDArray[Any] = flat.view(torch.int16).numpy().view(dtype)
    else:
        array = flat.numpy()
    return array


def tensor_of(array: NDArray[Any]) -> torch.Tensor:
    """Return an array as a tensor of the same shape and memory."""
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def tensors_in(outputs: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in what a model takes or returns: in lists, dicts, objects of fields."""
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        for value in outputs.values():
            yield from tensors_in(value)
    elif isinstance(outputs, (list, tuple, set)):
        for value in outputs:
            yield from tensors_in(value)
    elif hasattr(outputs, "__dict__"):
        for value in vars(outputs).values():
            if isinstance(value, (torch.Tensor, Mapping, list, tuple)):
                yield from tensors_in(value)
