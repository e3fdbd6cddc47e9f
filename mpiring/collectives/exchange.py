"""All-to-all, gather and scatter: each rank receives its own data from the others."""

from collections import deque
from collections.abc import Mapping

from ..gpu.vectors import copy_to
from ..memory.arrays import Array
from ..transport.base import Channel, Request, Schedule

# Number of ranks with which a rank exchanges at a time. It copies one message while the next is on
# the wire, and never holds the messages of all ranks at once.
IN_FLIGHT = 4


def exchange(net: Channel, sends: Mapping[int, Array], receives: Mapping[int, Array],
             in_flight: int = IN_FLIGHT) -> Schedule[None]:
    """Send `sends[r]` to rank r, and receive `receives[r]` from it, for each entry, in p-1 steps.

    In step s rank r sends to r+s and receives from r-s, so that no rank is flooded. In an
    all-to-all both dicts contain all ranks. In a gather all ranks send to `root` only. In a scatter
    only `root` sends. Vectors may have any lengths and dtypes.

    Raises:
        BufferMismatchError: A rank sent a different number of bytes.
    """
    p, r = net.size, net.rank
    if r in receives and receives[r] is not sends[r]:
        copy_to(receives[r], sends[r])
    pending: deque[list[Request]] = deque()
    for s in range(1, p):
        source, dest = (r - s) % p, (r + s) % p
        step = [net.irecv(receives[source], source)] if source in receives else []
        if dest in sends:
            step.append(net.isend(sends[dest], dest))
        if step:
            pending.append(step)
        if len(pending) == in_flight:
            yield pending.popleft()
    yield from pending
