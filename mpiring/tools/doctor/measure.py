"""Measures latency and bandwidth between ranks of a node, and between nodes, in about a second."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from .facts import Pair

_LATENCY_S, _BANDWIDTH_S = 0.1, 0.35
_MOST_ROUNDS = 2000
_WARM_UP = 5
# Several messages under way, since a single one leaves a fast network idle.
_MESSAGE_BYTES, _MESSAGES = 1 << 20, 4
# How often ranks that are not measured look whether the others are done: a barrier would spin.
_LOOK_S = 1e-3


def rounds(leaders: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return the pairs measured at a time: two ranks of each node, then of neighbouring nodes.

    Args:
        leaders: For every rank, the lowest rank on its node.
    """
    nodes = {leader: [rank for rank, other in enumerate(leaders) if other == leader]
             for leader in sorted(set(leaders))}
    inside = [(ranks[0], ranks[1]) for ranks in nodes.values() if len(ranks) > 1]
    neighbours = list(zip(list(nodes), list(nodes)[1:]))
    return [pairs for pairs in (inside, neighbours[::2], neighbours[1::2]) if pairs]


def measured(mpi: Any, world: Any, leaders: Sequence[int]) -> list[Pair]:
    """Measure between pairs of ranks, and return the results on rank 0.

    Args:
        mpi: The module mpi4py.MPI.
        world: A communicator over all ranks that is used here only.
        leaders: As in `rounds`.

    Collective: yes. Blocking: yes.
    """
    mine = []
    for pairs in rounds(leaders):
        for first, second in pairs:
            if world.rank == first:
                latency_s = _latency(mpi, world, second)
                mine.append(Pair(ranks=(first, second), latency_s=latency_s,
                                 bytes_per_s=_bandwidth(mpi, world, second)))
            elif world.rank == second:
                _answer_latency(mpi, world, first)
                _answer_bandwidth(mpi, world, first)
        _wait_for_all(world)
    everywhere = world.gather(mine) or []
    return [pair for pairs in everywhere for pair in pairs]


def _wait_for_all(world: Any) -> None:
    arrived = world.Ibarrier()
    while not arrived.Test():
        time.sleep(_LOOK_S)


def _latency(mpi: Any, world: Any, other: int) -> float:
    """Return half of a round trip of 8 bytes, in seconds; the median."""
    message = np.ones(8, np.uint8)
    seconds: list[float] = []
    end = time.perf_counter() + _LATENCY_S
    while message[0]:
        began = time.perf_counter()
        message[0] = began < end and len(seconds) < _MOST_ROUNDS
        world.Send([message, mpi.BYTE], other)
        world.Recv([message, mpi.BYTE], other)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[_WARM_UP:] or seconds) / 2


def _answer_latency(mpi: Any, world: Any, other: int) -> None:
    message = np.ones(8, np.uint8)
    while message[0]:
        world.Recv([message, mpi.BYTE], other)
        world.Send([message, mpi.BYTE], other)


def _bandwidth(mpi: Any, world: Any, other: int) -> float:
    """Return the bytes per second of large messages; the median, after a first batch."""
    data = np.ones((_MESSAGES, _MESSAGE_BYTES), np.uint8)
    answer = np.empty(8, np.uint8)
    seconds: list[float] = []
    end = time.perf_counter() + _BANDWIDTH_S
    while data[0, 0]:
        began = time.perf_counter()
        # The first byte says whether another batch follows; two at least, one to warm up.
        data[0, 0] = began < end or len(seconds) < 1
        mpi.Request.Waitall([world.Isend([piece, mpi.BYTE], other) for piece in data])
        world.Recv([answer, mpi.BYTE], other)
        seconds.append(time.perf_counter() - began)
    return data.nbytes / statistics.median(seconds[1:])


def _answer_bandwidth(mpi: Any, world: Any, other: int) -> None:
    data = np.ones((_MESSAGES, _MESSAGE_BYTES), np.uint8)
    while data[0, 0]:
        mpi.Request.Waitall([world.Irecv([piece, mpi.BYTE], other) for piece in data])
        world.Send([np.ones(8, np.uint8), mpi.BYTE], other)
