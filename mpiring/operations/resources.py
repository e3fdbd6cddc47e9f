"""The resources that the operations of one communicator share."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from ..collectives import native
from ..collectives.operation import Tuning
from ..memory.scratch import Scratch
from ..transport.base import Channel
from ..transport.windows import Windows
from .model import Model

if TYPE_CHECKING:
    from ..transport.mpi import MpiTransport


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

    transport: "MpiTransport"
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


class _Channel:
    """A network of one operation, without MPI's own collectives."""

    bytes_sent = 0

    def __init__(self, net: Channel) -> None:
        self.rank, self.size = net.rank, net.size
        self._net = net

    def channel(self, sequence: int) -> Channel:
        return self._net


def alone(net: Channel, nodes: Sequence[Sequence[int]], windows: Windows | None = None, *,
          order: Sequence[int] | None = None, **settings: Any) -> Resources:
    """Return the resources of a single operation on a channel, as on a simulated network.

    By default, the order is that of the ranks. The `settings` are `algorithm` and `tuning`.
    """
    return Resources(cast("MpiTransport", _Channel(net)), native.Turns(), Scratch(keep=2),
                     windows or Windows(), order or range(net.size), nodes, **settings)
