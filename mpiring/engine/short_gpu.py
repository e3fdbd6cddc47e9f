"""Runs collectives on short vectors of a GPU in host memory, among the ranks of one node."""

from functools import partial
from typing import TYPE_CHECKING, Any, cast

from ..gpu.arrays import on_stream
from ..gpu.interface import DeviceVector, Stream
from ..memory.arrays import Array
from ..operations.agreement import Call
from ..operations.collectives import Build, Collectives, returning
from ..operations.on_device import TUNING
from ..record.flight import Flight
from ..transport.base import Schedule, T
from .handle import Handle
from .persistent import moved
from .prepared import Finish, Pattern, Prepared

if TYPE_CHECKING:
    from .group import Group


def is_short(group: "Group", x: Any) -> bool:
    """Return whether plain collectives on a vector are those of a ShortOnGpu.

    Equal calls have the same answer on all ranks. It does not depend on the vector's memory.
    """
    return (isinstance(x, DeviceVector) and x.nbytes <= TUNING.host_bytes
            and len(group.sharing.memory_groups) == 1 < group.size)


class ShortOnGpu(Prepared):
    """A collective on short vectors of a GPU: two copies, and the collective on the host.

    Its vectors are CuPy arrays or tensors, of the pattern's dtype and length. A run queues the
    copies on the user's current stream, and waits once, until the first copy is done. Work that is
    queued later on this stream sees the result. A DeviceVector is complete after the run.
    """

    def __init__(self, group: "Group", call: Call, pattern: Pattern) -> None:
        super().__init__(group, call, pattern)
        is_root = group.rank == pattern.option
        self._sends = pattern.n > 0 and (pattern.kind != "broadcast" or is_root)
        self._receives = pattern.n > 0 and (pattern.kind != "broadcast" or not is_root)
        self._nbytes = pattern.n * pattern.dtype.itemsize

    def named(self, name: str) -> "ShortOnGpu":
        """Return another object for the same collective; see Prepared."""
        return ShortOnGpu(self._group, self._call_named(name), cast(Pattern, self.pattern))

    def run(self, x: Any, call: Call | None = None, costs: list[Flight] | None = None) -> None:
        """Run it on an array; see Prepared."""
        vector, stream = self._on_stream(x)
        slot, host = self._slot(vector)
        if self._sends:
            stream.download(vector, host)
            stream.synchronize()
        # If this raises, the slot is not released, because an operation may still use it.
        super().run(host, call, costs)
        until = None
        if self._receives:
            stream.upload(host, vector)
            until = stream.record()
            if x is vector:
                stream.synchronize()
        vector.device.staging.release(slot, until)

    def start(self, x: Any, result: T, call: Call | None = None,
              finish: Finish[T] = returning) -> Handle[T]:
        """Start it on an array; see Prepared."""
        build = self.build(x)
        handle = self._group.submit(
            call or self.call, lambda collectives: finish(result, build(collectives)))
        self.make_ready()
        return handle

    def build(self, x: Any) -> Build[None]:
        """Return the function that builds the schedule on an array, for an ordinary operation.

        The ranks exchange the same as in a run, so that each rank can do either.
        """
        return partial(self._schedule, *self._on_stream(x))

    def _schedule(self, vector: DeviceVector, stream: Stream,
                  collectives: Collectives) -> Schedule[None]:
        slot, host = self._slot(vector)
        schedule = cast(Pattern, self.pattern).schedule(host, collectives)
        if self._sends:
            stream.download(vector, host)
        # The first step on the host may send the vector. The result, which another stream copies,
        # must not be overwritten by the user's earlier work.
        collectives.ready = (stream.record(),)
        return self._received(schedule, vector, slot, host)

    def _received(self, schedule: Schedule[Any], vector: DeviceVector, slot: Array,
                  host: Array) -> Schedule[None]:
        yield from schedule
        until = None
        if self._receives:
            until = vector.device.to_device(host, vector)
            yield (until,)
        vector.device.staging.release(slot, until)

    def _slot(self, vector: DeviceVector) -> tuple[Array, Array]:
        """Return pinned memory to release later, and the vector of the collective in it."""
        slot = vector.device.staging.acquire(self._nbytes)
        return slot, slot[:self._nbytes].view(vector.dtype)

    def _on_stream(self, x: Any) -> tuple[DeviceVector, Stream]:
        """Return an array's elements, and the user's stream, on which they are ready."""
        if isinstance(x, DeviceVector):
            vector, stream = x, x.device.gpu.user_stream()
            if x.ready is not None:
                stream.wait(x.ready)
        else:
            vector, stream = on_stream(x)
        if vector.size != cast(Pattern, self.pattern).n:
            raise moved(self._group.rank)
        # The first use of a GPU refuses ranks that use it through another package.
        self._group.gpus.context_of(vector.device)
        return vector, stream
