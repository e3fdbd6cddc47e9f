"""A complete cluster, simulated in one process on a virtual clock.

It needs neither threads nor real time: an event queue gives the same result for the same seed. A
message costs latency plus bytes over bandwidth. Messages that share a node's full-duplex network
interface (NIC) share its bandwidth. Computing takes time if it has a price: a busy rank neither
posts requests nor continues. With a seed, the network is an adversary: it delays and reorders
whatever MPI allows, reads send buffers late, and fills receive buffers with junk until the message
arrives.
"""

import heapq
import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from .. import BufferMismatchError, ConfigError, StallError
from ..provisional import Array, Channel, Schedule, transport
from .prices import Computing, Cores, Link


@dataclass(frozen=True)
class Lost:
    """Fault: message `index` (from 0) from `source` to `dest` is lost, and blocks its channel."""

    source: int
    dest: int
    index: int = 0


@dataclass(frozen=True)
class Dead:
    """Fault: `rank` stops forever once it has sent `after_messages` messages."""

    rank: int
    after_messages: int = 0


@dataclass(frozen=True)
class Slow:
    """Fault: every message of `rank` takes `factor` times as long."""

    rank: int
    factor: float


Fault = Lost | Dead | Slow
# Length of the parts in which messages are sent, and their largest number. TCP's parts are smaller,
# but would take longer to simulate, and change little.
_QUANTUM_BYTES = 256 << 10
_MAX_QUANTA = 16
# Chunks that SymmetricNetwork assumes to be equal may differ by an element of this many bytes.
_LONGEST_ELEMENT = 32


@dataclass
class _Pending:
    """A send or receive request of a simulated rank."""

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
    """All messages in flight from one rank to another in one lane of a channel, in order."""

    messages: deque[_Message] = field(default_factory=deque)
    receives: deque[tuple[Array, _Pending]] = field(default_factory=deque)
    last_arrival_s: float = 0.0


@dataclass
class _Channel:
    """One rank's end of one lane of an operation; see base.Channel."""

    network: "SimulatedNetwork"
    rank: int
    size: int
    tag: int
    index: int = 0

    def __str__(self) -> str:
        return f"channel {self.tag}{f', lane {self.index}' * bool(self.index)}"

    @property
    def ranks(self) -> Sequence[int]:
        return range(self.size)

    def lane(self, index: int) -> "_Channel":
        if not 0 <= index < transport.LANES:
            raise ConfigError(
                f"rank {self.rank}: lane {index}: expected 0 to {transport.LANES - 1}")
        return replace(self, index=index)

    def isend(self, array: Array, dest: int) -> _Pending:
        return self.network._send(self, array, dest)

    def irecv(self, array: Array, source: int) -> _Pending:
        return self.network._receive(self, array, source)


# Ranks at the ends of messages that stay in order.
_Flow = tuple[int, int]
# Function of the times at which the first and the last byte pass.
_Passed = Callable[[float, float], None]


class _Interface:
    """One direction of a node's network interface (NIC), which flows share by taking turns."""

    def __init__(self, link: Link, clock: "SimulatedNetwork") -> None:
        self._link, self._clock = link, clock
        self._burst_s = link.burst_bytes / link.bandwidth
        self._free_s = -math.inf
        self._flows: dict[_Flow, deque[tuple[float, _Passed]]] = {}
        self._is_serving = False

    def carry(self, flow: _Flow, nbytes: float, passed: _Passed) -> None:
        """Accept bytes that arrive now, behind those of the same flow."""
        self._flows.setdefault(flow, deque()).append((nbytes, passed))
        if not self._is_serving:
            self._serve()

    def _serve(self) -> None:
        """Pass all bytes that can pass now, with flows in turn; continue when they have passed."""
        now_s, self._is_serving = self._clock.time_s, True
        while self._flows and self._free_s <= now_s:
            flow = next(iter(self._flows))
            waiting = self._flows.pop(flow)
            nbytes, passed = waiting.popleft()
            if waiting:
                self._flows[flow] = waiting
            start_s = max(now_s - self._burst_s, self._free_s)
            self._free_s = start_s + nbytes / self._link.bandwidth
            passed(max(now_s, start_s), max(now_s, self._free_s))
        self._is_serving = bool(self._flows)
        if self._flows:
            self._clock.at(self._free_s, self._serve)


