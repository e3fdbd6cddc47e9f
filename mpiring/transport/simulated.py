"""Simulates a whole cluster in one process, on a virtual clock.

No threads and no real time: an event queue, the same for the same seed. A
message costs latency plus bytes over bandwidth, and the ranks of a node share
one full-duplex network interface (NIC). With a seed the network is an
adversary: it delays and reorders whatever MPI allows it to, reads send buffers
late, and fills receive buffers with junk until the message is there.
"""

import heapq
import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ..errors import BufferMismatchError, StallError
from .base import Array, Channel, Schedule, Task


@dataclass(frozen=True)
class Lost:
    """Fault: message `index` (from 0) from `source` to `dest` is lost; it blocks its channel."""

    source: int
    dest: int
    index: int = 0


@dataclass(frozen=True)
class Dead:
    """Fault: `rank` stops for ever once it has sent `after_messages` messages."""

    rank: int
    after_messages: int = 0


@dataclass(frozen=True)
class Slow:
    """Fault: every message of `rank` takes `factor` times as long."""

    rank: int
    factor: float


Fault = Lost | Dead | Slow


@dataclass(frozen=True)
class Link:
    """A way between two ranks: seconds before the first byte, bytes per second after."""

    latency_s: float = 0.0
    bandwidth: float = math.inf


