"""What a schedule knows of the network: channels, nodes, requests; and what steps schedules."""

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
Array = NDArray[Any]


class Request(Protocol):
    """Something pending: a message, a turn, a CUDA event, a barrier."""

    def test(self) -> bool:
        """Return whether it is complete, without blocking; once True, always True."""


# A collective algorithm: a generator that posts requests, yields those it waits
# for, and is resumed when all of them are complete.
Schedule = Generator[Sequence[Request], None, T]


# How many lanes an operation has; each costs a tag.
LANES = 4


class Channel(Protocol):
    """One operation's private lane between `size` ranks.

    Messages between two ranks arrive in the order in which they were sent;
    messages of different channels, and of different lanes, never meet.

    Attributes:
        rank, size: This rank, and how many there are.
    """

    rank: int
    size: int

    @property
    def ranks(self) -> Sequence[int]:
        """The communicator's number of each rank: `range(size)`, but for `Members`."""

    def lane(self, index: int) -> "Channel":
        """Return lane `index` of the same operation, below LANES; lane 0 is its first channel.

        Schedules that run at once, of which one may overtake another, need a lane each.
        """

    def isend(self, array: Array, dest: int) -> Request:
        """Start sending the bytes of a contiguous array; it must not change until complete."""

    def irecv(self, array: Array, source: int) -> Request:
        """Start receiving exactly `array.nbytes` bytes; undefined content until complete.

        The request raises BufferMismatchError when another number of bytes arrives.
        """


class Members:
    """A channel that joins a few ranks of another; see base.Channel.

    It has no messages of its own: they travel, and keep their order, as those of `net`.

    Args:
        net: The channel of all.
        members: Ranks of `net`, this rank among them, in their new order.
    """

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
    """One operation's meeting place of the ranks that share a node's memory.

    It is itself the request to wait for before anything else: that no rank uses the
    memory for an earlier operation any more.

    Attributes:
        rank, size: Among the ranks of the node.
        ranks: Their ranks in the communicator.
        memory: Where calls are made; see node_memory.NodeMemory.
    """

    rank: int
    size: int
    ranks: Sequence[int]
    memory: Any

    @property
    def met(self) -> bool:
        """Whether the first barrier was begun."""

    def test(self) -> bool:
        """Return whether the memory is this operation's."""

    def slots(self, dtype: np.dtype[Any], size: int | None = None) -> Sequence[Array]:
        """Return, per rank of the node, its staging slot, which all of them read and write.

        Args:
            dtype: Of the elements.
            size: How many elements; by default, all that fit.
        """

    def agrees(self) -> bool:
        """Return whether all ranks made the same call; after the first barrier."""

    def headers(self) -> Sequence[tuple[int, bytes]]:
        """Return the other ranks and their headers; after the first barrier."""

    def leave(self) -> None:
        """Mark that this rank has done with the operation."""

    def barrier(self, *numbers: int) -> Request:
        """Arrive; the request is complete once every rank of the node has."""

    def share(self, *numbers: int) -> Schedule[list[tuple[int, ...]]]:
        """Arrive, and return per rank the up to 8 whole numbers that each has passed."""

    def part(self, call: Any, x: Any) -> Schedule[None]:
        """Run a call as a part of the operation; see node_call.NodeCall.

        Args:
            call: Of the ranks of the node.
            x: Its vector.
        """

    def lane(self, index: int) -> "Node":
        """Return lane `index` of the same operation, from 1, below LANES: barriers of its own.

        To be used after the first barrier. The slots are those of the operation.
        """


class Task(Generic[T]):
    """Steps one schedule; every driver (engine, simulator) uses it.

    Attributes:
        done: The schedule has returned.
        result: What it returned.
        pending: The incomplete requests it waits for.
    """

    def __init__(self, schedule: Schedule[T]) -> None:
        self.done = False
        self.result: T | None = None
        self.pending: Sequence[Request] = ()
        self._schedule = schedule

    def requests(self) -> Iterator[Request]:
        """Return what is waited for, also by schedules within this one."""
        for request in self.pending:
            if isinstance(request, _Movement):
                for task in request.tasks:
                    yield from task.requests()
            else:
                yield request

    def start(self) -> None:
        """Run the schedule to its first yield, without looking at what it waits for."""
        self._resume(None)

    def step(self) -> bool:
        """Resume the schedule as often as its requests allow; return whether it moved.

        A request's error is thrown into the schedule at its yield; what the
        schedule does not catch is raised here.
        """
        moved = False
        while not self.done:
            error, pending = None, self.pending
            try:
                # There is mostly a single request: to list those left would take longer.
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


def together(schedules: Iterable[Schedule[T]], in_flight: int = 2) -> Schedule[list[T]]:
    """Run several schedules at once, and return their results in order.

    Args:
        schedules: Begun in this order; drawn from the iterable only when their turn comes.
        in_flight: At most so many are under way at a time.

    Raises: what any of them raises; the others are not resumed then.

    Collective: as the schedules. Blocking: no (a schedule).
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
    """Begin schedules until `count` of them wait for something; note all in `begun`."""
    active: list[Task[T]] = []
    while len(active) < count and (schedule := next(waiting, None)) is not None:
        task = Task(schedule)
        begun.append(task)
        task.start()
        if not task.done:
            active.append(task)
    return active


def run_to_end(schedule: Schedule[T]) -> T:
    """Return the result of a schedule that never waits."""
    while True:
        try:
            next(schedule)
        except StopIteration as stop:
            result: T = stop.value
            return result


# Length of the header by which ranks compare their calls.
HEADER_BYTES = 192

NO_BYTES: Array = np.empty(0, np.uint8)
