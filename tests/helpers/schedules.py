"""Gives schedules one signature, so that several can run on one network."""

import numpy as np

from mpiring.collectives import direct, ring
from mpiring.collectives.operation import Tuning
from mpiring.operations.agreement import Call, agreed
from mpiring.memory.arrays import chunks_of
from mpiring.memory.reduction import Reduction
from mpiring.transport.base import Members


def by_ring(net, x, op, piece_bytes=Tuning.ring_bytes):
    """Run allreduce itself."""
    inbox = np.empty(ring.inbox_size(x.size, net.size, x.itemsize, piece_bytes), x.dtype)
    yield from ring.allreduce(net, x, inbox, Reduction(op, x.dtype, net.size), piece_bytes)


def by_pieces(net, x, op):
    """Run allreduce in several pieces per chunk, of many dtypes."""
    return by_ring(net, x, op, piece_bytes=24)


def by_members(net, x, op):
    """Run reduce-scatter in pieces, then allgather, around a ring in another order."""
    net = Members(net, [*range(0, net.size, 2), *range(1, net.size, 2)])
    chunks = chunks_of(x, net.size)
    inbox = np.empty(ring.inbox_size(x.size, net.size, x.itemsize, 24), x.dtype)
    chunk = yield from ring.reduce_scatter(net, chunks, inbox, Reduction(op, x.dtype, net.size), 24)
    assert chunk is chunks[net.rank]
    yield from ring.allgather(net, chunks, 24)


def by_direct_pieces(net, x, op):
    """Run reduce-scatter in very short pieces, then allgather."""
    limits = 8, 40
    chunks = chunks_of(x, net.size)
    inbox = np.empty(direct.inbox_size(x.size, net.size, x.itemsize, limits), x.dtype)
    chunk = yield from direct.reduce_scatter(
        net, chunks, inbox, Reduction(op, x.dtype, net.size), limits)
    assert chunk is chunks[net.rank]
    yield from ring.allgather(net, chunks)


def by_agreed_ring(net, x, op):
    """Run the schedule of the communicator, which exchanges headers first."""
    if net.size == 1:
        return (yield from by_ring(net, x, op))
    around = (net.rank - 1) % net.size, (net.rank + 1) % net.size
    return (yield from agreed(lambda: net, None, around, Call("allreduce", op),
                              by_ring(net, x, op)))


def sent(source, dest, p):
    """Return the data from rank `source` to `dest`; length and content differ for each pair."""
    return np.arange((3 * source + dest) % (p + 2), dtype="int32") + 1000 * source + dest