@dataclass
class _Pending:
    """A send or receive request, as the simulated rank sees it."""

    text: str
    complete: bool = False
    error: BufferMismatchError | None = None

    def test(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.complete


@dataclass
class _Message:
    array: Array
    nbytes: int
    request: _Pending
    late: bool
    arrived: bool = False


@dataclass
class _Lane:
    """All that is under way from one rank to another in one channel, in order."""

    messages: deque[_Message] = field(default_factory=deque)
    receives: deque[tuple[Array, _Pending]] = field(default_factory=deque)
    last_arrival_s: float = 0.0


@dataclass
class _Channel:
    """One rank's end of one operation; see base.Channel."""

    network: "SimulatedNetwork"
    rank: int
    size: int
    tag: int

    def isend(self, array: Array, dest: int) -> _Pending:
        return self.network._send(self, array, dest)

    def irecv(self, array: Array, source: int) -> _Pending:
        return self.network._receive(self, array, source)


class SimulatedNetwork:
    """A cluster of `size` ranks that runs schedules to their end.

    Args:
        size: Number of ranks.
        between: Link between nodes; ranks of a node share its bandwidth, each way.
        within: Link between two ranks of a node.
        ranks_per_node: Ranks r with equal `r // ranks_per_node` share a node.
        seed: Makes the network an adversary, deterministic in the seed.
        faults: What goes wrong.
        payload: False moves sizes only; give the schedules `ghost` arrays then.

    Attributes:
        time_s: Virtual seconds until the last rank finished.
        bytes_sent, messages_sent: Per rank.
    """

    def __init__(
        self, size: int, *, between: Link = Link(), within: Link = Link(),
        ranks_per_node: int = 1, seed: int | None = None, faults: Iterable[Fault] = (),
        payload: bool = True,
    ) -> None:
        self.size = size
        self.time_s = 0.0
        self.bytes_sent = [0] * size
        self.messages_sent = [0] * size
        self._between, self._within = between, within
        self._ranks_per_node = ranks_per_node
        self._random = None if seed is None else random.Random(seed)
        self._payload = payload
        self._lost = {(f.source, f.dest, f.index) for f in faults if isinstance(f, Lost)}
        self._dies = {f.rank: f.after_messages for f in faults if isinstance(f, Dead)}
        self._slow = {f.rank: f.factor for f in faults if isinstance(f, Slow)}
        self._sent_to: dict[tuple[int, int], int] = defaultdict(int)
        self._lanes: dict[tuple[int, int, int], _Lane] = defaultdict(_Lane)
        self._out_free_s: dict[int, float] = defaultdict(float)
        self._in_free_s: dict[int, float] = defaultdict(float)
        self._events: list[tuple[float, float, int, int, Callable[[], None]]] = []
        self._count = 0
        self._tasks: list[list[Task[Any]]] = [[] for _ in range(size)]
        self._errors: dict[int, Exception] = {}

    def run(
        self, *programs: Callable[[Channel], Schedule[Any]], return_errors: bool = False,
    ) -> list[Any]:
        """Run programs on all ranks at once, each program in its own channel.

        Args:
            programs: Each is called once per rank with its channel, and returns a schedule.
            return_errors: Put a rank's error in place of its result instead of raising it.

        Returns:
            Per rank, the result of its schedule, or a list of them for several programs.

        Raises:
            StallError: The schedules wait for messages that never come; says who
                waits for what.
        """
        for rank in range(self.size):
            for tag, program in enumerate(programs):
                channel = _Channel(self, rank, self.size, tag)
                self._tasks[rank].append(Task(program(channel)))
            self._at(self.time_s, rank, lambda: None)
        while self._events:
            self.time_s, _, _, rank, action = heapq.heappop(self._events)
            action()
            self._resume(rank)
        waits = [self._waits(rank) for rank in range(self.size)]
        stall = StallError("; ".join(text for text in waits if text))
        results = [self._outcome(rank, stall) for rank in range(self.size)]
        self._tasks, self._errors = [[] for _ in range(self.size)], {}
        failed = [result for result in results if isinstance(result, Exception)]
        if failed and not return_errors:
            # A rank's own error explains the stall of the others.
            raise min(failed, key=lambda error: isinstance(error, StallError))
        return results

    def _outcome(self, rank: int, stall: StallError) -> Any:
        tasks = self._tasks[rank]
        if rank in self._errors:
            return self._errors[rank]
        if not all(task.done for task in tasks):
            return stall
        return tasks[0].result if len(tasks) == 1 else [task.result for task in tasks]

    def _waits(self, rank: int) -> str:
        """Say what keeps a rank from finishing; empty if nothing does."""
        tasks = self._tasks[rank]
        if all(task.done for task in tasks) or rank in self._errors:
            return ""
        if self._is_dead(rank):
            return f"rank {rank} is dead"
        waits = [getattr(request, "text", repr(request))
                 for task in tasks for request in task.pending if not request.test()]
        return f"rank {rank} waits for {', '.join(waits)}"

    def _at(self, time_s: float, rank: int, action: Callable[[], None]) -> None:
        """Do `action` at a virtual time, then look at what `rank` can go on with."""
        self._count += 1
        shuffle = self._random.random() if self._random else 0.0
        heapq.heappush(self._events, (time_s, shuffle, self._count, rank, action))

    def _is_dead(self, rank: int) -> bool:
        return rank in self._dies and self.messages_sent[rank] >= self._dies[rank]

    def _resume(self, rank: int) -> None:
        for task in self._tasks[rank]:
            if self._is_dead(rank) or rank in self._errors:
                return
            try:
                task.step()
            except Exception as error:
                self._errors[rank] = error

    def _send(self, channel: _Channel, array: Array, dest: int) -> _Pending:
        source, nbytes = channel.rank, array.nbytes
        request = _Pending(f"a send of {nbytes} bytes to rank {dest} (channel {channel.tag})")
        if self._is_dead(source):
            return request
        index = self._sent_to[source, dest]
        self._sent_to[source, dest] += 1
        self.messages_sent[source] += 1
        self.bytes_sent[source] += nbytes
        # An adversary may read the buffer only when the receiver is ready: a
        # schedule must neither change it early nor rely on MPI to keep a copy.
        late = self._random is not None and self._random.random() < 0.5
        content = array if late or not self._payload else array.copy()
        message = _Message(content, nbytes, request, late)
        left_s, arrival_s = self._price(source, dest, nbytes)
        lane = self._lanes[source, dest, channel.tag]
        lane.messages.append(message)
        # A lost message blocks its lane: MPI lets no later one overtake it.
        if (source, dest, index) not in self._lost:
            arrival_s = lane.last_arrival_s = max(arrival_s, lane.last_arrival_s)
            self._at(arrival_s, dest, lambda: self._arrive(lane, message, source))
        if not late:
            self._complete(request, source, left_s)
        return request

    def _price(self, source: int, dest: int, nbytes: int) -> tuple[float, float]:
        """Return when the last byte has left `source`, and when it is at `dest`."""
        factor = self._slow.get(source, 1.0)
        here, there = source // self._ranks_per_node, dest // self._ranks_per_node
        if here == there:
            left_s = self.time_s + factor * nbytes / self._within.bandwidth
            arrival_s = left_s + factor * self._within.latency_s
        else:
            wire_s = factor * nbytes / self._between.bandwidth
            start_s = max(self.time_s, self._out_free_s[here])
            left_s = self._out_free_s[here] = start_s + wire_s
            landed_s = max(start_s, self._in_free_s[there]) + wire_s
            self._in_free_s[there] = landed_s
            arrival_s = landed_s + factor * self._between.latency_s
        if self._random:
            arrival_s += self._random.choice((0.0, self._random.expovariate(1.0)))
        return left_s, arrival_s

    def _complete(self, request: _Pending, rank: int, time_s: float) -> None:
        self._at(time_s, rank, lambda: setattr(request, "complete", True))

    def _receive(self, channel: _Channel, array: Array, source: int) -> _Pending:
        request = _Pending(f"{array.nbytes} bytes from rank {source} (channel {channel.tag})")
        if self._random and self._payload:
            array.view(np.uint8)[...] = self._random.randrange(256)
        lane = self._lanes[source, channel.rank, channel.tag]
        lane.receives.append((array, request))
        self._match(lane, source, channel.rank)
        return request

    def _arrive(self, lane: _Lane, message: _Message, source: int) -> None:
        message.arrived = True
        self._match(lane, source, None)

    def _match(self, lane: _Lane, source: int, dest: int | None) -> None:
        """Hand arrived messages to posted receives, both strictly in order."""
        while lane.receives and lane.messages and lane.messages[0].arrived:
            (array, request), message = lane.receives.popleft(), lane.messages.popleft()
            if array.nbytes != message.nbytes:
                request.error = BufferMismatchError(
                    f"expected {array.nbytes} bytes from rank {source}, got {message.nbytes}")
            elif self._payload:
                array.view(np.uint8)[...] = message.array.view(np.uint8)
            request.complete = True
            if message.late:
                self._complete(message.request, source, self.time_s)
            if dest is not None:
                self._at(self.time_s, dest, lambda: None)


def ghost(n: int, dtype: DTypeLike) -> Array:
    """Return a vector of `n` elements without memory, for a network without payload."""
    return np.broadcast_to(np.empty((), dtype), (n,))


class NoCombine:
    """A `Combine` that does nothing, for a network without payload."""

    def prepare(self, x: Array) -> None:
        """Do nothing."""

    def accumulate(self, out: Array, contribution: Array) -> None:
        """Do nothing."""

    def finish(self, chunk: Array) -> None:
        """Do nothing."""
