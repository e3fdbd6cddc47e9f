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

# Pieces under way from each rank; measured: more gain nothing.
_IN_FLIGHT = 2


def reduce_scatter(
    net: Channel, chunks: Sequence[Array], inbox: Array, combine: Combine,
    piece_bytes: int = Tuning.ring_bytes,
    local: Local | None = None,
) -> Schedule[Array]:
    """Combine `chunks[r]` of all ranks on rank r, in p-1 steps.

    Args:
        chunks: p vectors of this rank's contribution, one dtype, lengths equal on
            all ranks. All are overwritten; chunk r holds the result.
        inbox: Scratch vector of at least `inbox_size(n, p, itemsize)` elements, where n is p
            times the longest chunk.
        combine: The op.
        piece_bytes: Longest message; the same on all ranks.
        local: Combines the contributions of a node, of which `chunks` are a part, piece by piece.

    Returns:
        `chunks[r]`.

    Collective: yes. Blocking: no (a schedule).
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
    """Copy `chunks[r]` of rank r to all ranks, in p-1 steps.

    Args:
        chunks: p vectors, lengths equal on all ranks but not among each other;
            all but chunk r are overwritten.
        piece_bytes: Longest message; the same on all ranks.
        local: Copies the chunks to the node's other ranks, piece by piece.

    Collective: yes. Blocking: no (a schedule).
    """
    p = net.size
    yield from _circulate(net, chunks, range(p - 1, 2 * (p - 1)), piece_bytes, local)


def allreduce(
    net: Channel, x: Array, inbox: Array, combine: Combine, piece_bytes: int = Tuning.ring_bytes,
    local: Local | None = None,
) -> Schedule[None]:
    """Combine `x` over all ranks, in place, around a ring.

    Each of the p ranks sends 2(p-1)/p of `x` in 2(p-1) steps: the least traffic
    there is, at a latency that grows with p. The bits are equal on all ranks:
    each chunk is finished on one rank and copied to the others.

    Args:
        x: Shape (n,), contiguous. Overwritten by the result.
        inbox: Scratch vector of at least `inbox_size` elements of the same dtype.
        combine: The op.
        piece_bytes: Longest message; the same on all ranks.
        local: Combines the contributions of a node, and copies the result to its other ranks, piece
            by piece. Its chunks are those of `x`.

    Collective: yes. Blocking: no (a schedule).
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
    """Take a range of an allreduce's 2(p-1) steps: the first p-1 combine, the others copy.

    In step s rank r sends chunk r-s-1, and receives chunk r-s-2, which it sends in
    step s+1. The k pieces of a chunk follow each other, and the oldest under way is
    waited for and combined while the next travels, across the steps as within them.
    """
    p, r = net.size, net.rank
    k = _pieces(len(max(chunks, key=len)), chunks[r].itemsize, piece_bytes)
    piece, at = _order_of(chunks, r, k)
    slots = chunks_of(inbox, min(k, _IN_FLIGHT))

    def slot(hop: int) -> Array:
        return slots[hop % len(slots)][:piece(hop + k).size]

    def add(hop: int, combine: Combine, *, last: bool) -> None:
        """Combine what arrived in a hop with what this rank, or its node, has."""
        if local is not None:
            local.add(*at(hop + k), slot(hop), combine if last else None, hands_out=steps.stop >= p)
            return
        combine.accumulate(piece(hop + k), slot(hop))
        if last:
            combine.finish(piece(hop + k))

    first, copying, last = k * steps.start, k * (p - 1), k * steps.stop
    under_way: deque[tuple[Request, Request]] = deque()
    for hop in range(first, last + len(slots) - 1):
        if hop < last:
            if local is not None and hop < min(first + k, copying):
                local.collect(*at(hop))
            inward = slot(hop) if hop < copying else piece(hop + k)
            under_way.append((net.irecv(inward, (r - 1) % p), net.isend(piece(hop), (r + 1) % p)))
            # An allreduce has stored what this rank has finished.
            if local is not None and hop >= copying + k * bool(combine):
                local.spread(*at(hop))
        landing = hop - len(slots) + 1
        if landing >= first:
            yield under_way.popleft()
            if combine and landing < copying:
                add(landing, combine, last=landing >= copying - k)
            elif local is not None and landing >= last - k:
                local.spread(*at(landing + k))


def _order_of(
    chunks: Sequence[Array], r: int, k: int,
) -> tuple[Callable[[int], Array], Callable[[int], tuple[int, slice]]]:
    """Return functions of a hop: the piece that rank r sends, and its chunk and place there.

    It was received k hops before.
    """
    p, pieces = len(chunks), [chunks_of(chunk, k) for chunk in chunks]

    def piece(hop: int) -> Array:
        return pieces[(r - hop // k - 1) % p][hop % k]

    def at(hop: int) -> tuple[int, slice]:
        i, q = (r - hop // k - 1) % p, hop % k
        n = chunks[i].size
        return i, slice(q * n // k, (q + 1) * n // k)

    return piece, at


def inbox_size(n: int, p: int, itemsize: int, piece_bytes: int = Tuning.ring_bytes) -> int:
    """Return how many elements of scratch memory a ring of p ranks needs for n elements."""
    if p == 1:
        return 0
    k = _pieces(-(-n // p), itemsize, piece_bytes)
    return min(k, _IN_FLIGHT) * -(-n // (p * k))


def _pieces(n: int, itemsize: int, piece_bytes: int) -> int:
    """Return in how many pieces the longest chunk, of n elements, travels."""
    return max(1, -(-n * itemsize // piece_bytes))
