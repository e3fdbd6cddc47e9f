"""Lets a Reducer that calculates on the host only combine a bucket that lies on a GPU."""

from typing import Any

import numpy as np

from ..buckets.bucket import Bucket
from ..communicator import Communicator
from ..gpu.base import DeviceVector
from ..gpu.device import Device
from ..memory.arrays import Array
from ..operations.operation import Collectives
from ..reducers.reducer import Reducer
from ..transport.base import Schedule


class HostCopy:
    """A bucket in pinned host memory, which stands for one on a GPU.

    Args:
        bucket: The one on the GPU.
        device: The GPU.
        comm: The ranks.

    Attributes:
        host: The bucket that the Reducer knows.

    Collective: yes. Blocking: yes.
    """

    def __init__(self, bucket: Bucket, device: Device, comm: Communicator) -> None:
        def pinned(n: int, dtype: "np.dtype[Any]") -> Array:
            return device.gpu.pinned(n * dtype.itemsize).view(dtype)

        # What the node's ranks share can be pinned, too; other memory begins anywhere.
        shared = comm.local_size > 1
        self.host = Bucket(bucket.index, bucket.plan, comm.empty if shared else pinned)
        self._bucket, self._device = bucket, device
        if shared:
            device.gpu.pin(self.host.flat)

    def reduce(self, collectives: Collectives, reducer: Reducer) -> Schedule[None]:
        """Return the schedule that replaces the bucket on the GPU by its mean over ranks.

        Args:
            collectives: For host memory.
            reducer: Has taken over the host copy.
        """
        self.host.finite = None
        return self._between_copies(
            self._bucket.vector, reducer.reduce(collectives, self.host))

    def _between_copies(self, vector: DeviceVector, schedule: Schedule[Any]) -> Schedule[None]:
        yield self._bucket.written
        yield (self._device.to_host(vector, self.host.flat),)
        yield from schedule
        self._bucket.finite = self.host.finite
        yield (self._device.to_device(self.host.flat, vector),)
