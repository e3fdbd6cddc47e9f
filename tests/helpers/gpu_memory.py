"""Puts arrays on a GPU for tests, real or simulated, and takes them back."""

import numpy as np

from mpiring.gpu.device import await_event as wait
from mpiring.gpu.vectors import on_host


class GpuMemory:
    """Memory of a GPU; see kernel_cases.py.

    Args:
        device: The GPU.
    """

    def __init__(self, device):
        self.device = device

    def put(self, x, offset=0):
        """Return a vector with the elements of an array."""
        host = self.device.gpu.pinned(x.nbytes)
        host[...] = x.view(np.uint8)
        vector = self.device.allocate(x.nbytes + offset)[offset:].view(x.dtype)
        wait(self.device.to_device(host.view(x.dtype), vector))
        return vector

    def get(self, x):
        """Return what a vector holds, once all that is queued is done."""
        return on_host(x)
