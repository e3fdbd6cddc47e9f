"""Averages vectors between nodes, encoded or unencoded; each rank adds up one chunk in float32.

For any number of ranks, an encoded number is rounded twice: by the rank that contributes it, and
by the rank that adds up its chunk. A rank does not encode its contribution to its own chunk.
"""

from collections.abc import Sequence
from dataclasses import replace

from ..sharding.state import Wide
from ..collectives import direct, ring
from ..gpu import vectors
from ..memory.arrays import Array, bounds_of, cut
from ..memory.reduction import reduction
from ..transport.base import Request, Schedule, run_together
from .codecs.base import Codec
from .compressor import SliceExchange

# Number of strips in flight, each on a separate lane.
_IN_FLIGHT = 3
# Lengths of messages: long enough to hide latency, and short enough for MPI to send in both
# directions at once.
_LONGEST_BYTES, _SHORTEST_BYTES = 256 << 10, 16 << 10
_IN_ALL_BYTES = 4 << 20


def average(exchange: SliceExchange, codec: Codec, x: Wide,
            lost: Wide | None) -> Schedule[bool]:
    """Return the schedule that replaces `x` by its mean over ranks, with encoded messages.

    Each of the p ranks sends 2(p-1)/p of the payload of `x`. The vector is sent in strips, several
    of which are in flight, so that encoding overlaps with communication.

    For the arguments and the result, see `Compressor.between`.

    Source: Tang et al., ICML 2021 (1-bit Adam), figure 3, for the two phases.
    """
    p = exchange.net.size
    message_bytes = max(min(_LONGEST_BYTES, _IN_ALL_BYTES // p), _SHORTEST_BYTES)
    count = max(1, -(-codec.payload_size(x.size) // (p * message_bytes)))
    bounds = bounds_of(x.size, count, codec.alignment)
    strips = cut(x, bounds)
    losses = [None] * count if lost is None else cut(lost, bounds)

    def lane(index: int) -> Schedule[bool]:
        """Average every third strip, one after the other."""
        finite, net = True, exchange.net.lane(index)
        for i in range(index, count, _IN_FLIGHT):
            strip = replace(exchange, net=net, position=(*exchange.position, i))
            finite &= yield from _average(strip, codec, strips[i], losses[i])
        return finite

    return all((yield from run_together(map(lane, range(_IN_FLIGHT)), _IN_FLIGHT)))


def average_dense(exchange: SliceExchange, x: Wide) -> Schedule[None]:
    """Return the schedule that replaces `x`, shape (n,), by its mean over ranks, unencoded."""
    p = exchange.net.size
    with exchange.borrow(direct.inbox_size(x.size, p, x.itemsize), x.dtype) as inbox:
        yield from direct.allreduce(exchange.net, x, inbox, reduction("mean", x.dtype, p))


def _average(exchange: SliceExchange, codec: Codec, x: Wide, lost: Wide | None) -> Schedule[bool]:
    """Average a strip; every rank adds up one chunk of it."""
    p, r = exchange.net.size, exchange.net.rank
    bounds = bounds_of(x.size, p, codec.alignment)
    chunks = cut(x, bounds)
    losses = None if lost is None else cut(lost, bounds)
    sizes = [codec.payload_size(chunk.size) for chunk in chunks]
    with exchange.borrow_bytes([*sizes, *[sizes[r]] * (p - 1)]) as memory:
        payloads, inbox = memory[:p], memory[p:]
        yield from _add_own_chunk(exchange, codec, chunks, payloads, inbox, losses)
        with exchange.encoding():
            chunk, loss = chunks[r], None if losses is None else losses[r]
            vectors.divide(chunk, p)
            codec.encode(chunk, payloads[r], loss, exchange.key(p))
            if loss is not None:
                # The mean over ranks divides the loss by p again.
                vectors.multiply(loss, p)
        yield from ring.allgather(exchange.net, payloads)
        finite = True
        with exchange.decoding():
            for chunk, payload in zip(chunks, payloads):
                codec.decode(payload, chunk)
                finite &= codec.is_finite(payload, chunk.size)
    return finite


def _add_own_chunk(exchange: SliceExchange, codec: Codec, chunks: Sequence[Wide],
                   payloads: Sequence[Array], inbox: Sequence[Array],
                   losses: Sequence[Wide] | None) -> Schedule[None]:
    """Send the other ranks their encoded chunks, and add up this rank's own chunk.

    `payloads` is memory for each encoded chunk, `inbox` for this rank's from each other rank.
    """
    net = exchange.net
    p, r = net.size, net.rank
    requests: list[Request] = [net.irecv(inbox[s - 1], (r - s) % p) for s in range(1, p)]
    for s in range(1, p):
        dest = (r + s) % p
        with exchange.encoding():
            codec.encode(chunks[dest], payloads[dest],
                         None if losses is None else losses[dest], exchange.key(dest))
        requests.append(net.isend(payloads[dest], dest))
    yield requests
    with exchange.decoding():
        # In rank order, starting with the rank after this one.
        for payload in reversed(inbox):
            codec.decode(payload, chunks[r], adds=True)
