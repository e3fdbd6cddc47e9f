"""Puts arrays on a real GPU for tests, and takes them back."""

import numpy as np


def wait(event):
    """Return when all that was queued before an event is done."""
    while not event.test():
        pass


class GpuMemory:
    """Memory of a GPU; see kernel_cases.py.

    Args:
        device: The GPU.
        stream: What it queues on; `get` waits for it.
    """

    def __init__(self, device, stream):
        self._device, self._stream = device, stream

    def put(self, x, offset=0):
        """Return a vector with the elements of an array."""
        host = self._device.gpu.pinned(x.nbytes)
        host[...] = x.view(np.uint8)
        vector = self._device.allocate(x.nbytes + offset)[offset:].view(x.dtype)
        if x.size:
            self._stream.upload(host, vector)
        wait(self._stream.record())
        return vector

    def get(self, x):
        """Return what a vector holds, once all that is queued is done."""
        host = self._device.gpu.pinned(x.nbytes)
        if x.size:
            self._stream.download(x, host)
        wait(self._stream.record())
        return host.view(x.dtype).copy()
