"""Adds up what some operations of a communicator cost: those of a training step."""

from collections.abc import Sequence

from ..communicator import Communicator
from ..engine.group import Build
from ..engine.handle import Handle
from ..gpu.base import Event
from ..gpu.device import Device
from ..operations.agreement import Call
from ..operations.operation import Collectives
from ..record.recorder import Flight
from ..record.statistics import Statistics
from ..transport.base import Schedule, T


class Tally:
    """What the operations that were submitted through it cost, whatever else is under way.

    Args:
        comm: Where they are submitted.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._flights: list[Flight] = []
        self._collectives: list[Collectives] = []

    def submit(self, call: Call, build: Build[T], *, device: Device | None = None,
               ready: Sequence[Event] = ()) -> Handle[T]:
        """Begin an operation that counts; see Communicator.submit."""
        def counted(collectives: Collectives) -> Schedule[T]:
            self._collectives.append(collectives)
            return build(collectives)

        handle = self._comm.submit(call, counted, device=device, ready=ready)
        self._flights.append(handle.flight)
        return handle

    def take(self) -> Statistics:
        """Return what those cost that are complete, which all should be; begin anew."""
        flights = sorted((flight for flight in self._flights if flight.ended_s),
                         key=lambda flight: flight.started_s)
        seconds = until = 0.0
        for flight in flights:
            seconds += max(0.0, flight.ended_s - max(flight.started_s, until))
            until = max(until, flight.ended_s)
        total = Statistics(
            len(flights), sum(one.bytes_sent for one in self._collectives), seconds,
            sum(flight.exposed_s for flight in flights))
        self._flights, self._collectives = [], []
        return total
