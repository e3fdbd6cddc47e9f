"""Reduce-scatter and allreduce that round once: ranks send contributions to the combining rank."""

from collections.abc import Sequence

from ..memory.arrays import Array, chunks_of
from ..memory.reduction import Combine
from ..transport.base import Channel, Request, Schedule
from . import ring
from .local import Local
from .operation import Tuning


def reduce_scatter(
    net: Channel, chunks: Sequence[Array], inbox: Array, combine: Combine,
    piece_bytes: tuple[int, int] = Tuning.direct_bytes, local: Local | None = None,
) -> Schedule[Array]:
    """Combine `chunks[r]` of all ranks on rank r, in rank order, in one step; return it.

    As in a ring, a rank sends and receives p-1 chunks, but no partial sum is ever sent. The owner
    of a chunk receives all contributions, combines them, and rounds once. Contributions arrive in
    pieces: the owner combines one piece while the next arrives.

    Args:
        inbox: Scratch vector of at least `inbox_size(n, p, itemsize)` elements, where n is p times
            the longest chunk.
        piece_bytes: Length of the shortest and longest pieces.
        local: If given, combines the contributions of a node piece by piece; `chunks` are slices of
            one of its vectors. Then all chunks are overwritten.
    """
    p, r = net.size, net.rank
    longest = max(chunk.size for chunk in chunks)
    count = _pieces(longest, p, inbox.itemsize, piece_bytes)
    width = -(-longest // count)
    pieces = [chunks_of(chunk, count) for chunk in chunks]

    def start(k: int) -> tuple[list[Array], list[Request]]:
        """Start to exchange piece k of every chunk; return the pieces of chunk r of all ranks."""
        sources, requests = [pieces[r][k]] * p, []
        # Each rank begins with a different receiver, so that no rank is flooded.
        for s in range(1, p):
            source, dest = (r - s) % p, (r + s) % p
            if local is not None:
                local.collect(dest, k, count)
            offset = (k % 2 * (p - 1) + s - 1) * width
            sources[source] = inbox[offset:offset + pieces[r][k].size]
            requests += [net.irecv(sources[source], source), net.isend(pieces[dest][k], dest)]
        return sources, requests

    pending = start(0)
    for k in range(count):
        sources, requests = pending
        if k + 1 < count:
            pending = start(k + 1)
        if local is not None:
            local.collect(r, k, count)
        yield requests
        combine.combine(sources, pieces[r][k])
    return chunks[r]


def allreduce(
    net: Channel, x: Array, inbox: Array, combine: Combine,
    piece_bytes: tuple[int, int] = Tuning.direct_bytes, ring_bytes: int = Tuning.ring_bytes,
    local: Local | None = None,
) -> Schedule[None]:
    """Combine `x` over all ranks, in place: a direct reduce-scatter, then a ring allgather.

    A rank sends 2(p-1)/p of `x`, as in a ring. The result is bitwise identical on all ranks, and
    the same as if contributions were combined in rank order. For `inbox`, see `inbox_size`; for
    `piece_bytes`, see `reduce_scatter`. If `local` is given, it has the chunks of `x`, and also
    copies the result to the node's other ranks.
    """
    chunks = chunks_of(x, net.size)
    yield from reduce_scatter(net, chunks, inbox, combine, piece_bytes, local)
    yield from ring.allgather(net, chunks, ring_bytes, local)


def inbox_size(n: int, p: int, itemsize: int,
               piece_bytes: tuple[int, int] = Tuning.direct_bytes) -> int:
    """Return the number of scratch elements that a rank needs to combine n elements on p ranks."""
    longest = -(-n // p)
    count = _pieces(longest, p, itemsize, piece_bytes)
    return min(count, 2) * (p - 1) * -(-longest // count)


def _pieces(longest: int, p: int, itemsize: int, piece_bytes: tuple[int, int]) -> int:
    """Return the number of pieces in which chunks of up to `longest` elements are sent."""
    shortest_bytes, longest_bytes = piece_bytes
    nbytes = longest * itemsize
    fair_bytes = nbytes // max(4 * (p - 1), 1)
    return max(-(-nbytes // min(max(fair_bytes, shortest_bytes), longest_bytes)), 1)
