"""Copies parameters, buffers and the state of optimizers from one rank to all."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from ..communicator import Communicator

# Short tensors travel together; each broadcast costs a message's latency.
_FUSED_BYTES = 1 << 20


def broadcast_parameters(tensors: Iterable[torch.Tensor], comm: Communicator, *,
                         root: int = 0) -> None:
    """Copy tensors of rank `root` to all ranks, in place.

    Args:
        tensors: On the CPU, of any dtype; the same shapes and dtypes in the same order on
            every rank.
        comm: The ranks.
        root: Whose values are copied.

    Raises:
        BufferMismatchError: The ranks passed different numbers of bytes.

    Collective: yes. Blocking: yes.
    """
    fused: list[torch.Tensor] = []
    for tensor in tensors:
        if fused and sum(one.nbytes for one in fused) + tensor.nbytes > _FUSED_BYTES:
            _broadcast(fused, comm, root)
            fused = []
        fused.append(tensor)
    if fused:
        _broadcast(fused, comm, root)


def _broadcast(tensors: list[torch.Tensor], comm: Communicator, root: int) -> None:
    """Copy some tensors as one vector of bytes."""
    with torch.no_grad():
        flat = torch.cat([_bytes_of(tensor) for tensor in tensors])
        comm.broadcast(flat.numpy(), root=root)
        if comm.rank == root:
            return
        parts = flat.split([tensor.nbytes for tensor in tensors])
        for tensor, part in zip(tensors, parts):
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
