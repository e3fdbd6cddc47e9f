"""Messages between simulated nodes, which share the nodes' network interfaces."""

import math
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from .prices import Link

# The ranks at its ends.
Flow = tuple[int, int]


class Clock(Protocol):
    """The virtual clock of a simulated network.

    Attributes:
        time_s: Now.
    """

    time_s: float

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Do `action` at a virtual time."""


# Called with the times at which the first and the last byte pass.
Passed = Callable[[float, float], None]


class Interface:
    """One direction of a node's network interface (NIC), which flows share in turns.

    Args:
        link: Its rate and burst.
        clock: Of the network.
    """

    def __init__(self, link: Link, clock: Clock) -> None:
        self._link, self._clock = link, clock
        self._burst_s = link.burst_bytes / link.bandwidth
        self._free_s = -math.inf
        self._flows: dict[Flow, deque[tuple[float, Passed]]] = {}
        self._at_work = False

    def carry(self, flow: Flow, nbytes: float, passed: Passed) -> None:
        """Take bytes that come now, behind those of the same flow."""
        self._flows.setdefault(flow, deque()).append((nbytes, passed))
        if not self._at_work:
            self._serve()

    def _serve(self) -> None:
        """Let pass what can pass now, of one flow after the other, and go on when it has."""
        now_s, self._at_work = self._clock.time_s, True
        while self._flows and self._free_s <= now_s:
            flow = next(iter(self._flows))
            waiting = self._flows.pop(flow)
            nbytes, passed = waiting.popleft()
            if waiting:
                self._flows[flow] = waiting
            start_s = max(now_s - self._burst_s, self._free_s)
            self._free_s = start_s + nbytes / self._link.bandwidth
            passed(max(now_s, start_s), max(now_s, self._free_s))
        self._at_work = bool(self._flows)
        if self._flows:
            self._clock.at(self._free_s, self._serve)


# Length of the parts in which messages travel, and their number at most: TCP's are finer, would
# take longer to simulate, and change little.
_QUANTUM_BYTES = 256 << 10
_MOST_QUANTA = 16


class Wires:
    """The interfaces of all nodes: messages that meet at one share it, as TCP's streams do.

    Args:
        link: Between any two nodes.
        clock: Of the network.
    """

    def __init__(self, link: Link, clock: Clock) -> None:
        self._link, self._clock = link, clock
        self._out: dict[int, Interface] = defaultdict(lambda: Interface(link, clock))
        self._in: dict[int, Interface] = defaultdict(lambda: Interface(link, clock))

    def carry(self, flow: Flow, source_node: int, dest_node: int, nbytes: int, slowness: float,
              left: Callable[[float], None], landed: Callable[[float], None]) -> None:
        """Carry a message from one node to another.

        Args:
            flow: Messages of a flow stay in order.
            slowness: Multiplies all times.
            left, landed: Called with the times at which its last byte has left and is there.
        """
        latency_s = slowness * self._link.latency_s
        if self._link.bandwidth == math.inf:
            # Nothing to share: a short cut, which most adversarial networks take.
            left(self._clock.time_s)
            landed(self._clock.time_s + latency_s)
            return
        count = min(max(1, -(-nbytes // _QUANTUM_BYTES)), _MOST_QUANTA)
        part = slowness * nbytes / count

        def onward(last: bool, first_s: float, last_s: float) -> None:
            """Let a part enter its destination while it leaves its source."""
            def passed(_: float, passed_s: float) -> None:
                if last:
                    landed(max(last_s, passed_s) + latency_s)

            if last:
                left(last_s)
            self._clock.at(first_s, partial(self._in[dest_node].carry, flow, part, passed))

        for remaining in reversed(range(count)):
            self._out[source_node].carry(flow, part, partial(onward, remaining == 0))
