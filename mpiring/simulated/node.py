"""The shared memory of a simulated node: words and slots as in NodeMemory, visible with delay."""

import zlib
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ..provisional import Array, transport
from .network import SimulatedNetwork


class SimulatedMemory:
    """The shared memory of all nodes of a simulated cluster.

    With a seed in the network, each rank sees the flags of other ranks late. It sees everything
    else at once, including data that is written too early. Slots contain junk at first. A published
    flag becomes visible after `barrier_s` of virtual time.
    """

    def __init__(self, network: SimulatedNetwork, *, barrier_s: float = 0.0,
                 slot_bytes: int = 512) -> None:
        self.network = network
        self.barrier_s = barrier_s
        self.slot_bytes = slot_bytes
        self.members: dict[int, list[int]] = defaultdict(list)
        for rank, node in enumerate(network.node_of):
            self.members[node].append(rank)
        # Words, headers and slots (by area) that all ranks have written.
        self.words: list[dict[int, int]] = [{} for _ in network.node_of]
        self.texts = [_Texts() for _ in network.node_of]
        self.slots: dict[tuple[int, int], Array] = {}
        self.ranks = [_RankMemory(self, rank) for rank in range(len(network.node_of))]

    def node(self, rank: int, operation: int = 0, header: bytes = b"") -> transport.SharedNode:
        """Return the node object of a rank's operation."""
        return self.ranks[rank].node(operation, header, zlib.crc32(header))


class _RankMemory(transport.NodeMemory):
    """The memory of a simulated node, as one rank sees it."""

    def __init__(self, shared: SimulatedMemory, rank: int) -> None:
        ranks = shared.members[shared.network.node_of[rank]]
        self._shared = shared
        super().__init__((), ranks.index(rank), ranks, transport.Counter())
        self.words: Any = [_Words(shared, other, rank) for other in ranks]
        self.texts: Any = [shared.texts[other] for other in ranks]
        self.others = [words for words in self.words if words.owner != rank]

    def slots(self, area: int, dtype: "np.dtype[Any]", size: int | None) -> Sequence[Array]:
        """Return the first `size` elements of an area's slot, per rank."""
        return [self._shared.slots.setdefault(
            (rank, area), np.full(self._shared.slot_bytes, 255, np.uint8)).view(dtype)[:size]
            for rank in self.ranks]


class _Words:
    """The words of one rank's segment, as seen by another rank."""

    def __init__(self, shared: SimulatedMemory, owner: int, reader: int) -> None:
        self.owner, self._reader, self._shared = owner, reader, shared
        self._written = shared.words[owner]
        self.flags: dict[int, int] = {}

    def __getitem__(self, word: Any) -> Any:
        if isinstance(word, slice):
            return [self._written.get(at, 0) for at in range(word.start, word.stop)]
        flags = self.flags if _is_flag(word) and self.owner != self._reader else self._written
        return flags.get(word, 0)

    def __setitem__(self, word: int, value: int) -> None:
        self._written[word] = value
        if _is_flag(word):
            shared, network = self._shared, self._shared.network
            delay_s = network.clock_s(self.owner) - network.time_s + shared.barrier_s
            owner = shared.ranks[self.owner]
            for reader in owner.ranks:
                if reader != self.owner:
                    flags = shared.ranks[reader].words[owner.rank].flags
                    network.later(delay_s, reader, partial(_show, flags, word, value))


def _show(flags: dict[int, int], word: int, value: int) -> None:
    """Make a flag visible to a rank."""
    # The later of two flags of a rank may become visible first.
    flags[word] = max(value, flags.get(word, 0))


class _Texts(dict[Any, bytes]):
    """The headers of a rank's operations, by their offset."""

    def __getitem__(self, part: slice) -> bytes:
        return self.get(part.start, b"")

    def __setitem__(self, part: slice, text: bytes) -> None:
        super().__setitem__(part.start, text)


def _is_flag(word: int) -> bool:
    place = word % transport.AREA_WORDS
    return (word < transport.AREAS * transport.AREA_WORDS and place < transport.HEADER_WORD
            and place % transport.LANE_WORDS == 0)
