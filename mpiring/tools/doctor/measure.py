"""Measures latency and bandwidth within nodes and between nodes, in about a second."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...provisional import launch
from .facts import Pair

_LATENCY_S, _BANDWIDTH_S = 0.1, 0.35
_MAX_ROUNDS = 2000
_WARM_UP = 5
# Several messages are in flight, because a fast network is idle between single messages.
_MESSAGE_BYTES, _MESSAGES = 1 << 20, 4
# Sleep of ranks that are not measured; a blocking barrier would spin.
_POLL_S = 1e-3


def rounds(leaders: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs: first two ranks of each node, then ranks of neighboring nodes.

    The pairs of a round are measured at the same time. A leader is the lowest rank on a rank's
    node.
    """
    nodes = launch.topology.ranks_of_nodes(leaders, range(len(leaders)))
    inside = [(ranks[0], ranks[1]) for ranks in nodes if len(ranks) > 1]
    neighbors = [(ranks[0], others[0]) for ranks, others in zip(nodes, nodes[1:])]
    return [pairs for pairs in (inside, neighbors[::2], neighbors[1::2]) if pairs]


def measure_pairs(mpi: Any, world: Any, leaders: Sequence[int]) -> list[Pair]:
    """Measure latency and bandwidth between pairs of ranks; return the results on rank 0.

    Nothing else uses the communicator `world` of all ranks. For leaders, see `rounds`.

    Collective: yes. Blocking: yes.
    """
    results = []
    for pairs in rounds(leaders):
        for pair in pairs:
            if world.rank in pair:
                is_first = world.rank == pair[0]
                other = pair[1] if is_first else pair[0]
                result = Pair(ranks=pair, latency_s=_latency(mpi, world, other, is_first),
                              bytes_per_s=_bandwidth(mpi, world, other, is_first))
                results += [result] if is_first else []
        arrived = world.Ibarrier()
        while not arrived.Test():
            time.sleep(_POLL_S)
    return [result for results in world.gather(results) or [] for result in results]


def _latency(mpi: Any, world: Any, other: int, is_first: bool) -> float:
    """Return half of the median round-trip time of 8 bytes, in seconds.

    One rank of the pair sends first. A first byte of 0 announces the last round trip.
    """
    message = np.ones(8, np.uint8)
    seconds: list[float] = []
    end = time.perf_counter() + _LATENCY_S
    while message[0]:
        began = time.perf_counter()
        if is_first:
            message[0] = began < end and len(seconds) < _MAX_ROUNDS
            world.Send([message, mpi.BYTE], other)
        world.Recv([message, mpi.BYTE], other)
        if not is_first:
            world.Send([message, mpi.BYTE], other)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[_WARM_UP:] or seconds) / 2


def _bandwidth(mpi: Any, world: Any, other: int, is_first: bool) -> float:
    """Return the median bandwidth of large messages in bytes per second, without the first batch.

    One rank of the pair sends. A first byte of 0 announces the last batch.
    """
    data, answer = np.ones((_MESSAGES, _MESSAGE_BYTES), np.uint8), np.empty(8, np.uint8)
    post = world.Isend if is_first else world.Irecv
    seconds: list[float] = []
    end = time.perf_counter() + _BANDWIDTH_S
    while data[0, 0]:
        began = time.perf_counter()
        if is_first:
            # Send at least two batches, of which the first is a warm-up.
            data[0, 0] = began < end or len(seconds) < 1
        mpi.Request.Waitall([post([message, mpi.BYTE], other) for message in data])
        (world.Recv if is_first else world.Send)([answer, mpi.BYTE], other)
        seconds.append(time.perf_counter() - began)
    return data.nbytes / statistics.median(seconds[1:] or seconds)
