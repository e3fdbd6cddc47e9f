"""Copies the arrays or tensors of a batch to a GPU, in one transfer on a separate stream."""

import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .device import Device, Staging
from .interface import DeviceVector, Event

if TYPE_CHECKING:
    import torch

# Alignment of CUDA allocations; sufficient for every dtype and vector load.
_ALIGNMENT = 256

Arrive = Callable[[], Sequence[Any]]


class Carrier(Protocol):
    """Copies arrays of one framework to one GPU."""

    def send(self, xs: Sequence[Any]) -> Arrive:
        """Queue copies of arrays, in the loading thread.

        The result is called by the consuming thread. It returns the copies, and makes the current
        stream of that thread wait for them.
        """


class ArrayCarrier:
    """Copies NumPy arrays to a GPU, as CuPy arrays; see Carrier.

    The memory of a batch is reused when all its arrays have been freed. The copy into it waits for
    the work that was queued before the next batch was requested.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = device.gpu.stream()
        self._staging = Staging(device.gpu)
        # Held by the loading and the consuming thread.
        self._lock = threading.Lock()
        # Memory of freed batches; idle memory, with the event after which it may be overwritten.
        self._freed: deque[DeviceVector] = deque()
        self._idle: list[tuple[DeviceVector, Event]] = []

    def send(self, xs: Sequence[Any]) -> Arrive:
        """Queue copies of arrays; see Carrier."""
        starts, nbytes = aligned_offsets([x.nbytes for x in xs])
        slot = self._staging.acquire(nbytes)
        for start, x in zip(starts, xs):
            slot[start:start + x.nbytes].view(x.dtype).reshape(x.shape)[...] = x
        with self._lock:
            memory = self._acquire(nbytes)
            if nbytes:
                self._stream.upload(slot[:nbytes], memory[:nbytes])
            copied = self._stream.record()
        self._staging.release(slot, copied)
        # The layout does not refer to the arrays, which the loader may reuse.
        layout = [(start, x.nbytes, x.dtype, x.shape) for start, x in zip(starts, xs)]
        return lambda: self._arrived(memory, copied, layout)

    def _acquire(self, nbytes: int) -> DeviceVector:
        fitting = [i for i, (memory, _) in enumerate(self._idle) if memory.size >= nbytes]
        if fitting:
            memory, until = self._idle.pop(min(fitting, key=lambda i: self._idle[i][0].size))
            self._stream.wait(until)
            return memory
        # Batches have grown: free the smaller memory.
        self._idle.clear()
        return self._device.allocate(1 << max(nbytes - 1, 4095).bit_length())

    def _arrived(self, memory: DeviceVector, copied: Event,
                 layout: Sequence[tuple[int, int, np.dtype[Any], tuple[int, ...]]]) -> list[Any]:
        gpu = self._device.gpu
        with self._lock:
            if self._freed:
                # This event follows all work on the freed arrays on the current stream of the
                # consuming thread, even if another thread freed them.
                until = gpu.mark()
                while self._freed:
                    self._idle.append((self._freed.popleft(), until))
        gpu.follow(copied)
        owner = _BatchMemory(memory, self._freed)
        return [gpu.array(replace(memory[start:start + nbytes].view(dtype), owner=owner), shape)
                for start, nbytes, dtype, shape in layout]


class _BatchMemory:
    """Owner of the arrays of a batch; returns their memory when all of them are freed."""

    def __init__(self, memory: DeviceVector, freed: deque[DeviceVector]) -> None:
        self._memory, self._freed = memory, freed

    def __del__(self) -> None:
        self._freed.append(self._memory)


class TensorCarrier:
    """Copies PyTorch's dense CPU tensors to a GPU; see Carrier.

    Pinned memory, with views of it, is reused for a batch of the same layout when the copy from it
    is done. This saves calls of PyTorch: each call releases the interpreter lock, and training may
    wait when the loading thread acquires it again. PyTorch keeps GPU memory until the work on all
    streams on which the memory was recorded is done.

    Raises MissingDependencyError if PyTorch does not find this GPU.
    """

    def __init__(self, kind: str, index: int) -> None:
        from . import accelerator
        accelerator.available(kind)
        self._torch, self._in_use = sys.modules["torch"], accelerator.in_use
        self._device = self._torch.device(kind, index)
        self._stream = self._torch.Stream(self._device)
        # In the order of the copies from them.
        self._slots: deque[_PinnedBatch] = deque()

    def send(self, xs: Sequence[Any]) -> Arrive:
        """Queue copies of tensors; see Carrier."""
        # Pinning memory initializes the current GPU, so make this GPU the current one first.
        with self._in_use(self._stream):
            slot = self._acquire(xs)
            starts, parts = slot.starts, slot.parts
            for part, x in zip(parts, xs):
                part.copy_(x.detach() if x.requires_grad else x)
            moved = slot.filled.to(self._device, non_blocking=True)
            slot.copied = copied = self._stream.record_event()
        self._slots.append(slot)

        def arrive() -> list[Any]:
            user = self._torch.accelerator.current_stream(self._device)
            user.wait_event(copied)
            moved.record_stream(user)
            return tensors_at(moved, starts, parts)

        return arrive

    def _acquire(self, xs: Sequence[Any]) -> "_PinnedBatch":
        """Return pinned memory that no copy uses, with views for these tensors."""
        layout = [(x.dtype, x.shape) for x in xs]
        with suppress(IndexError):
            slot = self._slots.popleft()
            if not slot.copied.query():
                self._slots.appendleft(slot)
            elif slot.layout == layout:
                return slot
        torch = self._torch
        starts, nbytes = aligned_offsets([x.nbytes for x in xs])
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        return _PinnedBatch(layout, starts, memory, tensors_at(memory, starts, xs))


@dataclass
class _PinnedBatch:
    """Pinned memory of a batch, views of its tensors, and the event of the last copy from it."""

    layout: list[tuple[Any, Any]]
    starts: list[int]
    filled: "torch.Tensor"
    parts: list[Any]
    copied: Any = None


def tensors_at(memory: "torch.Tensor", starts: Sequence[int], like: Sequence[Any]) -> list[Any]:
    """Return views of a byte tensor, with the shapes and dtypes of the tensors `like`."""
    return [memory[start:start + x.nbytes].view(x.dtype).view(x.shape)
            for start, x in zip(starts, like)]


def aligned_offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the aligned offsets of arrays of these sizes in one buffer, and its size in bytes."""
    aligned = (-(-nbytes // _ALIGNMENT) * _ALIGNMENT for nbytes in sizes)
    *starts, end = accumulate(aligned, initial=0)
    return starts, end
