"""The interface between schedules and the network: channels, nodes, requests, and tasks."""

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
Array = NDArray[Any]


class Request(Protocol):
    """A pending event: a message, a turn, a CUDA event, a barrier."""

    def test(self) -> bool:
        """Return whether it is complete, without blocking; once True, it stays True."""


# A collective algorithm: a generator that posts requests, yields the requests for which it waits,
# and is resumed when all of them are complete.
Schedule = Generator[Sequence[Request], None, T]


# Number of lanes of an operation; each costs a tag.
LANES = 4


class Channel(Protocol):
    """One operation's private lane between `size` ranks.

    Messages between two ranks arrive in the order in which they were sent. Messages of different
    channels, and of different lanes, are never matched with each other.
    """

    rank: int
    size: int

    @property
    def ranks(self) -> Sequence[int]:
        """The communicator's number of each rank: `range(size)`, except for `Members`."""

    def lane(self, index: int) -> "Channel":
        """Return lane `index`, below LANES; schedules that may overtake each other need several."""

    def isend(self, array: Array, dest: int) -> Request:
        """Start sending the bytes of a contiguous array; it must not change until complete."""

    def irecv(self, array: Array, source: int) -> Request:
        """Start receiving exactly `array.nbytes` bytes; undefined content until complete.

        The request raises BufferMismatchError when a different number of bytes arrives.
        """


class Members:
    """A channel between some ranks of `net`, including this rank, in the order of `members`."""

    def __init__(self, net: Channel, members: Sequence[int]) -> None:
        self.rank = members.index(net.rank)
        self.size = len(members)
        self._net = net
        self._members = members

    @property
    def ranks(self) -> Sequence[int]:
        """The communicator's number of each member."""
        return tuple(self._net.ranks[member] for member in self._members)

    def lane(self, index: int) -> Channel:
        """Return lane `index` of the same operation, among the same ranks."""
        return Members(self._net.lane(index), self._members)

    def isend(self, array: Array, dest: int) -> Request:
        """Start sending the bytes of a contiguous array to member `dest`."""
        return self._net.isend(array, self._members[dest])

    def irecv(self, array: Array, source: int) -> Request:
        """Start receiving exactly `array.nbytes` bytes from member `source`."""
        return self._net.irecv(array, self._members[source])


class Node(Protocol):
    """One operation on the ranks that share a node's memory: barriers, notes and staging slots.

    The node is itself a request, for which a rank waits first. The request is complete once no rank
    uses the memory for an earlier operation. `ranks` are their numbers in the communicator. If the
    node `is_queued`, barriers are queued on GPUs, and their requests are complete at once.
    """

    rank: int
    size: int
    ranks: Sequence[int]
    is_queued: bool

    @property
    def has_arrived(self) -> bool:
        """Whether this rank has arrived at the first barrier."""

    def test(self) -> bool:
        """Return whether this operation may use the memory."""

    def slots(self, dtype: np.dtype[Any], size: int | None = None) -> Sequence[Array]:
        """Return `size` elements, by default all, of the slots that all ranks read and write."""

    def agrees(self) -> bool:
        """Return whether all ranks made the same call; after the first barrier."""

    def headers(self) -> Sequence[tuple[int, bytes]]:
        """Return the other ranks and their headers; after the first barrier."""

    def leave(self) -> None:
        """Mark that this rank no longer uses the memory for the operation."""

    def barrier(self, *numbers: int) -> Request:
        """Arrive; the request is complete once every rank of the node has arrived."""

    def share(self, *numbers: int) -> Schedule[list[tuple[int, ...]]]:
        """Arrive; return, per rank, the whole numbers that it has passed, at most 8."""

    def lane(self, index: int) -> "Node":
        """Return lane `index`, from 1, below LANES, with the same slots but separate barriers.

        Use it after the first barrier.
        """


class Task(Generic[T]):
    """Steps one schedule, for every driver (engine, simulator); it waits for `pending`."""

    def __init__(self, schedule: Schedule[T]) -> None:
        self.done = False
        self.result: T | None = None
        self.pending: Sequence[Request] = ()
        self._schedule = schedule

    def requests(self) -> Iterator[Request]:
        """Yield the requests for which it waits, also in schedules within this one."""
        for request in self.pending:
            if isinstance(request, _Movement):
                for task in request.tasks:
                    yield from task.requests()
            else:
                yield request

    def start(self) -> None:
        """Run the schedule to its first yield, without testing the requests it waits for."""
        self._resume(None)

    def step(self) -> bool:
        """Resume the schedule as often as its requests allow; return whether it moved.

        A request's error is thrown into the schedule at its yield. An error that the schedule does
        not catch is raised here.
        """
        moved = False
        while not self.done:
            error, pending = None, self.pending
            try:
                # Usually there is one request. Making a list would take longer.
                if len(pending) == 1:
                    if not pending[0].test():
                        return moved
                elif pending:
                    self.pending = pending = [request for request in pending if not request.test()]
                    if pending:
                        return moved
            except Exception as raised:
                error = raised
            moved = True
            self._resume(error)
        return moved

    def _resume(self, error: Exception | None) -> None:
        try:
            self.pending = (self._schedule.send(None) if error is None
                            else self._schedule.throw(error))
        except StopIteration as stop:
            self.result, self.pending, self.done = stop.value, (), True


class _Movement:
    """A request that is complete once any of several tasks has moved."""

    def __init__(self, tasks: Sequence[Task[Any]]) -> None:
        self.tasks = tasks
        self._moved = False

    def __repr__(self) -> str:
        return f"any of {[task.pending for task in self.tasks]}"

    def test(self) -> bool:
        """Step all tasks, and return whether any has moved, now or before."""
        for task in () if self._moved else self.tasks:
            self._moved |= task.step()
        return self._moved


def run_together(schedules: Iterable[Schedule[T]], in_flight: int = 2) -> Schedule[list[T]]:
    """Run at most `in_flight` schedules at a time, and return their results in order.

    They begin in this order; the iterable is advanced only to begin the next. The error of any
    schedule is raised, after which no other schedule is resumed.
    """
    begun: list[Task[T]] = []
    waiting = iter(schedules)
    active = _begin(waiting, in_flight, begun)
    while active:
        yield (_Movement(active),)
        active = [task for task in active if not task.done]
        active += _begin(waiting, in_flight - len(active), begun)
    return [task.result for task in begun]  # type: ignore[misc]


def _begin(waiting: Iterator[Schedule[T]], count: int, begun: list[Task[T]]) -> list[Task[T]]:
    """Begin schedules until `count` of them wait for something; append all to `begun`."""
    active: list[Task[T]] = []
    while len(active) < count and (schedule := next(waiting, None)) is not None:
        task = Task(schedule)
        begun.append(task)
        task.start()
        if not task.done:
            active.append(task)
    return active


# Length of the header by which ranks compare their calls.
HEADER_BYTES = 192

NO_BYTES: Array = np.empty(0, np.uint8)
