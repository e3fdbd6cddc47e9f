"""All-to-all, gather and scatter: each rank is sent what is meant for it alone."""

from collections import deque
from collections.abc import Mapping

from ..gpu.vectors import copy_to
from ..memory.arrays import Array
from ..transport.base import Channel, Request, Schedule

# With how many ranks a rank exchanges at a time: one message is copied while the next travels,
# and no rank has to hold what all others send at once.
IN_FLIGHT = 4


def exchange(net: Channel, sends: Mapping[int, Array], receives: Mapping[int, Array],
             in_flight: int = IN_FLIGHT) -> Schedule[None]:
    """Send `sends[r]` to each rank r in it, and receive `receives[r]` likewise, in p-1 steps.

    In step s rank r sends to r+s and receives from r-s, so that no rank is flooded. An all-to-all
    has all ranks in both. To gather, all ranks send to `root` only; to scatter, only it sends.

    Args:
        sends: Vectors of any lengths and dtypes, by rank.
        receives: Vectors by rank, contiguous, overwritten; vector r has as many bytes as rank r
            sends to this rank.
        in_flight: Number of steps that are in flight at once.

    Raises:
        BufferMismatchError: A rank sent another number of bytes.

    Collective: yes. Blocking: no (a schedule).
    """
    p, r = net.size, net.rank
    if r in receives and receives[r] is not sends[r]:
        copy_to(receives[r], sends[r])
    under_way: deque[list[Request]] = deque()
    for s in range(1, p):
        source, dest = (r - s) % p, (r + s) % p
        step = [net.irecv(receives[source], source)] if source in receives else []
        if dest in sends:
            step.append(net.isend(sends[dest], dest))
        if step:
            under_way.append(step)
        if len(under_way) == in_flight:
            yield under_way.popleft()
    yield from under_way
