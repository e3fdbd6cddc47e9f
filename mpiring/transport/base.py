"""States what a schedule may know of the network: channels, requests, schedules."""

from collections.abc import Generator, Iterable
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
Array = NDArray[Any]


class Request(Protocol):
    """Something pending: a message, a turn, a CUDA event, a compute task."""

    def test(self) -> bool:
        """Return whether it is complete, without blocking; once True, always True."""


# A collective algorithm: a generator that posts requests, yields those it waits
# for, and is resumed when all of them are complete.
Schedule = Generator[Iterable[Request], None, T]


class Channel(Protocol):
    """One operation's private lane between `size` ranks.

    Messages between two ranks arrive in the order in which they were sent;
    messages of different channels never meet.
    """

    rank: int
    size: int

    def isend(self, array: Array, dest: int) -> Request:
        """Start sending the bytes of a contiguous array; it must not change until complete."""

    def irecv(self, array: Array, source: int) -> Request:
        """Start receiving exactly `array.nbytes` bytes; undefined content until complete.

        The request raises BufferMismatchError when another number of bytes arrives.
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
        self.pending: list[Request] = []
        self._schedule = schedule

    def step(self) -> bool:
        """Resume the schedule as often as its requests allow; return whether it moved.

        A request's error is thrown into the schedule at its yield; what the
        schedule does not catch is raised here.
        """
        moved = False
        while not self.done:
            error = self._look()
            if self.pending and error is None:
                return moved
            moved = True
            try:
                requests = next(self._schedule) if error is None else self._schedule.throw(error)
                self.pending = list(requests)
            except StopIteration as stop:
                self.result, self.pending, self.done = stop.value, [], True
        return moved

    def _look(self) -> Exception | None:
        """Drop the complete requests; return the error that one of them raised."""
        try:
            self.pending = [request for request in self.pending if not request.test()]
        except Exception as error:
            return error
        return None


NO_BYTES: Array = np.empty(0, np.uint8)
