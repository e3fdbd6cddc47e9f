"""Copies arrays to a real or simulated GPU, and back, for tests."""

import numpy as np

from mpiring.gpu.interface import await_event as wait
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
        """Return the content of a vector after all queued work."""
        return on_host(x)
