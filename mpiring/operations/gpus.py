"""The GPUs of one communicator's operations, each prepared the first time it is used."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..config import Config
from ..errors import TransportError
from ..gpu.device import Device, DeviceVector, Event
from ..launch.gpu_aware import takes_pointers
from ..launch.start import load_mpi
from ..memory.arrays import Array
from ..transport.base import Schedule, T
from ..transport.layout import AREAS
from .agreement import Call
from .exports import Exports
from .on_device import SLOT_BYTES, TUNING, GpuContext, in_context
from .operation import Collectives
from .windows import Windows, mapped

Build = Callable[[Collectives], Schedule[T]]
# Runs an operation among all ranks of the communicator.
Run = Callable[[Call, Build[GpuContext]], GpuContext]


class GpuOperations:
    """The GPUs that operations of one communicator use, on one rank.

    Args:
        windows: Where collectives find memory that ranks share.
        run: Runs an operation.
        config: Its `gpu_aware`: whether MPI takes pointers of a GPU's memory.
    """

    def __init__(self, windows: Windows, run: Run, config: Config) -> None:
        self._run, self._config = run, config
        self._exports = Exports(windows)
        self._known: dict[int, GpuContext] = {}

    def where(self, vector: Any, build: Build[T]) -> Build[T]:
        """Return `build` for where a vector lies: in host memory, or on a GPU; see `on`."""
        if not isinstance(vector, DeviceVector):
            return build
        return self.on(vector.device, (vector.ready,) if vector.ready else (), build)

    def on(self, device: Device, ready: Sequence[Event], build: Build[T]) -> Build[T]:
        """Return a function that builds the same schedule for vectors on a GPU.

        Args:
            device: The GPU.
            ready: When the vectors may be used.
            build: Returns a schedule, given the collectives bound to its channel.

        Collective: yes, the first time for each GPU. Blocking: yes, then.
        """
        context = self._of(device)
        return lambda collectives: in_context(collectives, context, ready, build)

    def _of(self, device: Device) -> GpuContext:
        """Return a GPU as operations use it."""
        context = self._known.get(id(device))
        if context is None:
            # Kept alive by the context, so that no other one can have its id.
            # All ranks need the same: their schedules differ.
            way = "CuPy" if device.gpu.programmable else "PyTorch alone"
            context = self._known[id(device)] = self._run(
                Call("prepare", f"GPU number {len(self._known)} for operations by {way}"),
                lambda collectives: self._prepared(collectives, device))
        return context

    def _prepared(self, collectives: Collectives, device: Device) -> Schedule[GpuContext]:
        segments = yield from self._segments(collectives, device)
        direct = np.zeros(1, np.uint8)
        if len(collectives.nodes) > 1:
            if collectives.rank == 0:
                # As long as a job's start, the first time.
                direct[:] = takes_pointers(
                    self._config, load_mpi().Get_library_version(),
                    device.gpu.index if device.gpu.programmable else None)
            yield from collectives.broadcast(direct, 0)
        # What a rank lays out at a time for the other ranks of its node fits a turn together.
        tuning = replace(TUNING, slice_bytes=TUNING.slice_bytes // max(collectives.slices - 1, 1))
        return GpuContext(device, self._exports, bool(direct[0]), segments, tuning)

    def _segments(self, collectives: Collectives,
                  device: Device) -> Schedule[Sequence[Array] | None]:
        """Return pinned memory that the node's ranks share, if there are several."""
        if collectives.node.size == 1:
            yield ()
            return None
        segments = yield from mapped(collectives.node, AREAS * SLOT_BYTES)
        if segments is None:
            raise TransportError(
                f"rank {collectives.rank}: there are no {AREAS * SLOT_BYTES >> 20} MiB of memory "
                f"to share with the node's other ranks, through which the data of GPUs has to go")
        for segment in segments:
            device.gpu.pin(segment)
        return segments
