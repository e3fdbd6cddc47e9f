"""Reduce-scatter, allgather and allreduce around a ring of ranks.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters
of workstations", JPDC 69(2), 2009.
"""

from collections import deque
from collections.abc import Callable, Sequence

from ..memory.arrays import Array, chunks_of
from ..memory.reduction import Combine
from ..transport.base import NO_BYTES, Channel, Request, Schedule
from .local import Local
from .operation import Tuning

# Number of pieces in flight from each rank. Measured: more gain nothing.
_IN_FLIGHT = 2


def reduce_scatter(
    net: Channel, chunks: Sequence[Array], inbox: Array, combine: Combine,
    piece_bytes: int = Tuning.ring_bytes,
    local: Local | None = None,
) -> Schedule[Array]:
    """Combine `chunks[r]` of all ranks on rank r, in p-1 steps; return it. All are overwritten.

    Args:
        inbox: Scratch vector of at least `inbox_size(n, p, itemsize)` elements, where n is p times
            the longest chunk.
        piece_bytes: Length of the longest message.
        local: If given, combines the contributions of a node piece by piece; `chunks` are slices of
            one of its vectors.
    """
    p, r = net.size, net.rank
    if local is None:
        for chunk in chunks:
            combine.prepare(chunk)
    if p == 1:
        combine.finish(chunks[r])
    yield from _circulate(net, chunks, range(p - 1), piece_bytes, local, inbox, combine)
    return chunks[r]


def allgather(
    net: Channel, chunks: Sequence[Array], piece_bytes: int = Tuning.ring_bytes,
    local: Local | None = None,
) -> Schedule[None]:
    """Copy `chunks[r]` of rank r to all ranks, in p-1 steps; chunks may differ in length.

    If `local` is given, it copies the chunks to the node's other ranks, piece by piece.
    """
    p = net.size
    yield from _circulate(net, chunks, range(p - 1, 2 * (p - 1)), piece_bytes, local)


def allreduce(
    net: Channel, x: Array, inbox: Array, combine: Combine, piece_bytes: int = Tuning.ring_bytes,
    local: Local | None = None,
) -> Schedule[None]:
    """Combine `x` over all ranks, in place, around a ring.

    Each of the p ranks sends 2(p-1)/p of `x` in 2(p-1) steps: the least possible traffic, at a
    latency that grows with p. The result is bitwise identical on all ranks, because one rank
    completes each chunk and the others copy it. For `inbox`, see `inbox_size`. If `local` is given,
    it has the chunks of `x`, and also copies the result to the node's other ranks.
    """
    p = net.size
    if local is None:
        combine.prepare(x)
    if p == 1:
        combine.finish(x)
    yield from _circulate(
        net, chunks_of(x, p), range(2 * (p - 1)), piece_bytes, local, inbox, combine)


def _circulate(
    net: Channel, chunks: Sequence[Array], steps: range, piece_bytes: int, local: Local | None,
    inbox: Array = NO_BYTES, combine: Combine | None = None,
) -> Schedule[None]:
    """Run a range of an allreduce's 2(p-1) steps: the first p-1 combine, the others copy.

    In step s rank r sends chunk r-s-1, and receives chunk r-s-2, which it sends in step s+1. A
    step has k hops, one for each piece of the chunk. The rank waits for the oldest piece in flight
    and combines it while the next is on the wire, also across steps.
    """
    p, r = net.size, net.rank
    k = _pieces(len(max(chunks, key=len)), chunks[r].itemsize, piece_bytes)
    piece, at = _order_of(chunks, r, k)
    slots = chunks_of(inbox, min(k, _IN_FLIGHT))

    def slot(hop: int) -> Array:
        return slots[hop % len(slots)][:piece(hop + k).size]

    def add(hop: int, combine: Combine, *, last: bool) -> None:
        """Combine the piece received in a hop with this rank's (or its node's) contribution."""
        if local is not None:
            local.add(*at(hop + k), slot(hop), combine if last else None, hands_out=steps.stop >= p)
            return
        combine.accumulate(piece(hop + k), slot(hop))
        if last:
            combine.finish(piece(hop + k))

    first, copying, last = k * steps.start, k * (p - 1), k * steps.stop
    pending: deque[tuple[Request, Request]] = deque()
    for hop in range(first, last + len(slots) - 1):
        if hop < last:
            if local is not None and hop < min(first + k, copying):
                local.collect(*at(hop))
            inward = slot(hop) if hop < copying else piece(hop + k)
            pending.append((net.irecv(inward, (r - 1) % p), net.isend(piece(hop), (r + 1) % p)))
            # An allreduce has already stored the chunk that this rank has completed.
            if local is not None and hop >= copying + k * bool(combine):
                local.spread(*at(hop))
        landing = hop - len(slots) + 1
        if landing >= first:
            yield pending.popleft()
            if combine and landing < copying:
                add(landing, combine, last=landing >= copying - k)
            elif local is not None and landing >= last - k:
                local.spread(*at(landing + k))


def _order_of(
    chunks: Sequence[Array], r: int, k: int,
) -> tuple[Callable[[int], Array], Callable[[int], tuple[int, int, int]]]:
    """Return two functions of a hop: the piece that rank r sends, and its numbers.

    Rank r received the piece k hops before. The numbers are arguments of `Local.collect`.
    """
    p, pieces = len(chunks), [chunks_of(chunk, k) for chunk in chunks]

    def piece(hop: int) -> Array:
        return pieces[(r - hop // k - 1) % p][hop % k]

    def at(hop: int) -> tuple[int, int, int]:
        return (r - hop // k - 1) % p, hop % k, k

    return piece, at


def inbox_size(n: int, p: int, itemsize: int, piece_bytes: int = Tuning.ring_bytes) -> int:
    """Return the number of scratch elements that a ring of p ranks needs for n elements."""
    if p == 1:
        return 0
    k = _pieces(-(-n // p), itemsize, piece_bytes)
    return min(k, _IN_FLIGHT) * -(-n // (p * k))


def _pieces(n: int, itemsize: int, piece_bytes: int) -> int:
    """Return the number of pieces in which the longest chunk, of n elements, is sent."""
    return max(1, -(-n * itemsize // piece_bytes))
