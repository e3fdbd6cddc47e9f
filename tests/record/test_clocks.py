"""Tests that ranks find their clocks' offsets from rank 0's along a tree, by messages in memory."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from mpiring.record import trace_file

SLOWNESS_S = 1000.0


class Comm:
    """One rank's end of a communicator; its messages are counted."""

    def __init__(self, rank, boxes):
        self.rank, self.size, self._boxes, self.partners = rank, len(boxes), boxes, set()

    def Send(self, x, other):
        self.partners.add(other)
        self._boxes[other][self.rank].put(x.copy())

    def Recv(self, x, other):
        x[...] = self._boxes[self.rank][other].get(timeout=60)


@pytest.mark.parametrize("p", [1, 2, 5, 8])
def test_offsets_and_errors_add_up_along_a_tree(p, monkeypatch):
    clock, now_s = threading.local(), iter(range(10**9))
    monkeypatch.setattr(trace_file, "time", SimpleNamespace(
        monotonic=lambda: next(now_s) + clock.offset_s))
    boxes = [[queue.SimpleQueue() for _ in range(p)] for _ in range(p)]
    comms = [Comm(rank, boxes) for rank in range(p)]

    def run(comm):
        clock.offset_s = comm.rank * SLOWNESS_S
        return trace_file.compare_clocks(comm)

    with ThreadPoolExecutor(p) as pool:
        readings = list(pool.map(run, comms))
    assert readings[0].offset_s == readings[0].error_s == 0
    for rank, reading in enumerate(readings):
        assert abs(reading.offset_s - rank * SLOWNESS_S) <= reading.error_s
    # Rank 0 alone would have p - 1 partners.
    assert max(len(comm.partners) for comm in comms) <= p.bit_length()
    if p == 8:
        assert readings[7].error_s > readings[3].error_s > readings[1].error_s
