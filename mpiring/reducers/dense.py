"""Averages float32 vectors between nodes as they are, for methods that need it within."""

from ..buckets.state import Wide
from ..collectives import direct
from ..memory.reduction import reduction
from ..transport.base import Schedule
from .exchange import SliceExchange


def average(exchange: SliceExchange, x: Wide) -> Schedule[None]:
    """Return the schedule that replaces `x` by its mean over ranks, in place.

    Args:
        exchange: The ranks.
        x: Shape (n,).
    """
    p = exchange.net.size
    with exchange.borrow(direct.inbox_size(x.size, p, x.itemsize), x.dtype) as inbox:
        yield from direct.allreduce(exchange.net, x, inbox, reduction("mean", x.dtype, p))
