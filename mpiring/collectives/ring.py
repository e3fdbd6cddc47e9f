"""Moves data around a ring of ranks: reduce-scatter, allgather, allreduce.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters
of workstations", JPDC 69(2), 2009.
"""

from collections.abc import Sequence

import numpy as np

from ..memory.arrays import Array, chunks_of
from ..memory.reduction import Combine
from ..transport.base import Channel, Schedule


def reduce_scatter(
    net: Channel, chunks: Sequence[Array], inbox: Array, combine: Combine,
) -> Schedule[Array]:
    """Combine `chunks[r]` of all ranks on rank r, in p-1 steps.

    Args:
        chunks: p vectors of this rank's contribution, one dtype, lengths equal on
            all ranks. All are overwritten; chunk r holds the result.
        inbox: Scratch vector, at least as long as the longest chunk.
        combine: The op.

    Returns:
        `chunks[r]`.

    Collective: yes. Blocking: no (a schedule).
    """
    p, r = net.size, net.rank
    for chunk in chunks:
        combine.prepare(chunk)
    for s in range(p - 1):
        send, recv = chunks[(r - s - 1) % p], chunks[(r - s - 2) % p]
        got = inbox[:recv.size]
        yield net.irecv(got, (r - 1) % p), net.isend(send, (r + 1) % p)
        combine.accumulate(recv, got)
    combine.finish(chunks[r])
    return chunks[r]


def allgather(net: Channel, chunks: Sequence[Array]) -> Schedule[None]:
    """Copy `chunks[r]` of rank r to all ranks, in p-1 steps.

    Args:
        chunks: p vectors, lengths equal on all ranks but not among each other;
            all but chunk r are overwritten.

    Collective: yes. Blocking: no (a schedule).
    """
    p, r = net.size, net.rank
    for s in range(p - 1):
        send, recv = chunks[(r - s) % p], chunks[(r - s - 1) % p]
        yield net.irecv(recv, (r - 1) % p), net.isend(send, (r + 1) % p)


def allreduce(net: Channel, x: Array, inbox: Array, combine: Combine) -> Schedule[None]:
    """Combine `x` over all ranks, in place, around a ring.

    Each of the p ranks sends 2(p-1)/p of `x` in 2(p-1) steps: the least traffic
    there is, at a latency that grows with p. The bits are equal on all ranks:
    each chunk is finished on one rank and copied to the others.

    Args:
        x: Shape (n,), contiguous. Overwritten by the result.
        inbox: Scratch vector of at least `inbox_size(n, p)` elements of the same dtype.
        combine: The op.

    Collective: yes. Blocking: no (a schedule).
    """
    chunks = chunks_of(x, net.size)
    yield from reduce_scatter(net, chunks, inbox, combine)
    yield from allgather(net, chunks)


def inbox_size(n: int, p: int) -> int:
    """Return the length of the longest chunk that a rank receives."""
    return 0 if p == 1 else -(-n // p)


def allgather_bytes(net: Channel, mine: Array) -> Schedule[list[Array]]:
    """Collect one byte vector of any length from every rank, in rank order.

    The lengths go around first, because receives need them.

    Collective: yes. Blocking: no (a schedule).
    """
    lengths = np.zeros(net.size, np.int64)
    lengths[net.rank] = mine.size
    yield from allgather(net, chunks_of(lengths, net.size))
    gathered = [np.empty(length, np.uint8) for length in lengths]
    gathered[net.rank] = mine
    yield from allgather(net, gathered)
    return gathered
