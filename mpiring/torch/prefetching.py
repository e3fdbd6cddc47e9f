"""Brings the CPU tensors of batches to a GPU, for mpiring.data."""

from collections.abc import Sequence
from typing import Any

import torch

from .. import data
from .devices import refuse_missing


class Tensors:
    """PyTorch's dense CPU tensors, which become CUDA tensors; see data.Kind."""

    def takes(self, x: object) -> bool:
        """Return whether it is one."""
        return (isinstance(x, torch.Tensor) and x.device.type == "cpu"
                and x.layout is torch.strided)

    def current(self) -> int:
        """Return the GPU that this thread has in use."""
        refuse_missing()
        return int(torch.cuda.current_device())

    def carrier(self, index: int) -> data.Carrier:
        """Return what brings tensors to a GPU."""
        refuse_missing()
        return _Carrier(torch.device("cuda", index))


class _Carrier:
    """Brings tensors to a GPU, all of a batch in one piece; see data.Carrier.

    PyTorch keeps pinned memory until copies from it are done, and memory of the GPU until the
    streams that it was recorded on are through.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def send(self, xs: Sequence[Any]) -> data.Arrive:
        """Queue copies of tensors."""
        starts, nbytes = data.laid_out([x.nbytes for x in xs])
        # Makes its GPU this thread's, too: to pin memory takes one, and would open the first.
        with torch.cuda.stream(self._stream):
            pinned = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            for part, x in zip(_parts(pinned, starts, xs), xs):
                part.copy_(x.detach())
            moved = pinned.to(self._device, non_blocking=True)
            copied = self._stream.record_event()

        def arrive() -> list[Any]:
            user = torch.cuda.current_stream(self._device)
            user.wait_event(copied)
            moved.record_stream(user)
            return _parts(moved, starts, xs)

        return arrive


def _parts(memory: torch.Tensor, starts: Sequence[int], like: Sequence[Any]) -> list[torch.Tensor]:
    """Return tensors that lie in memory, of the shapes and dtypes of others."""
    return [memory[start:start + x.nbytes].view(x.dtype).view(x.shape)
            for start, x in zip(starts, like)]


def register() -> None:
    """Let batches hold tensors."""
    if not any(isinstance(kind, Tensors) for kind in data.KINDS):
        data.KINDS.append(Tensors())