class _Wires:
    """The interfaces of all nodes; messages share them like TCP streams do."""

    def __init__(self, link: Link, clock: "SimulatedNetwork") -> None:
        self._link, self._clock = link, clock
        self._out: dict[int, _Interface] = defaultdict(lambda: _Interface(link, clock))
        self._in: dict[int, _Interface] = defaultdict(lambda: _Interface(link, clock))

    def carry(self, flow: _Flow, source_node: int, dest_node: int, nbytes: int, slowness: float,
              left: Callable[[float], None], landed: Callable[[float], None]) -> None:
        """Carry a message from one node to another; messages of a flow stay in order.

        All times are multiplied by `slowness`. The functions `left` and `landed` get the times at
        which the last byte has left and has arrived.
        """
        latency_s = slowness * self._link.latency_s
        if self._link.bandwidth == math.inf:
            # There is no bandwidth to share. Most adversarial networks use this shortcut.
            left(self._clock.time_s)
            landed(self._clock.time_s + latency_s)
            return
        count = min(max(1, -(-nbytes // _QUANTUM_BYTES)), _MAX_QUANTA)
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


class SimulatedNetwork:
    """A cluster of `size` ranks that runs schedules to their end.

    Args:
        between: Link between nodes; ranks of a node share its bandwidth in each direction.
        within: Link between two ranks of a node.
        node_of: Node of each rank; or a number n, so that ranks r with equal `r // n` share a node.
        seed: Seed that makes the network a deterministic adversary; None for an ordinary network.
        payload: If false, move only sizes; then pass `ghost` arrays to the schedules.

    Attributes:
        node_of: Node of each rank.
        stepped: Ranks whose schedules are run; here, all ranks.
        slack_bytes: Largest accepted difference from a message's expected length.
        time_s: Virtual time until the last rank has finished, in seconds.
        bytes_sent, messages_sent: Number of bytes and messages that each rank has sent.
        bytes_between: Number of bytes that each node has sent to other nodes, by node.
    """

    def __init__(
        self, size: int, *, between: Link = Link(), within: Link = Link(),
        node_of: int | Sequence[int] = 1, computing: Computing = Computing(),
        seed: int | None = None, faults: Iterable[Fault] = (), payload: bool = True,
    ) -> None:
        self.size = size
        self.stepped = range(size)
        self.slack_bytes = 0
        self.time_s = 0.0
        self.bytes_sent = [0] * size
        self.messages_sent = [0] * size
        self._within = within
        self._overhead_s, self._copy_rate = computing.overhead_s, computing.copy_rate
        self.node_of = ([rank // node_of for rank in range(size)] if isinstance(node_of, int)
                        else node_of)
        self.bytes_between = dict.fromkeys(self.node_of, 0)
        self._random = None if seed is None else random.Random(seed)
        self._payload = payload
        self._lost = {(f.source, f.dest, f.index) for f in faults if isinstance(f, Lost)}
        self._dies = {f.rank: f.after_messages for f in faults if isinstance(f, Dead)}
        self._slow = {f.rank: f.factor for f in faults if isinstance(f, Slow)}
        self._sent_to: dict[tuple[int, int], int] = defaultdict(int)
        self._lanes: dict[tuple[int, int, int, int], _Lane] = defaultdict(_Lane)
        self._wires = _Wires(between, self)
        self._cores = Cores(computing.cores) if computing.cores else None
        self._busy_until_s: dict[int, float] = defaultdict(float)
        self._to_wake: set[int] = set()
        self._events: list[tuple[float, float, int, int | None, Callable[[], None]]] = []
        self._count = 0
        self._tasks: list[list[transport.Task[Any]]] = [[] for _ in range(size)]
        self._errors: dict[int, Exception] = {}

    def run(
        self, *programs: Callable[[Channel], Schedule[Any]], return_errors: bool = False,
    ) -> list[Any]:
        """Run programs on all ranks at once, each program in its own channel.

        Return the result of each rank's schedule; for several programs, a list of results per rank.

        Args:
            programs: Functions that return a schedule; each is called once per rank with its
                channel.
            return_errors: If true, return a rank's error as its result instead of raising it.

        Raises:
            StallError: The schedules wait for messages that never arrive; says which ranks wait for
                which messages.
        """
        for rank in self.stepped:
            for tag, program in enumerate(programs):
                channel = _Channel(self, rank, self.size, tag)
                self._tasks[rank].append(transport.Task(program(channel)))
            self.at(self.time_s, lambda: None, rank)
        while self._events:
            self.time_s, _, _, waking, action = heapq.heappop(self._events)
            action()
            if waking is not None:
                self._resume(waking)
        self.time_s = max(self.time_s, *self._busy_until_s.values(), 0.0)
        waits = [self._waits(rank) for rank in self.stepped]
        stall = StallError("; ".join(text for text in waits if text))
        results = [self._outcome(rank, stall) for rank in self.stepped]
        self._tasks, self._errors = [[] for _ in range(self.size)], {}
        failed = [result for result in results if isinstance(result, Exception)]
        if failed and not return_errors:
            # A rank's error explains the stall of other ranks.
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
        """Return a description of what a rank waits for; "" if it has finished."""
        tasks = self._tasks[rank]
        if all(task.done for task in tasks) or rank in self._errors:
            return ""
        if self._is_dead(rank):
            return f"rank {rank} is dead"
        waits = [getattr(request, "text", repr(request))
                 for task in tasks for request in task.pending if not request.test()]
        return f"rank {rank} waits for {', '.join(waits)}"

    def at(self, time_s: float, action: Callable[[], None], rank: int | None = None) -> None:
        """Do `action` at a virtual time, then resume `rank`, if given, as far as possible."""
        self._count += 1
        shuffle = self._random.random() if self._random and rank is not None else 0.0
        heapq.heappush(self._events, (time_s, shuffle, self._count, rank, action))

    def work(self, rank: int, seconds: float, *, on_own_core: bool = False) -> None:
        """Keep a rank busy: it sends messages and continues only after this work.

        With `on_own_core`, and if ranks share cores, the work waits for the rank's own core, like a
        long computation, which stays on its core.
        """
        now_s = self.clock_s(rank)
        self._busy_until_s[rank] = (
            self._cores.take(now_s, seconds, rank if on_own_core else None)
            if self._cores and seconds else now_s + seconds)

    def worked(self, rank: int, at_s: float = 0.0) -> transport.Request:
        """Return a request that is complete when a rank's current work is done, but not before."""
        request = _Pending("the end of its own work")
        self._complete(request, rank, max(at_s, self.clock_s(rank)))
        return request

    def clock_s(self, rank: int) -> float:
        """Return a rank's virtual time, which is ahead of the network's while it computes."""
        return max(self.time_s, self._busy_until_s[rank])

    def later(self, delay_s: float, rank: int, action: Callable[[], None]) -> None:
        """Do `action` on a rank after a virtual time; an adversary waits longer."""
        self.at(self.time_s + delay_s + self._delay_s(), action, rank)

    def _is_dead(self, rank: int) -> bool:
        return rank in self._dies and self.messages_sent[rank] >= self._dies[rank]

    def _resume(self, rank: int) -> None:
        for task in self._tasks[rank]:
            if self.clock_s(rank) > self.time_s:
                return self._wake(rank)
            if self._is_dead(rank) or rank in self._errors:
                return
            try:
                task.step()
            except Exception as error:
                self._errors[rank] = error

    def _wake(self, rank: int) -> None:
        """Resume a busy rank once, after its work, however many events occur meanwhile."""
        if rank not in self._to_wake:
            self._to_wake.add(rank)
            self.at(self.clock_s(rank), lambda: self._to_wake.discard(rank), rank)

    def _send(self, channel: _Channel, array: Array, dest: int) -> _Pending:
        source, nbytes = channel.rank, array.nbytes
        request = _Pending(f"a send of {nbytes} bytes to rank {dest} ({channel})")
        if self._is_dead(source):
            return request
        index = self._sent_to[source, dest]
        self._sent_to[source, dest] += 1
        self.messages_sent[source] += 1
        self.bytes_sent[source] += nbytes
        # An adversary may read the buffer only when the receiver is ready. A schedule must
        # neither change it early nor rely on MPI to keep a copy.
        late = self._random is not None and self._random.random() < 0.5
        content = array if late or not self._payload else array.copy()
        message = _Message(content, nbytes, request, late)
        lost = (source, dest, index) in self._lost
        self.work(source, self._overhead_s)
        if self.clock_s(source) > self.time_s:
            self.at(self.clock_s(source), lambda: self._depart(channel, message, dest, lost),
                    source)
        else:
            self._depart(channel, message, dest, lost)
        return request

    def _depart(self, channel: _Channel, message: _Message, dest: int, lost: bool) -> None:
        """Send a message through the network; handle its departure and its arrival."""
        source_node, dest_node = self.node_of[channel.rank], self.node_of[dest]
        source, to = self._received(channel.rank, dest)
        lane = self._lanes[source, to, channel.tag, channel.index]
        lane.messages.append(message)
        copying_s = message.nbytes / self._copy_rate

        def left(time_s: float) -> None:
            if not message.late:
                self._complete(message.request, channel.rank, time_s)

        def landed(time_s: float) -> None:
            # A lost message blocks its lane: MPI lets no later message overtake it.
            if not lost:
                lane.last_arrival_s = max(time_s + self._delay_s(), lane.last_arrival_s)
                if source_node != dest_node:
                    self.at(lane.last_arrival_s, lambda: self.work(to, copying_s), to)
                self.at(lane.last_arrival_s, lambda: self._arrive(lane, message, source), to)

        factor = self._slow.get(channel.rank, 1.0)
        if source_node == dest_node:
            # A message within a node is a copy made by its sender.
            self.work(channel.rank, factor * message.nbytes / self._within.bandwidth)
            left_s = self.clock_s(channel.rank)
            left(left_s)
            landed(left_s + factor * self._within.latency_s)
        else:
            self.bytes_between[source_node] += message.nbytes
            self._wires.carry((channel.rank, dest), source_node, self.node_of[to], message.nbytes,
                              factor, left, landed)
            # The sender makes its copy while the message departs.
            self.work(channel.rank, copying_s)

    def _received(self, source: int, dest: int) -> tuple[int, int]:
        """Return the sender and the receiver of a message, as seen by the simulated ranks."""
        return source, dest

    def _delay_s(self) -> float:
        """Return an adversary's delay."""
        if self._random is None:
            return 0.0
        return self._random.choice((0.0, self._random.expovariate(1.0)))

    def _complete(self, request: _Pending, rank: int, time_s: float) -> None:
        self.at(time_s, partial(setattr, request, "complete", True), rank)

    def _receive(self, channel: _Channel, array: Array, source: int) -> _Pending:
        request = _Pending(f"{array.nbytes} bytes from rank {source} ({channel})")
        self.work(channel.rank, self._overhead_s)
        if self._random and self._payload:
            array.view(np.uint8)[...] = self._random.randrange(256)
        lane = self._lanes[source, channel.rank, channel.tag, channel.index]
        lane.receives.append((array, request))
        self._match(lane, source, channel.rank)
        return request

    def _arrive(self, lane: _Lane, message: _Message, source: int) -> None:
        message.arrived = True
        self._match(lane, source, None)

    def _match(self, lane: _Lane, source: int, dest: int | None) -> None:
        """Match arrived messages with posted receives, both strictly in order."""
        while lane.receives and lane.messages and lane.messages[0].arrived:
            (array, request), message = lane.receives.popleft(), lane.messages.popleft()
            if abs(array.nbytes - message.nbytes) > self.slack_bytes:
                request.error = BufferMismatchError(
                    f"expected {array.nbytes} bytes from rank {source}, got {message.nbytes}")
            elif self._payload:
                array.view(np.uint8)[...] = message.array.view(np.uint8)
            request.complete = True
            if message.late:
                self._complete(message.request, source, self.time_s)
            if dest is not None:
                self.at(self.time_s, lambda: None, dest)


def cyclic(node: int, nodes: int) -> int:
    """Return the opposite node, which sends to node 0 when node 0 sends to `node`."""
    return -node % nodes


def pairwise(node: int, nodes: int) -> int:
    """Return the same node, for nodes that exchange in pairs, as in recursive doubling."""
    return node


class SymmetricNetwork(SimulatedNetwork):
    """A cluster of which only the ranks of node 0 run, because all nodes do the same at once.

    A message to another node arrives as the message that the opposite node sends to node 0. Chunks
    are assumed to be equal, although they may differ by an element. The network carries no data,
    and cannot run a schedule that treats nodes differently.

    The symmetry, `cyclic` or `pairwise`, returns the opposite node. The prices are arguments of
    SimulatedNetwork.
    """

    def __init__(self, nodes: int, ranks_per_node: int, symmetry: Callable[[int, int], int],
                 **prices: Any) -> None:
        super().__init__(nodes * ranks_per_node, node_of=ranks_per_node, payload=False,
                         **prices)
        self.stepped = range(ranks_per_node)
        self.slack_bytes = _LONGEST_ELEMENT
        self._nodes, self._symmetry = nodes, symmetry

    def _received(self, source: int, dest: int) -> tuple[int, int]:
        node, local = divmod(dest, len(self.stepped))
        return self._symmetry(node, self._nodes) * len(self.stepped) + source, local
