"""Views memory as PyTorch tensors, finds tensors in pytrees, and finds the GPUs of tensors."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..buckets.bucket import TensorSpec
from ..communicator import Communicator
from ..gpu import accelerator, arrays
from ..gpu.device import Device, Event
from ..gpus import assign_gpu
from ..memory.pytrees import leaves
from ..memory.tensors import GPU_TYPES, numpy_dtype
from ..world import or_world

DEVICE_TYPES = ("cpu", *GPU_TYPES)


def tensor_of(array: NDArray[Any]) -> torch.Tensor:
    """Return a tensor with the shape and memory of a NumPy array."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


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
    for _, leaf in leaves(nest):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, set):
            yield from tensors_in(list(leaf))
        elif hasattr(leaf, "__dict__"):
            for value in vars(leaf).values():
                if isinstance(value, (torch.Tensor, Mapping, list, tuple)):
                    yield from tensors_in(value)


def in_shape_of(p: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """View a vector in the shape of `p`, with the strides of `p` if they leave no gaps."""
    if torch.ops.aten.is_non_overlapping_and_dense(p):
        return flat.as_strided(p.shape, p.stride())
    return flat.view(p.shape)


def described(x: torch.Tensor) -> str:
    """Return a string with the dtype, the shape and, on a GPU, the type of device."""
    where = f" on {x.device.type}" * arrays.is_gpu_tensor(x)
    return f"{x.dtype} {tuple(x.shape)}{where}"


def spec_of(name: str, x: torch.Tensor) -> TensorSpec:
    """Return the name, shape and dtype of a tensor, for a bucket."""
    return TensorSpec(name, tuple(x.shape), numpy_dtype(x.dtype))


def gpu_of(x: torch.Tensor) -> Device | None:
    """Return the GPU that holds a tensor; None for host memory."""
    stream = arrays.stream_of(x)
    return None if stream is None else stream.device()


def marker_of(x: torch.Tensor) -> Callable[[], Event] | None:
    """Return a function that marks the current stream of a tensor's GPU; None for host memory."""
    device = x.device
    return (lambda: arrays.UserStream(device).mark()) if arrays.is_gpu_tensor(x) else None


def selector_of(x: torch.Tensor) -> Callable[[], AbstractContextManager[Any]]:
    """Return a function whose result, a context, makes a tensor's GPU current in this thread."""
    if not arrays.is_gpu_tensor(x):
        return nullcontext
    return functools.partial(torch.accelerator.device_index, x.device.index)


def on_idle_stream(gpus: list[torch.device]) -> AbstractContextManager[Any]:
    """Return a context with an idle stream, on which marks complete immediately.

    Args:
        gpus: One GPU, or none.
    """
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
        MissingDependencyError: PyTorch finds no GPU.

    Collective: yes. Blocking: yes.
    """
    kind = accelerator.available().type
    gpus = torch.get_device_module(kind)
    index = assign_gpu(or_world(comm), torch.accelerator.device_count(),
                       lambda index: str(gpus.get_device_properties(index).uuid))
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)
