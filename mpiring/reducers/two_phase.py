"""Averages vectors between nodes: encoded, each rank adding a chunk in float32; or as they are.

However many ranks there are, an encoded number is rounded twice: by the rank that contributes it,
and by the one that adds its chunk. What a rank contributes to its own chunk is not encoded.
"""

from collections.abc import Sequence
from dataclasses import replace

from ..sharding.state import Wide
from ..collectives import direct, ring
from ..gpu import vectors
from ..memory.arrays import Array, bounds_of, cut
from ..memory.reduction import reduction
from ..transport.base import Request, Schedule, together
from .codecs.base import Codec
from .compressor import SliceExchange

# Strips under way at once, each in a lane of its own; and lengths of their messages: long enough
# to be worth their latency, short enough that MPI sends both ways at once.
_IN_FLIGHT = 3
_LONGEST_BYTES, _SHORTEST_BYTES = 256 << 10, 16 << 10
_IN_ALL_BYTES = 4 << 20


def average(exchange: SliceExchange, codec: Codec, x: Wide,
            lost: Wide | None) -> Schedule[bool]:
    """Return the schedule that replaces `x` by its mean over ranks, all messages encoded.

    Each of the p ranks sends 2(p-1)/p of the payload of `x`. It goes in strips, of which a few
    are under way at once, so that one is encoded while the wire carries another.

    Args:
        exchange, x, lost: As for `Compressor.between`.
        codec: Encodes the messages.

    Returns:
        Whether all contributions were finite.

    Source: the two phases are those of Tang et al., ICML 2021 (1-bit Adam), figure 3.
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

    return all((yield from together(map(lane, range(_IN_FLIGHT)), _IN_FLIGHT)))


def average_dense(exchange: SliceExchange, x: Wide) -> Schedule[None]:
    """Return the schedule that replaces `x`, shape (n,), by its mean over ranks, not encoded."""
    p = exchange.net.size
    with exchange.borrow(direct.inbox_size(x.size, p, x.itemsize), x.dtype) as inbox:
        yield from direct.allreduce(exchange.net, x, inbox, reduction("mean", x.dtype, p))


def _average(exchange: SliceExchange, codec: Codec, x: Wide, lost: Wide | None) -> Schedule[bool]:
    """Average a strip: every rank adds a chunk of it."""
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
                # In the mean it is divided by p again.
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
    """Send every other rank its chunk, encoded; add what they send to this rank's own.

    Args:
        payloads: Memory for each encoded chunk.
        inbox: Memory for this rank's chunk, as each of the others encodes it.
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
        # In the order of ranks from this one on.
        for payload in reversed(inbox):
            codec.decode(payload, chunks[r], adds=True)
