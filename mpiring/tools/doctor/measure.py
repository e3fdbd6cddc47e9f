"""Measures latency and bandwidth between ranks of a node, and between nodes, in about a second."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...launch.topology import ranks_of_nodes
from .facts import Pair

_LATENCY_S, _BANDWIDTH_S = 0.1, 0.35
_MAX_ROUNDS = 2000
_WARM_UP = 5
# Several messages are in flight, since a single one leaves a fast network idle.
_MESSAGE_BYTES, _MESSAGES = 1 << 20, 4
# Pause between tests by ranks that are not measured: a barrier would spin.
_LOOK_S = 1e-3


def rounds(leaders: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return the pairs measured at a time: two ranks of each node, then of neighboring nodes.

    Args:
        leaders: Lowest rank on the node of every rank.
    """
    nodes = ranks_of_nodes(leaders, range(len(leaders)))
    inside = [(ranks[0], ranks[1]) for ranks in nodes if len(ranks) > 1]
    neighbors = [(ranks[0], others[0]) for ranks, others in zip(nodes, nodes[1:])]
    return [pairs for pairs in (inside, neighbors[::2], neighbors[1::2]) if pairs]


def measured(mpi: Any, world: Any, leaders: Sequence[int]) -> list[Pair]:
    """Measure between pairs of ranks, and return the results on rank 0.

    Args:
        mpi: The module mpi4py.MPI.
        world: A communicator over all ranks that is used here only.
        leaders: Argument of `rounds`.

    Collective: yes. Blocking: yes.
    """
    results = []
    for pairs in rounds(leaders):
        for pair in pairs:
            if world.rank in pair:
                leads = world.rank == pair[0]
                other = pair[1] if leads else pair[0]
                result = Pair(ranks=pair, latency_s=_latency(mpi, world, other, leads),
                              bytes_per_s=_bandwidth(mpi, world, other, leads))
                results += [result] if leads else []
        arrived = world.Ibarrier()
        while not arrived.Test():
            time.sleep(_LOOK_S)
    return [result for results in world.gather(results) or [] for result in results]


def _latency(mpi: Any, world: Any, other: int, leads: bool) -> float:
    """Return half of a round trip of 8 bytes, in seconds; the median.

    Args:
        leads: This rank sends first, and says by the first byte whether another trip follows.
    """
    message = np.ones(8, np.uint8)
    seconds: list[float] = []
    end = time.perf_counter() + _LATENCY_S
    while message[0]:
        began = time.perf_counter()
        if leads:
            message[0] = began < end and len(seconds) < _MAX_ROUNDS
            world.Send([message, mpi.BYTE], other)
        world.Recv([message, mpi.BYTE], other)
        if not leads:
            world.Send([message, mpi.BYTE], other)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[_WARM_UP:] or seconds) / 2


def _bandwidth(mpi: Any, world: Any, other: int, leads: bool) -> float:
    """Return the bytes per second of large messages; the median, after a first batch.

    Args:
        leads: This rank sends, and says by the first byte whether another batch follows.
    """
    data, answer = np.ones((_MESSAGES, _MESSAGE_BYTES), np.uint8), np.empty(8, np.uint8)
    post = world.Isend if leads else world.Irecv
    seconds: list[float] = []
    end = time.perf_counter() + _BANDWIDTH_S
    while data[0, 0]:
        began = time.perf_counter()
        if leads:
            # Two batches at least, one to warm up.
            data[0, 0] = began < end or len(seconds) < 1
        mpi.Request.Waitall([post([message, mpi.BYTE], other) for message in data])
        (world.Recv if leads else world.Send)([answer, mpi.BYTE], other)
        seconds.append(time.perf_counter() - began)
    return data.nbytes / statistics.median(seconds[1:] or seconds)
