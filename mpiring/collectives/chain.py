"""Pipelined broadcast along a chain of ranks, and dissemination barrier."""

from ..memory.arrays import Array, pieces_of
from ..transport.base import NO_BYTES, Channel, Request, Schedule
from .operation import Tuning


def broadcast(
    net: Channel, x: Array, root: int, piece_bytes: int = Tuning.broadcast_bytes,
) -> Schedule[None]:
    """Copy `x` of `root` to all ranks along the chain root, root+1, … root-1.

    Every rank sends one piece while it receives the next, so all links are busy: n bytes over each
    link, plus one piece per hop.
    """
    p, r = net.size, net.rank
    first, last = r == root, r == (root - 1) % p
    sending: tuple[Request, ...] = ()
    for piece in pieces_of(x, piece_bytes):
        arriving = () if first else (net.irecv(piece, (r - 1) % p),)
        yield *arriving, *sending
        sending = () if last else (net.isend(piece, (r + 1) % p),)
    yield sending


def barrier(net: Channel) -> Schedule[None]:
    """End after every rank has called, in ceil(log2 p) rounds of empty messages.

    Source: Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", Int. J.
    Parallel Programming 17(1), 1988.
    """
    p, r = net.size, net.rank
    distance = 1
    while distance < p:
        yield net.irecv(NO_BYTES, (r - distance) % p), net.isend(NO_BYTES, (r + distance) % p)
        distance *= 2
