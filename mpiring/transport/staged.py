"""Messages in GPU memory, through pinned host memory or, if MPI accepts GPU pointers, directly.

A message is posted only when the GPU no longer uses its memory. A vector to send must have been
copied to the host or, if MPI accepts GPU pointers, all work that is queued on it must be done.
Messages are posted in the order of the calls, because MPI matches them in this order.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ..gpu.device import Device
from ..gpu.interface import DeviceVector, Event
from .base import Array, Channel, Request


class DeviceChannel:
    """A channel whose vectors may be on a GPU; if `direct`, MPI accepts its pointers."""

    def __init__(self, net: Channel, device: Device, *, direct: bool = False) -> None:
        self.rank, self.size = net.rank, net.size
        self._net = net
        self._device = device
        self._direct = direct
        self._lanes: dict[int, DeviceChannel] = {0: self}
        # Two queues, because MPI matches sends in order and receives in order, independently.
        self._sends: deque[DeviceMessage] = deque()
        self._receives: deque[DeviceMessage] = deque()

    @property
    def ranks(self) -> Sequence[int]:
        """The communicator's number of each rank."""
        return self._net.ranks

    def lane(self, index: int) -> "DeviceChannel":
        """Return lane `index` of the same operation."""
        if index not in self._lanes:
            self._lanes[index] = DeviceChannel(
                self._net.lane(index), self._device, direct=self._direct)
        return self._lanes[index]

    def isend(self, array: Array, dest: int) -> Request:
        """Start sending the bytes of a vector in any memory; it must not change meanwhile."""
        x: Any = array
        if not self._needs_staging(x):
            return self._enqueue(
                self._sends, self._work_event(x), lambda: self._net.isend(array, dest))
        slot, host = self._slot(x)
        return self._enqueue(
            self._sends, self._device.to_host(x, host), lambda: self._net.isend(host, dest),
            lambda: self._device.staging.release(slot))

    def irecv(self, array: Array, source: int) -> Request:
        """Start receiving; work that is queued on the device after completion sees the data."""
        x: Any = array
        if not self._needs_staging(x):
            # Queued work may still read the old data.
            return self._enqueue(
                self._receives, self._work_event(x), lambda: self._net.irecv(array, source))
        slot, host = self._slot(x)
        return self._enqueue(
            self._receives, None, lambda: self._net.irecv(host, source),
            lambda: self._device.staging.release(slot, self._device.to_device(host, x)))

    def _needs_staging(self, x: Any) -> bool:
        return isinstance(x, DeviceVector) and not self._direct

    def _work_event(self, x: Any) -> Event | None:
        """Return an event after all work queued on the GPU; None for a vector in host memory."""
        return self._device.event() if isinstance(x, DeviceVector) else None

    def _slot(self, x: DeviceVector) -> tuple[Array, Array]:
        """Return a slot of pinned memory, and the part of it with the length of a vector."""
        slot = self._device.staging.acquire(x.nbytes)
        return slot, slot[:x.nbytes]

    def _enqueue(self, queue: "deque[DeviceMessage]", ready: Event | None,
                 post: Callable[[], Request],
                 on_complete: Callable[[], None] = lambda: None) -> "DeviceMessage":
        message = DeviceMessage(self, ready, post, on_complete)
        queue.append(message)
        self.post()
        return message

    def post(self) -> None:
        """Post the messages that are ready, in order; called at each test of a message."""
        for queue in (self._receives, self._sends):
            while queue and queue[0].try_post():
                queue.popleft()


class DeviceMessage:
    """A message to post after the event `ready`, or at once if None; `request` is None before."""

    def __init__(self, channel: DeviceChannel, ready: Event | None, post: Callable[[], Request],
                 on_complete: Callable[[], None]) -> None:
        self._channel, self._ready = channel, ready
        self._post, self._on_complete = post, on_complete
        self.request: Request | None = None
        self._done = False

    def __repr__(self) -> str:
        return repr(self.request or "a message that waits for the GPU")

    def try_post(self) -> bool:
        """Post it if the GPU no longer uses its memory; return whether it is posted."""
        if self._ready is not None and not self._ready.test():
            return False
        self.request = self._post()
        return True

    def test(self) -> bool:
        """Return whether it is complete."""
        if self._done:
            return True
        self._channel.post()
        if self.request is None or not self.request.test():
            return False
        self._on_complete()
        self._done = True
        return True
