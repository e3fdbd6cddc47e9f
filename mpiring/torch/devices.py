"""Knows the GPUs that PyTorch uses: which one a tensor lies on, its stream, this rank's own."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..communicator import Communicator
from ..gpu import accelerator, arrays
from ..gpu.device import Device, Event
from ..gpus import take_turns
from ..memory.tensors import GPU_TYPES

DEVICE_TYPES = ("cpu", *GPU_TYPES)


def described(x: torch.Tensor) -> str:
    """Return a tensor's dtype, shape, and type of device if that is not the CPU, as a text."""
    where = f" on {x.device.type}" * arrays.is_gpu_tensor(x)
    return f"{x.dtype} {tuple(x.shape)}{where}"


def gpu_of(x: torch.Tensor) -> Device | None:
    """Return the GPU on which a tensor lies; None for one in host memory."""
    stream = arrays.stream_of(x)
    return None if stream is None else stream.device()


def marker_of(x: torch.Tensor) -> Callable[[], Event] | None:
    """Return what marks the stream in use on a tensor's GPU; None for one in host memory."""
    where = x.device
    return (lambda: arrays.UserStream(where).mark()) if arrays.is_gpu_tensor(x) else None


def selector_of(x: torch.Tensor) -> Callable[[], AbstractContextManager[Any]]:
    """Return what makes a tensor's GPU this thread's current one, as CuPy needs it."""
    if not arrays.is_gpu_tensor(x):
        return nullcontext
    return functools.partial(torch.accelerator.device_index, x.device.index)


def on_idle_stream(gpus: list[torch.device]) -> AbstractContextManager[Any]:
    """Let this thread use a stream without any work: what is marked there is done at once.

    Args:
        gpus: One, or none.
    """
    return accelerator.in_use(_idle_stream(gpus[0])) if gpus else nullcontext()


@functools.cache
def _idle_stream(gpu: torch.device) -> torch.Stream:
    return torch.Stream(gpu)


def device_for(comm: Communicator) -> torch.device:
    """Return this rank's GPU, and make it PyTorch's current one.

    Ranks of a node take the GPUs that they see in turn; rank 0 warns where ranks share one.

    Raises:
        MissingDependencyError: PyTorch finds no GPU.

    Collective: yes. Blocking: yes.
    """
    kind = accelerator.available().type
    gpus = torch.get_device_module(kind)
    index = take_turns(comm, torch.accelerator.device_count(),
                       lambda index: str(gpus.get_device_properties(index).uuid))
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)
