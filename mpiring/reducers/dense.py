"""Averages float32 vectors between nodes as they are, for methods that need it within."""

from ..buckets.state import Wide
from ..collectives import direct
from ..memory.reduction import reduction
from ..transport.base import Schedule
from .exchange import Meeting


def average(meeting: Meeting, x: Wide) -> Schedule[None]:
    """Return the schedule that replaces `x` by its mean over ranks, in place.

    Args:
        meeting: The ranks.
        x: Shape (n,).
    """
    p = meeting.net.size
    with meeting.borrow(direct.inbox_size(x.size, p, x.itemsize), x.dtype) as inbox:
        yield from direct.allreduce(meeting.net, x, inbox, reduction("mean", x.dtype, p))
