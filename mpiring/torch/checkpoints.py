"""Checkpoints with PyTorch tensors, and the state of PyTorch's random numbers."""

import os
from collections.abc import Mapping
from typing import Any

import torch

from .. import resilience
from ..arguments import refuse_other_state
from ..errors import ConfigError
from ..memory.pytrees import mapped
from ..sharding.sliced import Sliced
from ..memory.tensors import GPU_TYPES
from ..resilience.consolidated import load_as
from ..resilience.train_state import Framework
from ..resilience.tree import Bytes
from .tensors import tensor_of, tensor_of_bytes


class Tensors:
    """Dense PyTorch tensors on any device; they are loaded on the CPU."""

    name = "tensor"

    def describe(self, x: Any) -> tuple[str, tuple[int, ...]] | None:
        """Return dtype and shape of a tensor; None for other objects."""
        if not isinstance(x, torch.Tensor):
            return None
        if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.layout is not torch.strided:
            raise ConfigError(f"a {type(x).__qualname__} of layout {x.layout} cannot be saved; "
                              f"save a dense torch.Tensor")
        if x.device.type == "meta" or x.is_quantized:
            raise ConfigError("a tensor without data (meta, or quantized) cannot be saved")
        return str(x.dtype).removeprefix("torch."), tuple(x.shape)

    def copy(self, x: Any, out: Bytes) -> None:
        """Copy the elements of `x`, in C order, to `out`."""
        tensor_of_bytes(out, x.dtype, x.shape).copy_(x.detach())

    def build(self, dtype: str, shape: tuple[int, ...], data: Bytes) -> Any:
        """Return a tensor of these elements."""
        return tensor_of_bytes(data, getattr(torch, dtype), shape)


class Checkpoints(resilience.Checkpoints):
    """Checkpoints whose state may also hold tensors.

    See `mpiring.resilience.Checkpoints`. The `state_dict()` of a module, optimizer, scheduler or
    GradScaler can be saved as it is. Tensors are loaded on the CPU, since a job may continue
    without a GPU; `load_state_dict` copies them to the module's device.

    The pieces of `Sliced` leaves are NumPy arrays (`mpiring.memory.tensors.array_of` returns a
    tensor as an array); `mpiring.torch.whole` converts such leaves to tensors.

    Args:
        folder: Folder on a file system that all nodes share; it is created if it is missing.
        comm: Communicator whose ranks save together; by default, all ranks.
        keep: Number of the newest checkpoints to keep, from 1.
        seed: Seed of the training; a checkpoint of another seed is refused.
    """

    kinds = (Tensors(), *resilience.Checkpoints.kinds)


def whole(nest: Any) -> Any:
    """Return a copy of a pytree in which each `Sliced` is replaced by a complete tensor on the CPU.

    The plain optimizer's `load_state_dict` accepts the result for a sharded optimizer's state.

    Args:
        nest: Dicts, lists and tuples, such as `Saved.sharded`; other leaves are unchanged.

    Raises:
        ConfigError: Elements of a tensor are in no piece; names them.

    Collective: no.
    """
    return mapped(nest, lambda leaf: tensor_of(leaf.whole()) if isinstance(leaf, Sliced) else leaf)


def load_file(file: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of a file of `python -m mpiring checkpoint consolidate`, as tensors.

    Args:
        file: Path of the file; see `mpiring.resilience.load_file`.

    Raises:
        CheckpointError: The file was not written by this command.

    Collective: no.
    """
    return load_as(file, Checkpoints.kinds)


def random_state() -> dict[str, Any]:
    """Return the state of the random numbers of Python, NumPy and PyTorch, for a checkpoint.

    Each rank has its own state.

    Collective: no.
    """
    state = resilience.random_state()
    state["torch"] = torch.get_rng_state()
    for kind in GPU_TYPES:
        gpus = torch.get_device_module(kind)
        # Reading the state of a GPU that is not in use would initialize it.
        if gpus.is_initialized():
            state[kind] = gpus.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Continue with the random numbers that followed `random_state`.

    Args:
        state: Result of `random_state`.

    Raises:
        ConfigError: `state` does not come from `random_state`.

    Collective: no.
    """
    refuse_other_state(state, ("python", "numpy", "torch"), "of random numbers")
    resilience.set_random_state(state)
    torch.set_rng_state(state["torch"])
    for kind in GPU_TYPES:
        gpus = torch.get_device_module(kind)
        if kind in state and gpus.is_available():
            gpus.set_rng_state(state[kind])


class TrainState(resilience.TrainState):
    """The complete state of a PyTorch training, with PyTorch's random numbers.

    See `mpiring.resilience.TrainState`. Parts are modules, optimizers, schedulers, `GradScaler`,
    samplers, and other objects with `state_dict` and `load_state_dict`.

    Args:
        comm: Communicator whose ranks train together; by default, all ranks.
        own: Parts, by name, whose state differs between ranks: with `LocalSGD` or `DiLoCo`, the
            model and its optimizer.
        keep: Number of the newest checkpoints to keep in a folder, from 1.
        seed: Seed of the training; a checkpoint of another seed is refused.
        parts: Parts by names of your choice; the same names in the same order on every rank.
    """

    framework = Framework(Checkpoints, random_state, set_random_state, whole)
