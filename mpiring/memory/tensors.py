"""Views PyTorch tensors as vectors of the same memory, without importing PyTorch."""

import functools
import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from ..errors import ConfigError
from .arrays import Array, dtype_name, dtype_named

if TYPE_CHECKING:
    import torch

_DTYPES = ("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
           "float16", "bfloat16", "float32", "float64", "complex64", "complex128")
# PyTorch's names of the GPUs whose tensors collectives accept: NVIDIA and AMD, and Intel.
GPU_TYPES = ("cuda", "xpu")


def is_tensor(x: object) -> "TypeGuard[torch.Tensor]":
    """Return whether `x` is a PyTorch tensor, in host memory or on a GPU."""
    # While another thread imports PyTorch, the module has no Tensor yet.
    return isinstance(x, getattr(sys.modules.get("torch"), "Tensor", ()))


@functools.cache
def numpy_dtype(dtype: "torch.dtype") -> np.dtype[Any]:
    """Return the NumPy dtype that equals a PyTorch dtype; for errors, see `dtype_named`."""
    return dtype_named(str(dtype).removeprefix("torch."), _DTYPES)


@functools.cache
def torch_dtype(dtype: np.dtype[Any]) -> "torch.dtype":
    """Return the PyTorch dtype that equals a dtype from `numpy_dtype`."""
    equivalent: "torch.dtype" = getattr(sys.modules["torch"], dtype_name(dtype))
    return equivalent


def array_of(tensor: "torch.Tensor") -> Array:
    """Return the elements of a contiguous, strided CPU tensor as a vector of the same memory.

    Raises ConfigError for other tensors, and for dtypes that cannot be reduced.
    """
    torch, dtype = sys.modules["torch"], numpy_dtype(tensor.dtype)
    if tensor.device.type != "cpu":
        raise ConfigError(f"a tensor on {tensor.device}: expected one on the CPU")
    refuse_gaps(tensor)
    flat = tensor.detach().view(-1)
    if tensor.dtype is torch.bfloat16:
        # PyTorch does not convert bfloat16 to NumPy.
        flat = flat.view(torch.int16)
    array: Array = flat.numpy()
    return array.view(dtype)


def note_write(x: object) -> None:
    """Tell PyTorch that an operation writes to a tensor; do nothing for other arrays.

    Raises ConfigError if PyTorch would refuse to change the tensor in place.
    """
    if not is_tensor(x):
        return
    torch = sys.modules["torch"]
    if (x.requires_grad and torch.is_grad_enabled()
            and (x if x._base is None else x._base).is_leaf):
        raise ConfigError(
            f"a leaf tensor of shape {tuple(x.shape)} that requires a gradient, or a view of one, "
            f"cannot be changed in place while gradients are recorded; pass x.detach(), or call "
            f"this in torch.no_grad()")
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)


def refuse_gaps(tensor: "torch.Tensor") -> None:
    """Raise ConfigError unless a tensor is strided and contiguous, and stores its own elements."""
    if tensor.layout is not sys.modules["torch"].strided:
        raise ConfigError(
            f"a {tensor.layout} tensor on {tensor.device}: expected a dense one")
    if not tensor.is_contiguous():
        raise ConfigError(
            f"tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()} is not "
            f"contiguous, so it cannot be combined in place; pass y = x.contiguous(), and "
            f"afterwards x.copy_(y)")
    if tensor.is_conj() or tensor.is_neg():
        raise ConfigError(
            f"tensor of shape {tuple(tensor.shape)} is a lazy conjugate or negative view; pass y = "
            f"x.resolve_conj().resolve_neg(), and afterwards x.copy_(y)")
