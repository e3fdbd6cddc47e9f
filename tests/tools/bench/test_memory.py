"""Checks that memory is seen when it comes, at its peak, and when it goes."""

import gc
import mmap
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from mpiring.tools.bench.memory import Growth, NodeGrowth

MIB = 1 << 20
# The system counts pages in batches, and Python allocates a little meanwhile.
NOISE = 3 * MIB

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the system is not Linux")


@pytest.fixture(autouse=True, scope="module")
def few_objects():
    """Let garbage collections, two per measurement, pass by the objects of other tests."""
    gc.freeze()


def measured(action, sharers=1):
    """Return the middle one of three: now and then this process itself grows by megabytes."""
    peaks = []
    for _ in range(3):
        growth = Growth(sharers)
        growth.forget_peak()
        kept = action()
        peaks.append(growth.max_bytes())
        del kept
    return sorted(peaks)[1]


def megabytes():
    return np.ones(32 * MIB, np.uint8)


@pytest.mark.parametrize(("action", "grows"), [
    (lambda: None, 0), (megabytes, 32 * MIB), (lambda: megabytes().sum(), 32 * MIB)])
def test_the_peak(action, grows):
    assert abs(measured(action) - grows) < NOISE


def test_what_was_there_only_before():
    growth = Growth(1)
    megabytes().sum()
    growth.forget_peak()
    assert abs(growth.max_bytes()) < NOISE


def test_what_was_freed_before_counts_again():
    def both():
        return [np.ones(MIB // 8, np.uint8) for _ in range(8 * 16)]

    both()
    assert abs(measured(both) - 16 * MIB) < NOISE


@pytest.mark.parametrize("touched", [0, 32])
def test_a_window_counts_as_its_share_however_much_of_it_was_touched(touched):
    def window():
        descriptor = os.memfd_create("mpiring")
        os.posix_fallocate(descriptor, 0, 32 * MIB)
        mapping = mmap.mmap(descriptor, 32 * MIB)
        os.close(descriptor)
        mapping[:touched * MIB] = bytes(1) * (touched * MIB) if touched else b""
        return mapping

    # The bytes that are written come from private memory of the same length.
    grown = measured(window, sharers=4)
    assert abs(grown - (8 + touched) * MIB) < NOISE


SHARER = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    window = mmap.mmap(file.fileno(), 0)
print(sum(window[::mmap.PAGESIZE]), flush=True)
input()
"""


@pytest.mark.parametrize(("nodes", "most"), [((0, 0, 1), 3), ((0, 1, 1), 5)])
def test_the_largest_node_is_told_and_what_is_shared_counts_once(nodes, most):
    """Other ranks, of which there are none, hold twice and three times as much as this one."""
    def allgather(data):
        return [(node, (1 + rank) * data[1]) for rank, node in enumerate(nodes)]

    world = SimpleNamespace(barrier=lambda: None, comm=SimpleNamespace(node_rank=nodes[0]),
                            raw=SimpleNamespace(allgather=allgather))
    growth = NodeGrowth(world)
    private, descriptor = np.ones(8 * MIB, np.uint8), os.memfd_create("mpiring")
    os.ftruncate(descriptor, 24 * MIB)
    window = mmap.mmap(descriptor, 24 * MIB)
    np.frombuffer(window, np.uint8)[:] = 1
    assert abs(growth.bytes_now() - most * 32 * MIB) < most * NOISE
    with subprocess.Popen(
            [sys.executable, "-c", SHARER, f"/proc/{os.getpid()}/fd/{descriptor}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sharer:
        assert int(sharer.stdout.readline()) == 24 * MIB // mmap.PAGESIZE
        assert abs(growth.bytes_now() - most * (8 + 24 / 2) * MIB) < most * NOISE
        sharer.communicate("\n")
    os.close(descriptor)
    del private
