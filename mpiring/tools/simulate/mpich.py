"""Models MPI's own allreduce between nodes as MPICH's schedules, without data.

The first rank of each node combines the contributions of its node. The first ranks then combine
their results, and distribute the final result within their nodes.

Precision: compared with MPICH 5.0.2 on three hosts with one rank each and links of 1 Gbit/s, from
64 KiB to 16 MiB, with `UCX_RNDV_THRESH=inf`, predictions are within 3 %. By default, UCX sends
large messages over TCP by rendezvous; messages in opposite directions then often wait for each
other, and four hosts take twice as long. Ranks that share cores drift apart, so messages of two
steps arrive at a host at once and delay each other. Four hosts on two cores took 1.0 to 1.5 times
as long as predicted at 16 MiB.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication
operations in MPICH", IJHPCA 19(1), 2005, and MPICH's MPIR_Allreduce_intra_auto.
"""

from collections.abc import Sequence

from ...provisional import Array, Channel, Schedule, memory, transport

# MPIR_CVAR_ALLREDUCE_SHORT_MSG_SIZE.
SHORT_BYTES = 2048


def allreduce(net: Channel, ranks_per_node: int, x: Array, inbox: Array,
              combine: memory.Combine) -> Schedule[None]:
    """Combine `x` within each node, then over the first ranks of all nodes, and copy it to all.

    Ranks r with equal `r // ranks_per_node` share a node. The result overwrites `x`, of shape (n,),
    and `inbox` is scratch memory of the same shape.

    Collective: yes. Blocking: no (a schedule).
    """
    first = net.rank - net.rank % ranks_per_node
    node = transport.Members(net, range(first, first + ranks_per_node))
    yield from _reduce(node, x, inbox, combine)
    if node.rank == 0:
        leaders = transport.Members(net, range(0, net.size, ranks_per_node))
        yield from _between(leaders, x, inbox, combine)
    yield from _broadcast(node, x)


def _reduce(net: Channel, x: Array, inbox: Array, combine: memory.Combine) -> Schedule[None]:
    """Combine on rank 0, along a binomial tree."""
    p, r, mask = net.size, net.rank, 1
    while mask < p:
        if r & mask:
            yield (net.isend(x, r - mask),)
            return
        if r + mask < p:
            yield (net.irecv(inbox, r + mask),)
            combine.accumulate(x, inbox)
        mask *= 2


def _broadcast(net: Channel, x: Array) -> Schedule[None]:
    """Copy from rank 0, along a binomial tree."""
    p, r, mask = net.size, net.rank, 1
    while mask < p and not r & mask:
        mask *= 2
    if r:
        yield (net.irecv(x, r - mask),)
    while mask > 1:
        mask //= 2
        if r + mask < p:
            yield (net.isend(x, r + mask),)


def _between(net: Channel, x: Array, inbox: Array, combine: memory.Combine) -> Schedule[None]:
    """Combine pairs of ranks until a power of two remain; then combine the remaining ranks."""
    p, r = net.size, net.rank
    q = 1 << p.bit_length() - 1
    paired = 2 * (p - q)
    drops_out = r < paired and r % 2 == 0
    if drops_out:
        yield (net.isend(x, r + 1),)
    elif r < paired:
        yield (net.irecv(inbox, r - 1),)
        combine.accumulate(x, inbox)
    if not drops_out:
        remaining = transport.Members(net, [*range(1, paired, 2), *range(paired, p)])
        algorithm = _doubling if x.nbytes <= SHORT_BYTES or x.size < q else _halving
        yield from algorithm(remaining, x, inbox, combine)
    if drops_out:
        yield (net.irecv(x, r + 1),)
    elif r < paired:
        yield (net.isend(x, r - 1),)


def _distances(p: int) -> Sequence[int]:
    return [1 << step for step in range(p.bit_length() - 1)]


def _doubling(net: Channel, x: Array, inbox: Array, combine: memory.Combine) -> Schedule[None]:
    """Exchange everything with ranks at distance 1, 2, 4 …: recursive doubling."""
    for distance in _distances(net.size):
        peer = net.rank ^ distance
        yield net.irecv(inbox, peer), net.isend(x, peer)
        combine.accumulate(x, inbox)


def _halving(net: Channel, x: Array, inbox: Array, combine: memory.Combine) -> Schedule[None]:
    """Exchange half of the rest at each distance, then gather in reverse order (Rabenseifner)."""
    halves = []
    for distance in _distances(net.size):
        peer, upper = net.rank ^ distance, bool(net.rank & distance)
        give, keep = memory.chunks_of(x, 2)[::1 if upper else -1]
        got = inbox[:keep.size]
        yield net.irecv(got, peer), net.isend(give, peer)
        combine.accumulate(keep, got)
        halves.append((peer, give, keep))
        x = keep
    for peer, give, keep in reversed(halves):
        yield net.irecv(give, peer), net.isend(keep, peer)
