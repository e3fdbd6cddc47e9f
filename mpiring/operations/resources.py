"""The resources that the operations of one communicator share."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..collectives import native
from ..collectives.operation import Tuning
from ..memory.arrays import Array
from ..memory.scratch import Scratch
from ..transport.base import Channel, Request
from .model import Model
from .windows import Windows


class OperationChannel(Channel, Protocol):
    """The channel of an operation, which counts the bytes sent on all of its lanes."""

    sent: list[int]


class Transport(Protocol):
    """The part of the MPI transport that operations need."""

    rank: int
    size: int
    bytes_sent: int

    def channel(self, sequence: int) -> OperationChannel:
        """Return the channel of operation number `sequence`."""

    def iallreduce(self, x: Array, op: str) -> Request:
        """Start MPI_Iallreduce of `x`, in place."""


@dataclass(frozen=True)
class Resources:
    """The resources that the operations of one communicator share.

    Attributes:
        turns: Order of native collectives.
        windows: Arrays in node-shared memory.
        order: All ranks, grouped by node, so that a ring leaves each node only once.
        nodes: Ranks of each node, in the same order as in `order`.
        algorithm: Algorithm that "auto" stands for, from the configuration.
        model: Measured costs of the algorithms, if there are any.
        chosen: Cache of the algorithms, or their halves, chosen for earlier calls with this model.
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
        """Whether the communicator's ranks are already in node order."""
        return tuple(self.order) == tuple(range(len(self.order)))
