"""Gives every schedule one form, so that one table can test them all."""

import numpy as np

from mpiring.collectives import direct, ring
from mpiring.collectives.operation import Tuning
from mpiring.operations.agreement import Call, agreed
from mpiring.memory.arrays import chunks_of
from mpiring.memory.reduction import Reduction
from mpiring.transport.base import Members, together


def by_ring(net, x, op, piece_bytes=Tuning.ring_bytes):
    """Run allreduce itself."""
    inbox = np.empty(ring.inbox_size(x.size, net.size, x.itemsize, piece_bytes), x.dtype)
    yield from ring.allreduce(net, x, inbox, Reduction(op, x.dtype, net.size), piece_bytes)


def by_ring_halves(net, x, op, piece_bytes=Tuning.ring_bytes):
    """Run reduce-scatter, then allgather."""
    chunks = chunks_of(x, net.size)
    inbox = np.empty(ring.inbox_size(x.size, net.size, x.itemsize, piece_bytes), x.dtype)
    mine = yield from ring.reduce_scatter(
        net, chunks, inbox, Reduction(op, x.dtype, net.size), piece_bytes)
    assert mine is chunks[net.rank]
    yield from ring.allgather(net, chunks, piece_bytes)


def by_pieces(net, x, op):
    """Run allreduce in several pieces per chunk, of many dtypes."""
    return by_ring(net, x, op, piece_bytes=24)


def by_members(net, x, op):
    """Run both halves in pieces, around a ring in another order."""
    order = [*range(0, net.size, 2), *range(1, net.size, 2)]
    return by_ring_halves(Members(net, order), x, op, piece_bytes=24)


def by_parts(net, x, op):
    """Run several rings at once, each on a part of the array and a lane of its own."""
    return together(by_ring(net.lane(i), part, op) for i, part in enumerate(chunks_of(x, 3)))


def by_direct(net, x, op):
    """Run allreduce itself."""
    inbox = np.empty(direct.inbox_size(x.size, net.size, x.itemsize), x.dtype)
    yield from direct.allreduce(net, x, inbox, Reduction(op, x.dtype, net.size))


def by_direct_pieces(net, x, op):
    """Run reduce-scatter in very short pieces, then allgather."""
    limits = 8, 40
    chunks = chunks_of(x, net.size)
    inbox = np.empty(direct.inbox_size(x.size, net.size, x.itemsize, limits), x.dtype)
    mine = yield from direct.reduce_scatter(
        net, chunks, inbox, Reduction(op, x.dtype, net.size), limits)
    assert mine is chunks[net.rank]
    yield from ring.allgather(net, chunks)


def by_agreed_ring(net, x, op):
    """Run what the communicator runs: the header first."""
    if net.size == 1:
        return (yield from by_ring(net, x, op))
    around = (net.rank - 1) % net.size, (net.rank + 1) % net.size
    return (yield from agreed(lambda: net, None, around, Call("allreduce", op),
                              by_ring(net, x, op)))


ALGORITHMS = {
    "ring": by_ring, "ring halves": by_ring_halves, "agreed ring": by_agreed_ring,
    "ring in pieces": by_pieces, "ring of members": by_members, "rings at once": by_parts,
    "direct": by_direct, "direct pieces": by_direct_pieces}


def sent(source, dest, p):
    """What rank `source` has for rank `dest`: another length and content for each pair."""
    return np.arange((3 * source + dest) % (p + 2), dtype="int32") + 1000 * source + dest
