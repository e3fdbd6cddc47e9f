"""All-to-all, gather and scatter: each rank is sent what is meant for it alone."""

from collections import deque
from collections.abc import Iterable, Sequence

from ..gpu.vectors import copy_to
from ..memory.arrays import Array
from ..transport.base import Channel, Request, Schedule

# With how many ranks a rank exchanges at a time: one message is copied while the next travels,
# and no rank has to hold what all others send at once.
IN_FLIGHT = 4


def all_to_all(
    net: Channel, sends: Sequence[Array], receives: Sequence[Array], in_flight: int = IN_FLIGHT,
) -> Schedule[None]:
    """Send `sends[r]` to rank r, and receive `receives[r]` from it, pairwise, in p-1 steps.

    In step s rank r sends to r+s and receives from r-s, so that no rank is flooded.

    Args:
        sends: p vectors of any lengths and dtypes.
        receives: p vectors, contiguous, overwritten; vector r has as many bytes as rank r
            sends to this rank.
        in_flight: So many steps are under way at once.

    Raises:
        BufferMismatchError: A rank sent another number of bytes.

    Collective: yes. Blocking: no (a schedule).
    """
    p, r = net.size, net.rank
    copy_to(receives[r], sends[r])
    yield from _a_few_at_once(in_flight, (
        (net.irecv(receives[(r - s) % p], (r - s) % p), net.isend(sends[(r + s) % p], (r + s) % p))
        for s in range(1, p)))


def gather(
    net: Channel, vector: Array, parts: Sequence[Array], root: int, in_flight: int = IN_FLIGHT,
) -> Schedule[None]:
    """Copy `vector` of every rank r to `parts[r]` of rank `root`.

    Args:
        vector: Contiguous.
        parts: On `root`, p vectors, contiguous, each as long as what its rank sends; they
            are overwritten. Ignored elsewhere.
        root: The rank that receives.
        in_flight: From so many ranks it receives at once.

    Raises:
        BufferMismatchError: A rank sent another number of bytes.

    Collective: yes. Blocking: no (a schedule).
    """
    p, r = net.size, net.rank
    if r != root:
        yield (net.isend(vector, root),)
        return
    if parts[r] is not vector:
        copy_to(parts[r], vector)
    yield from _a_few_at_once(in_flight, (
        (net.irecv(parts[(r + s) % p], (r + s) % p),) for s in range(1, p)))


def scatter(
    net: Channel, parts: Sequence[Array], vector: Array, root: int, in_flight: int = IN_FLIGHT,
) -> Schedule[None]:
    """Copy `parts[r]` of rank `root` to `vector` of every rank r.

    Args:
        parts: On `root`, p vectors, contiguous. Ignored elsewhere.
        vector: Contiguous, as long as what `root` sends; overwritten.
        root: The rank that sends.
        in_flight: To so many ranks it sends at once.

    Raises:
        BufferMismatchError: `root` sent another number of bytes.

    Collective: yes. Blocking: no (a schedule).
    """
    p, r = net.size, net.rank
    if r != root:
        yield (net.irecv(vector, root),)
        return
    copy_to(vector, parts[r])
    yield from _a_few_at_once(in_flight, (
        (net.isend(parts[(r + s) % p], (r + s) % p),) for s in range(1, p)))


def _a_few_at_once(in_flight: int, steps: Iterable[Sequence[Request]]) -> Schedule[None]:
    """Draw steps, which begins them, but wait for the oldest where too many are under way."""
    under_way: deque[Sequence[Request]] = deque()
    for step in steps:
        under_way.append(step)
        if len(under_way) == in_flight:
            yield under_way.popleft()
    while under_way:
        yield under_way.popleft()
