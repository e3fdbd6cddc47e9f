"""Finds the GPU on which a tensor lies, sees its memory there, and marks PyTorch's streams.

What is asked of torch.cuda is in `UserStream` and in the functions that say so: tests, which have
no GPU, put others in their place.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import torch

from ..communicator import Communicator
from ..errors import ConfigError, MissingDependencyError
from ..gpu.arrays import VIEWS
from ..gpu.base import DeviceVector, Event
from ..gpu.device import Device
from ..gpus import take_turns
from .tensors import array_of, numpy_dtype, tensor_of

KINDS = ("cpu", "cuda")


def is_on_gpu(x: torch.Tensor) -> bool:
    """Return whether a tensor lies in a GPU's memory; of PyTorch's, replaced in tests."""
    return x.device.type == "cuda"


def described(x: torch.Tensor) -> str:
    """Return a tensor's dtype, shape, and kind of device if that is not the CPU, as a text."""
    where = f" on {x.device.type}" * is_on_gpu(x)
    return f"{x.dtype} {tuple(x.shape)}{where}"


def shared_with(x: Any) -> torch.Tensor:
    """Return CuPy's array as a tensor of the same memory; of PyTorch's, replaced in tests."""
    if x.dtype == ml_dtypes.bfloat16:
        # Not all versions of DLPack and CuPy hand it over.
        return torch.from_dlpack(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(x)


class UserStream:
    """The stream that a thread of the user's has in use; of PyTorch's, replaced in tests.

    In a hook of autograd's that is the one on which the hook's tensor was written.

    Args:
        where: The GPU.
    """

    def __init__(self, where: torch.device) -> None:
        self._where = where
        self._stream = torch.cuda.current_stream(where)

    def device(self) -> Device:
        """Return the GPU."""
        from ..gpu import cuda
        return cuda.device(self._where.index)

    def vector(self, x: torch.Tensor) -> DeviceVector:
        """Return a contiguous tensor's elements; they are ready when a `mark` is done."""
        from ..gpu import arrays
        return arrays.vector_at(
            x.data_ptr(), x.numel(), numpy_dtype(x.dtype), self._where.index, None, x)

    def mark(self) -> Event:
        """Return a mark behind all that is queued on it."""
        return self.device().gpu.mark(self._stream.cuda_stream)

    def in_use(self) -> AbstractContextManager[Any]:
        """Let this thread queue its work on it, too."""
        context: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return context


def stream_of(x: torch.Tensor) -> UserStream | None:
    """Return the stream in use on a tensor's GPU; None for a tensor in host memory."""
    return UserStream(x.device) if is_on_gpu(x) else None


def gpu_of(x: torch.Tensor) -> Device | None:
    """Return the GPU on which a tensor lies; None for one in host memory."""
    stream = stream_of(x)
    return None if stream is None else stream.device()


def marker_of(x: torch.Tensor) -> Callable[[], Event] | None:
    """Return what marks the stream in use on a tensor's GPU; None for one in host memory."""
    where = x.device
    return (lambda: UserStream(where).mark()) if is_on_gpu(x) else None


def current(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Make a tensor's GPU this thread's current one, as CuPy wants it; PyTorch's users need not."""
    return torch.cuda.device(x.device) if is_on_gpu(x) else nullcontext()


def vector_of(x: torch.Tensor) -> Any:
    """Return a contiguous tensor's elements as a vector of the same memory, wherever that is.

    Returns:
        A NumPy vector, or a DeviceVector, ready when the stream in use has come so far.

    Raises:
        ConfigError: As `array_of`.
        MissingDependencyError: It is on a GPU, and CuPy is not installed.
    """
    stream = stream_of(x)
    return array_of(x) if stream is None else replace(stream.vector(x), ready=stream.mark())


def _view(x: Any) -> Any:
    """See a tensor that collectives are called with; None for anything else."""
    if not isinstance(x, torch.Tensor):
        return None
    if x.layout is torch.strided and not x.is_contiguous():
        raise ConfigError(
            f"tensor of shape {tuple(x.shape)} with strides {x.stride()} is not contiguous, so it "
            f"cannot be combined in place; pass y = x.contiguous(), and afterwards x.copy_(y)")
    return vector_of(x)


VIEWS.append(_view)


def seen_as_tensor(x: Any) -> torch.Tensor:
    """Return an array, of NumPy or CuPy, as a tensor of the same shape and memory."""
    return tensor_of(x) if isinstance(x, np.ndarray) else shared_with(x)


def on_idle_stream(gpus: list[torch.device]) -> AbstractContextManager[Any]:
    """Let this thread use a stream on which nothing waits: what is marked there is done at once.

    Args:
        gpus: One, or none.
    """
    return torch.cuda.stream(_idle_stream(gpus[0])) if gpus else nullcontext()


@functools.cache
def _idle_stream(gpu: torch.device) -> Any:
    return torch.cuda.Stream(gpu)


def refuse_missing() -> None:
    """Raise MissingDependencyError if PyTorch cannot use a GPU."""
    if not torch.cuda.is_available():
        raise MissingDependencyError(
            f"PyTorch {torch.__version__} finds no GPU: install a build with CUDA, as "
            f"https://pytorch.org/get-started says, and run nvidia-smi, which must list one")


def device_for(comm: Communicator) -> torch.device:
    """Return the GPU that is this rank's, and use it from now on where none is named.

    Ranks of a node take the GPUs that they see in turn; that ranks share one is said once.

    Raises:
        MissingDependencyError: PyTorch finds none.

    Collective: yes. Blocking: yes.
    """
    refuse_missing()
    index = take_turns(comm, torch.cuda.device_count(),
                       lambda index: str(torch.cuda.get_device_properties(index).uuid))
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
