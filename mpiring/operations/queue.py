"""The operations that a communicator queues on a GPU, so that the host does not wait for them.

The ranks of a node see each other's GPU memory. Their streams wait for each other by numbers in
pinned host memory. All ranks queue their operations in the same order.
"""

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..gpu.device import Device
from ..gpu.interface import Alarm, DeviceVector, Event, Flags, Program
from ..memory.arrays import Array
from ..transport.base import HEADER_BYTES, Node, Schedule
from ..transport.node_memory import REORDERS, NodeMemory
from .agreement import Call, refuse

# Number of the latest calls that are kept for comparison.
RING = 64
# Number of the latest calls whose alarms are kept. Those of a step are read in the next step.
ALARMS = 2048
# The memory of a rank has its flag, an alarm for each call, and a record of each call, which is its
# number, its digest and its header.
_ALARMS = 64
_RECORDS = _ALARMS + 4 * ALARMS
_RECORD_BYTES = 16 + HEADER_BYTES
MEMORY_BYTES = _RECORDS + RING * _RECORD_BYTES


class GpuQueue:
    """The queued operations of one communicator on one GPU, among the ranks of a node.

    Args:
        memory: Pinned memory of each rank: MEMORY_BYTES bytes, zero at first.
        slots: Staging slots of all ranks on their GPUs.

    Attributes:
        ranks, rank: Ranks of the node in the communicator, and the position of this rank.
        number: Number of calls that this rank has recorded; see `record`.
        half: Half of the staging slots that the next operation uses, 0 or 1. Operations use them in
            turn. A rank writes to a half again after the barrier of another operation, when all
            ranks have queued their reads of its content.
    """

    def __init__(self, device: Device, node: Node, memory: Sequence[Array],
                 slots: Sequence[DeviceVector]) -> None:
        self.device, self.ranks, self.rank = device, node.ranks, node.rank
        self.number = self.half = 0
        self._slots = slots
        self._flags = Flags([part[:4].view(np.uint32) for part in memory], node.rank)
        self._alarms = [part[_ALARMS:_RECORDS].view(np.uint32) for part in memory]
        self._own_alarms = [self._alarms[node.rank][i:i + 1] for i in range(ALARMS)]
        self._words = [part[_RECORDS:].data.cast("q") for part in memory]
        self._texts = [part[_RECORDS:].data for part in memory]
        self._calls: deque[Call] = deque()
        # Threads that wait also compare calls.
        self._comparing = threading.Lock()
        self._meetings = 0

    # Work on the GPU

    def begin(self, ready: Sequence[Event]) -> Sequence[DeviceVector]:
        """Begin an operation behind all earlier ones; return its staging slots, one per rank.

        Its work waits for the events `ready`.
        """
        self.device.follow(ready)
        size = self._slots[0].size // 2
        start = self.half * size
        self.half = 1 - self.half
        return [slot[start:start + size] for slot in self._slots]

    def repeat(self, program: Program, ready: Sequence[Event], number: int) -> Event:
        """Queue the work of an operation again, for a call; see Device.repeat."""
        first = self._meetings + 1
        self.half = 1 - self.half
        self._meetings += program.steps.count(None)
        return self.device.repeat(program, ready, self._flags, first, self.alarm(number))

    def meet(self) -> None:
        """Queue a barrier of all ranks."""
        self._meetings += 1
        if len(self.ranks) > 1:
            self.device.meet(self._flags, self._meetings)

    def release(self) -> None:
        """Let the queued barriers of this rank pass, as if all ranks had reached them."""
        for word in self._flags.words:
            word[...] = self._meetings & 0xFFFFFFFF

    # Calls that ranks compare later

    def record(self, call: Call) -> int:
        """Let the other ranks compare a call, which has the returned number, from 1."""
        number = self.number + 1
        place = number % RING * _RECORD_BYTES
        self._texts[self.rank][place + 16:place + _RECORD_BYTES] = call.header
        words, word = self._words[self.rank], place // 8
        words[word + 1] = call.digest
        if REORDERS:
            NodeMemory.fence()
        words[word] = number
        with self._comparing:
            self._calls.append(call)
            self.number = number
        return number

    def compare(self) -> bool:
        """Compare the calls that all ranks have recorded; return whether there is room for more.

        Half of the ring is for ranks that are behind, which may compare these calls later. Raises
        BufferMismatchError if another rank made a different call.
        """
        with self._comparing:
            while self._calls:
                number = self.number - len(self._calls) + 1
                word = number % RING * _RECORD_BYTES // 8
                for words in self._words:
                    if words[word] < number:
                        return len(self._calls) < RING // 2
                if REORDERS:
                    NodeMemory.fence()
                call = self._calls.popleft()
                for position, words in enumerate(self._words):
                    if words[word + 1] != call.digest:
                        start = 8 * word + 16
                        refuse(self.ranks[self.rank], call, self.ranks[position],
                               bytes(self._texts[position][start:start + HEADER_BYTES]))
            return True

    def alarm(self, number: int) -> Alarm:
        """Return this rank's alarm for NaN and Inf in the results of a call."""
        return self._own_alarms[number % ALARMS], number

    def is_finite(self, number: int) -> bool:
        """Return whether no rank has given the alarm of a call, whose event is complete."""
        return not any(int(alarms[number % ALARMS]) == number & 0xFFFFFFFF
                       for alarms in self._alarms)


class QueuedNode:
    """The node of an operation whose barriers are queued on the GPU; see base.Node.

    `host` is the node of the same operation in host memory. It is None if the ranks have agreed on
    the operation before. They then pass the same numbers to `share`.
    """

    is_queued = True

    def __init__(self, queue: GpuQueue, host: Node | None) -> None:
        self.rank, self.ranks, self.size = queue.rank, queue.ranks, len(queue.ranks)
        self.has_arrived = False
        self._queue, self._host = queue, host
        self._slots: Sequence[DeviceVector] = ()

    def begin(self, ready: Sequence[Event]) -> None:
        """Begin to queue the operation; see GpuQueue."""
        self._slots = self._queue.begin(ready)

    def test(self) -> bool:
        """Return True: the host node of the operation has been waited for."""
        return True

    def agrees(self) -> bool:
        """Return True: the host node of the operation compares the calls."""
        return True

    def headers(self) -> Sequence[tuple[int, bytes]]:
        """Return nothing, because the ranks agree."""
        return []

    def leave(self) -> None:
        """Do nothing."""

    def slots(self, dtype: "np.dtype[Any]", size: int | None = None) -> Sequence[Any]:
        """Return the staging slots of all ranks, on their GPUs; see base.Node."""
        return [slot.view(dtype)[:size] for slot in self._slots]

    def barrier(self, *numbers: int) -> "QueuedNode":
        """Queue a barrier, for which no host waits."""
        self.has_arrived = True
        self._queue.meet()
        return self

    def share(self, *numbers: int) -> Schedule[list[tuple[int, ...]]]:
        """Queue a barrier; return the numbers of all ranks, whose hosts exchange them."""
        self.barrier()
        if self._host is not None:
            return (yield from self._host.share(*numbers))
        yield ()
        return [numbers] * self.size

    def lane(self, index: int) -> "QueuedNode":
        """Return the same object, because its work is in one stream."""
        return self
