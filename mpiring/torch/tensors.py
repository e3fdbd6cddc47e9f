"""Views memory as PyTorch tensors, finds tensors in pytrees, and finds the GPUs of tensors."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..buckets.bucket import TensorSpec
from ..communicator import Communicator
from ..errors import ConfigError
from ..gpu import accelerator, arrays
from ..gpu.device import Device
from ..gpu.interface import UserStream
from ..gpus import assign_gpu
from ..memory.pytrees import leaves
from ..memory.tensors import GPU_TYPES, numpy_dtype
from ..operations.consistency import same_on_all
from ..world import or_world
from . import private

DEVICE_TYPES = ("cpu", *GPU_TYPES)


def tensor_of(array: NDArray[Any]) -> torch.Tensor:
    """Return a tensor with the shape and memory of a NumPy array."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def viewed_as(contiguous: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the memory of a contiguous tensor as a vector of another dtype."""
    # For `view`, the last stride has to be 1. PyTorch considers a single element contiguous with
    # any stride, and empty arrays of NumPy have the stride 0.
    return contiguous.as_strided((contiguous.numel(),), (1,)).view(dtype)


def tensor_of_bytes(raw: NDArray[Any], dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor whose memory is a vector of bytes."""
    return viewed_as(torch.from_numpy(raw), dtype).view(tuple(shape))


def shared_with(x: Any) -> torch.Tensor:
    """Return a tensor with the shape and memory of a CuPy array or tensor.

    The result has a separate storage. Tests replace this function.
    """
    if not isinstance(x, torch.Tensor) and x.dtype.name == "bfloat16":
        # Some versions of DLPack and CuPy do not support bfloat16.
        return torch.from_dlpack(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(x)


def seen_as_tensor(x: Any) -> torch.Tensor:
    """Return a tensor with the shape and memory of a NumPy or CuPy array, or a tensor."""
    return tensor_of(x) if isinstance(x, np.ndarray) else shared_with(x)


def tensors_in(nest: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of a pytree, including tensors in sets and in attributes of objects."""
    return (x for _, x in leaves(nest, leaf=_opened) if isinstance(x, torch.Tensor))


def _opened(x: Any) -> Any:
    """Return the elements of a set, or the attributes of an object; other objects unchanged."""
    if isinstance(x, set):
        return list(x)
    if isinstance(x, torch.Tensor) or not hasattr(x, "__dict__"):
        return x
    return [value for value in vars(x).values()
            if isinstance(value, (torch.Tensor, Mapping, list, tuple))]


def in_shape_of(p: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """View a vector in the shape of `p`, with the strides of `p` if they leave no gaps."""
    if torch.ops.aten.is_non_overlapping_and_dense(p):
        return flat.as_strided(p.shape, p.stride())
    return flat.view(p.shape)


def in_order_of(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor of the shape of `p` in the order of the memory of `p`."""
    if p.is_contiguous():
        return x.reshape(-1)
    vector = torch.empty(p.numel(), dtype=x.dtype, device=x.device)
    in_shape_of(p, vector).copy_(x)
    return vector


# Functions that return the dense tensors in which a sparse tensor is stored.
_COLUMNS_OF_ROWS = torch.Tensor.crow_indices, torch.Tensor.col_indices, torch.Tensor.values
_ROWS_OF_COLUMNS = torch.Tensor.ccol_indices, torch.Tensor.row_indices, torch.Tensor.values
_PARTS = {
    torch.sparse_coo: (private.indices_of, private.values_of),
    torch.sparse_csr: _COLUMNS_OF_ROWS, torch.sparse_bsr: _COLUMNS_OF_ROWS,
    torch.sparse_csc: _ROWS_OF_COLUMNS, torch.sparse_bsc: _ROWS_OF_COLUMNS}


def is_stored(x: torch.Tensor) -> bool:
    """Return whether the elements of a tensor are stored in dense tensors; see `parts_of`."""
    return not x.is_quantized and not x.is_nested and (
        x.layout is torch.strided or x.layout in _PARTS)


def refuse_uncopied(label: str, x: torch.Tensor) -> None:
    """Raise ConfigError if a tensor cannot be copied to other ranks; `label` names it."""
    if nn.parameter.is_lazy(x):
        raise ConfigError(f"{label} has no shape yet; run one batch through the module before it "
                          f"is wrapped")
    if hasattr(x, "to_local"):
        raise ConfigError(f"{label} is a {type(x).__name__}, of which each rank has a part; train "
                          f"it with torch.distributed.fsdp.fully_shard over the back end "
                          f"'mpiring', or give DataParallel a module of plain tensors")
    if x.device.type not in DEVICE_TYPES:
        raise ConfigError(f"{label} is on {x.device}; expected the CPU or a GPU: wrap "
                          f"module.cpu(), or module.to(device_for(comm))")
    if not is_stored(x):
        kind = "quantized" if x.is_quantized else "nested" if x.is_nested else str(x.layout)
        raise ConfigError(f"{label} is a {kind} tensor, which cannot be copied to other ranks; "
                          f"expected a dense or sparse one: keep this one as a plain attribute of "
                          f"the module, equal on all ranks, or register the tensors it consists of")


def parts_of(x: torch.Tensor) -> list[torch.Tensor]:
    """Return dense tensors in the memory of a tensor, in which each element is stored once.

    `refuse_uncopied` must accept the tensor. Sparse tensors have several parts. `expand` stores
    several elements of a dense tensor as one.
    """
    x = x.detach()
    if x.layout is not torch.strided:
        return [part(x) for part in _PARTS[x.layout]]
    for dimension, step in enumerate(x.stride()):
        if step == 0 and x.shape[dimension]:
            x = x.narrow(dimension, 0, 1)
    return [x]


def described(x: torch.Tensor) -> str:
    """Return a string with the dtype, the shape and, on a GPU, the type of device.

    It also has the layout and the shapes of the parts, if the tensor is stored in other shapes.
    """
    where = f" on {x.device.type}" * arrays.is_gpu_tensor(x)
    shapes = [tuple(part.shape) for part in parts_of(x)]
    stored = "" if shapes == [tuple(x.shape)] else f" in memory as {x.layout} {shapes}"
    return f"{x.dtype} {tuple(x.shape)}{where}{stored}"


def spec_of(name: str, x: torch.Tensor) -> TensorSpec:
    """Return the name, shape and dtype of a tensor, for a bucket."""
    return TensorSpec(name, tuple(x.shape), numpy_dtype(x.dtype))


def gpu_of(x: torch.Tensor) -> Device | None:
    """Return the GPU that holds a tensor; None for host memory."""
    stream = arrays.stream_of(x)
    return None if stream is None else stream.device()


def stream_for(x: torch.Tensor) -> UserStream | None:
    """Return the stream on which a thread uses tensors like `x`; None for host memory."""
    return arrays.CurrentStream(x.device) if arrays.is_gpu_tensor(x) else None


def selector_of(x: torch.Tensor) -> Callable[[], AbstractContextManager[Any]]:
    """Return a function whose result, a context, makes a tensor's GPU current in this thread."""
    if not arrays.is_gpu_tensor(x):
        return nullcontext
    return functools.partial(torch.accelerator.device_index, x.device.index)


def on_idle_stream(gpus: list[torch.device]) -> AbstractContextManager[Any]:
    """Return a context with an idle stream, on which marks complete at once, if there is a GPU."""
    return accelerator.in_use(_idle_stream(gpus[0])) if gpus else nullcontext()


@functools.cache
def _idle_stream(gpu: torch.device) -> torch.Stream:
    return torch.Stream(gpu)


def device_for(comm: Communicator | None = None) -> torch.device:
    """Return this rank's GPU, and make it PyTorch's current device.

    The visible GPUs are assigned to the ranks of a node in turn. Rank 0 warns if ranks share a GPU.

    Args:
        comm: Communicator whose ranks use GPUs; by default, all ranks.

    Raises:
        MissingDependencyError: PyTorch finds no GPU on some rank.

    Collective: yes. Blocking: yes.
    """
    comm = or_world(comm)
    with same_on_all(comm, "device_for"):
        kind = accelerator.available().type
    gpus = torch.get_device_module(kind)
    index = assign_gpu(comm, torch.accelerator.device_count(),
                       lambda index: str(gpus.get_device_properties(index).uuid))
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)
