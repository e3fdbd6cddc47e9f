"""What the operations of one communicator have in common."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..collectives import native
from ..collectives.operation import Tuning
from ..memory.scratch import Scratch
from ..transport.base import Channel
from .model import Model
from .windows import Windows


class OperationChannel(Channel, Protocol):
    """The channel of an operation, which counts the bytes sent on all of its lanes."""

    sent: list[int]


class Transport(native.NativeTransport, Protocol):
    """The part of the MPI transport that is used here."""

    rank: int
    size: int
    bytes_sent: int

    def channel(self, sequence: int) -> OperationChannel:
        """Return the channel of operation number `sequence`."""


@dataclass(frozen=True)
class Resources:
    """What the operations of one communicator have in common.

    Attributes:
        transport: For channels, and MPI's own collectives.
        turns: The order of native collectives.
        scratch: Where receive buffers come from.
        windows: The arrays in node-shared memory.
        order: All ranks, node after node, so that a ring leaves each node only once.
        nodes: The ranks that share a memory, for each memory, in that order.
        algorithm: What "auto" means, from the configuration.
        model: What the algorithms cost here, if it was measured.
        tuning: Lengths and counts that make the algorithms fast.
        chosen: The algorithms, or halves, of the calls made so far, with this model.
    """

    transport: Transport
    turns: native.Turns
    scratch: Scratch
    windows: Windows
    order: Sequence[int]
    nodes: Sequence[Sequence[int]]
    algorithm: str = "auto"
    model: Model | None = None
    tuning: Tuning = Tuning()
    chosen: dict[Any, Any] = field(default_factory=dict, init=False)

    @functools.cached_property
    def in_order(self) -> bool:
        """Whether the ranks are in node order as they are."""
        return tuple(self.order) == tuple(range(len(self.order)))
