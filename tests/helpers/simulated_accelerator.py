"""Simulates PyTorch's streams on a GPU that uses host memory, without a GPU.

In-place writes on a stream happen late, in any order that the streams allow. Until then, the target
of a copy to host memory contains junk, so a missing wait causes a wrong result. The user's
computations are complete at once.
"""

import weakref
from contextlib import nullcontext

import torch
from simulated_gpu import JUNK, SimulatedGpu
from simulated_gpu import Stream as Queue
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from mpiring.gpu import accelerator, arrays

_clock = SimulatedGpu()
# Host memory that copies may use: addresses, each with a length.
_pinned = {}
_real_empty = torch.empty
_SET = torch.ops.aten.set_.source_Storage_storage_offset


class Event:
    """See torch.Event."""

    def __init__(self, device):
        pass

    def record(self, stream):
        self._inside = stream.queue.record()

    def query(self):
        return self._inside.test()

    def hold(self, queue):
        """Make a stream's queue wait for this event."""
        queue.wait(self._inside)


def _done(function, args, kwargs):
    # Not delayed again by the stream that is current at the wait.
    with _disable_current_modes():
        function(*args, **kwargs)
    return True


class Late(TorchDispatchMode):
    """Delays in-place writes, which a stream executes later."""

    def __init__(self, queue):
        super().__init__()
        self._queue = queue

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not function._schema.is_mutable or function is _SET:
            return function(*args, **kwargs)
        out = kwargs.get("out", args[0])
        if function is torch.ops.aten.copy_.default:
            to_host, from_host = map(_is_pinned, args[:2])
            assert not (to_host and from_host)
            if to_host:
                out.view(torch.uint8).fill_(JUNK)
        self._queue.queue(lambda: _done(function, args, kwargs))
        return out


class Stream:
    """See torch.Stream."""

    device, device_index = torch.device("cpu"), 0

    def __init__(self, *which):
        self.queue, self._modes = Queue(_clock), []

    def __enter__(self):
        self._modes.append(Late(self.queue))
        self._modes[-1].__enter__()

    def __exit__(self, *error):
        self._modes.pop().__exit__(*error)

    def synchronize(self):
        event = Event(self.device)
        event.record(self)
        while not event.query():
            pass

    def wait_event(self, event):
        event.hold(self.queue)


class UserStream(Stream):
    """The user's stream: computations are complete at once, after everything that they wait for."""

    def __enter__(self):
        pass

    def __exit__(self, *error):
        pass

    def wait_event(self, event):
        while not event.query():
            pass


def _is_pinned(x):
    return any(start <= x.data_ptr() < start + nbytes for start, nbytes in _pinned.items())


def _empty(*size, pin_memory=False, **how):
    x = _real_empty(*size, **how)
    if how.get("dtype") is torch.uint8:
        # At once, even if a stream is current.
        x.numpy().fill(JUNK)
    if pin_memory:
        _pinned[x.data_ptr()] = x.nbytes
        weakref.finalize(x, _pinned.pop, x.data_ptr())
    return x


def _register(self, address, nbytes):
    _pinned[address] = nbytes
    return 0, ""


def _unregister(self, address):
    del _pinned[address]


def install(patch):
    """Make tensors on the CPU count as tensors on a PyTorch GPU."""
    user = UserStream()
    patch.setitem(arrays.OPENERS, "cpu", arrays.OPENERS["xpu"])
    for name, value in {"Stream": Stream, "Event": Event, "empty": _empty}.items():
        patch.setattr(torch, name, value)
    patch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    patch.setattr(torch.cpu, "current_stream", lambda where: user)
    patch.setattr(torch.cpu, "get_device_name", lambda where: "simulated", raising=False)
    patch.setattr(torch.accelerator, "current_stream", lambda where: user)
    patch.setattr(torch.accelerator, "device_index", lambda index: nullcontext())
    patch.setattr(accelerator, "in_use", lambda stream: nullcontext())
    patch.setattr(accelerator.Accelerator, "_register", _register)
    patch.setattr(accelerator.Accelerator, "_unregister", _unregister)
