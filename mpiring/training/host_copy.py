"""Host copies of buckets on a GPU, for Reducers that compute on the host only."""

from typing import Any

import numpy as np

from ..buckets.bucket import Bucket
from ..communicator import Communicator
from ..gpu.device import Device, DeviceVector
from ..memory.arrays import Array
from ..operations.operation import Collectives
from ..reducers.reducer import Reducer
from ..transport.base import Schedule


class HostCopy:
    """A copy in pinned host memory of a bucket on a GPU.

    Args:
        bucket: The bucket.
        device: Its GPU.
        comm: The ranks.
        reducer: Reduces the copy.

    Attributes:
        host: The copy: the bucket that the Reducer knows.

    Collective: yes. Blocking: yes.
    """

    def __init__(self, bucket: Bucket, device: Device, comm: Communicator,
                 reducer: Reducer) -> None:
        def pinned(n: int, dtype: "np.dtype[Any]") -> Array:
            return device.gpu.pinned(n * dtype.itemsize).view(dtype)

        # What the node's ranks share can be pinned, too; other memory begins anywhere.
        shared = comm.local_size > 1
        self.host = Bucket(bucket.index, bucket.plan, comm.empty if shared else pinned)
        self._bucket, self._device, self._reducer = bucket, device, reducer
        if shared:
            device.gpu.pin(self.host.flat)

    def reduce(self, collectives: Collectives) -> Schedule[None]:
        """Return the schedule that replaces the bucket on the GPU by its mean over ranks.

        Args:
            collectives: For host memory.
        """
        self.host.finite = None
        return self._between_copies(
            self._bucket.vector, self._reducer.reduce(collectives, self.host))

    def _between_copies(self, vector: DeviceVector, schedule: Schedule[None]) -> Schedule[None]:
        yield self._bucket.written
        yield (self._device.to_host(vector, self.host.flat),)
        yield from schedule
        self._bucket.finite = self.host.finite
        yield (self._device.to_device(self.host.flat, vector),)
