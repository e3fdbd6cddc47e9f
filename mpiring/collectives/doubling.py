"""Short collectives between many ranks in about log2 p steps, over distances that double.

For short vectors a message costs more than its bytes, so a rank sends log2 p messages, not p - 1.

A rank's result depends, directly or indirectly, on a message from every other rank, and a rank
sends no message before its call has been compared. If ranks disagree, no rank returns a result.
Other algorithms send their first messages earlier, so these algorithms have a separate lane.
"""

from collections.abc import Sequence

import numpy as np

from ..gpu.vectors import convert, copy_to, divide
from ..memory.arrays import Array, chunks_of
from ..memory.reduction import widens
from ..transport.base import LANES, Channel, Schedule
from .operation import Operation

LANE = LANES - 1


def gathers(operation: Operation, nbytes: int) -> bool:
    """Return whether to use `allgather` instead of a ring, for `nbytes` bytes of all ranks.

    `allgather` ignores nodes: every rank of a node receives all bytes of the other nodes.
    """
    tuning, nodes = operation.tuning, operation.nodes
    return len(nodes) > tuning.direct_nodes and (
        nbytes * max(map(len, nodes)) <= tuning.gathered_bytes)


def allreduce(operation: Operation, net: Channel, x: Array, op: str,
              divisor: float) -> Schedule[None]:
    """Combine a short `x` over the ranks of a channel, in place, in log2 p steps.

    The result is bitwise identical on all ranks, because both ranks of a pair combine in rank
    order. Sums and products of 16 bits are computed and sent in float32, and rounded once. The
    divisor is that of a mean; 1 for other ops.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
    MPICH", IJHPCA 19(1), 2005.
    """
    dtype = np.dtype(np.float32) if widens(x.dtype, op) else x.dtype
    combine = operation.combiner("sum" if op == "mean" else op, dtype, net.size).combine
    yield ()
    with operation.borrow(2 * x.size, dtype) as scratch:
        inbox, total = chunks_of(scratch, 2)
        if dtype == x.dtype:
            total = x
        else:
            convert(total, _bits_of(x))
        p, r, net = net.size, net.rank, net.lane(LANE)
        doubled = 1 << p.bit_length() - 1
        paired = 2 * (p - doubled)
        # The first `paired` ranks form pairs. Only the first rank of each pair continues, so that
        # the number of ranks is a power of two.
        if r < paired and r % 2:
            yield (net.isend(total, r - 1),)
            yield (net.irecv(total, r - 1),)
        else:
            if r < paired:
                yield (net.irecv(inbox, r + 1),)
                combine((total, inbox), total)
            position, distance = max(r // 2, r - paired // 2), 1
            while distance < doubled:
                other = position ^ distance
                peer = min(2 * other, other + paired // 2)
                yield net.irecv(inbox, peer), net.isend(total, peer)
                combine((total, inbox) if r < peer else (inbox, total), total)
                distance *= 2
            if divisor != 1:
                divide(total, divisor)
            if r < paired:
                yield (net.isend(total, r + 1),)
        if total is not x:
            convert(_bits_of(x), total)


def allgather(operation: Operation, net: Channel, x: Array,
              bounds: Sequence[int]) -> Schedule[None]:
    """Copy every rank's slice of a short `x` to all ranks of a channel, in ceil(log2 p) steps.

    Source: Bruck et al., IEEE TPDS 8(11), 1997.
    """
    yield ()
    p, r, net = net.size, net.rank, net.lane(LANE)
    start, n = bounds[r], x.size

    def length(count: int) -> int:
        """Return the total length of `count` slices, beginning with rank r's, modulo p."""
        return bounds[r + count] - start if r + count <= p else bounds[r + count - p] - start + n

    # The slices of ranks r, r + 1, … in this order.
    with operation.borrow(n, x.dtype) as slices:
        copy_to(slices[:length(1)], x[start:bounds[r + 1]])
        count = 1
        while count < p:
            more = min(count, p - count)
            arriving = slices[length(count):length(count + more)]
            yield (net.irecv(arriving, (r + count) % p),
                   net.isend(slices[:length(more)], (r - count) % p))
            count += more
        copy_to(x[start:], slices[:n - start])
        copy_to(x[:start], slices[n - start:])


def broadcast(net: Channel, x: Array, root: int) -> Schedule[None]:
    """Copy a short `x` of `root` to all ranks along a binomial tree, in ceil(log2 p) steps.

    A rank's result depends on a few other ranks only: see `Collectives.confirmed`.
    """
    p, net = net.size, net.lane(LANE)
    r, distance = (net.rank - root) % p, 1
    while distance < p and not r & distance:
        distance *= 2
    if r:
        yield (net.irecv(x, (root + r - distance) % p),)
    distance //= 2
    requests = []
    while distance:
        if r + distance < p:
            requests.append(net.isend(x, (root + r + distance) % p))
        distance //= 2
    yield requests


def _bits_of(x: Array) -> Array:
    """Return a vector; for bfloat16 in host memory, its bits as uint16."""
    is_bfloat = type(x) is np.ndarray and x.dtype.itemsize == 2 and x.dtype != np.float16
    return x.view(np.uint16) if is_bfloat else x
