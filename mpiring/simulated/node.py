"""The memory that ranks of a simulated node share: slots, notes and barriers; see base.Node."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..transport.base import Array, Schedule
from .network import SimulatedNetwork


class _Barrier:
    """A barrier, for one rank."""

    def __init__(self, text: str, arrival_s: float) -> None:
        self.text = text
        self.arrival_s = arrival_s
        self.complete = False

    def test(self) -> bool:
        return self.complete


class SimulatedMemory:
    """The shared memory of all nodes of a simulated cluster.

    With a seed in the network, each rank learns late that the others have arrived,
    and slots hold junk at first.

    Args:
        network: Its clock and its nodes.
        barrier_s: Virtual seconds from the last arrival to the end of a barrier.
        slot_bytes: Length of a slot.
    """

    def __init__(self, network: SimulatedNetwork, *, barrier_s: float = 0.0,
                 slot_bytes: int = 512) -> None:
        self.network = network
        self.barrier_s = barrier_s
        self.slot_bytes = slot_bytes
        self.members: dict[int, list[int]] = defaultdict(list)
        for rank, node in enumerate(network.node_of):
            self.members[node].append(rank)
        self.slots: dict[Any, Array] = {}
        self.waiting: dict[Any, dict[int, tuple[_Barrier, tuple[int, ...]]]] = defaultdict(dict)

    def node(self, rank: int, operation: int = 0, header: bytes = b"") -> "SimulatedNode":
        """Return the meeting place of a rank's operation.

        Args:
            rank: In the network.
            operation: Any number that tells operations apart.
            header: Of the rank's call.
        """
        return SimulatedNode(self, rank, operation, header)


class SimulatedNode:
    """One operation's meeting place of the ranks of a simulated node; see base.Node."""

    def __init__(self, memory: SimulatedMemory, rank: int, operation: object,
                 header: bytes) -> None:
        self._memory = memory
        self._node = memory.network.node_of[rank]
        self.ranks: Sequence[int] = memory.members[self._node]
        self.rank, self.size = self.ranks.index(rank), len(self.ranks)
        self.met = False
        self._operation = operation
        self._header = header
        self._count = 0
        self._lanes: dict[int, SimulatedNode] = {}
        self._notes: list[tuple[int, ...]] = []

    def test(self) -> bool:
        """Return True: an operation has memory of its own."""
        return True

    def slots(self, dtype: np.dtype[Any], size: int | None = None) -> Sequence[Array]:
        """Return, per rank of the node, its staging slot, which all of them read and write."""
        memory = self._memory
        return [memory.slots.setdefault(
            (self._node, self._operation, rank), np.full(memory.slot_bytes, 255, np.uint8),
        ).view(dtype)[:size] for rank in range(self.size)]

    def barrier(self, *numbers: int) -> _Barrier:
        """Arrive; the request is complete once every rank of the node has."""
        memory, network = self._memory, self._memory.network
        self._count += 1
        self.met = True
        arrival_s = network.clock_s(self.ranks[self.rank])
        mine = _Barrier(f"barrier {self._count} of node {self._node}", arrival_s)
        arrived = memory.waiting[self._node, self._operation, self._count]
        arrived[self.rank] = mine, (*self._header, *numbers)
        if len(arrived) == self.size:
            last_s = max(barrier.arrival_s for barrier, _ in arrived.values())
            for rank, (barrier, _) in arrived.items():
                network.later(last_s - network.time_s + memory.barrier_s,
                              self.ranks[rank], barrier)
        return mine

    def share(self, *numbers: int) -> Schedule[list[tuple[int, ...]]]:
        """Arrive, and return per rank the numbers that each has passed."""
        yield (self.barrier(*numbers),)
        return [note[len(self._header):] for note in self._all_notes()]

    def _all_notes(self) -> list[tuple[int, ...]]:
        arrived = self._memory.waiting[self._node, self._operation, self._count]
        return [arrived[rank][1] for rank in range(self.size)]

    def agrees(self) -> bool:
        """Return whether all ranks made the same call; after the first barrier."""
        return all(header == self._header for _, header in self.headers())

    def headers(self) -> Sequence[tuple[int, bytes]]:
        """Return the other ranks and their headers; after the first barrier."""
        length = len(self._header)
        return [(self.ranks[rank], bytes(note[:length]))
                for rank, note in enumerate(self._all_notes()) if rank != self.rank]

    def leave(self) -> None:
        """Do nothing: the memory is never used again."""

    def lane(self, index: int) -> "SimulatedNode":
        """Return a further meeting place of the same operation."""
        if index not in self._lanes:
            self._lanes[index] = SimulatedNode(
                self._memory, self.ranks[self.rank], (self._operation, index), b"")
        return self._lanes[index]
