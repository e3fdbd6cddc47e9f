"""Tests that GPU memory is reused and freed; nothing else may use the GPU meanwhile."""

import cupy_or_host
import numpy as np
import pytest
from gpu_memory import wait
from launching import PROGRAMS, launch

from mpiring.data import prefetch

# Without a GPU, memory and ranks take time.
MEMORY, RANKS = (32 << 20, [1, 2, 4]) if cupy_or_host.REAL else (2 << 20, [2])


def test_freed_memory_is_available_again(device):
    runtime = device.gpu.runtime

    def allocate_and_copy():
        x = device.allocate(MEMORY)
        wait(device.to_host(x, host))

    host = device.gpu.pinned(MEMORY)
    allocate_and_copy()
    free, _ = runtime.memGetInfo()
    for _ in range(100):
        allocate_and_copy()
    assert free - runtime.memGetInfo()[0] < 64 << 20


def test_batches_reuse_memory(cupy):
    loaded = prefetch([np.zeros(1 << 22, np.float32)] * 50, "cuda")
    for batch in loaded:
        del batch
    free, _ = cupy.cuda.runtime.memGetInfo()
    for _ in range(3):
        for batch in loaded:
            del batch
    assert free - cupy.cuda.runtime.memGetInfo()[0] <= 64 << 20


@pytest.mark.launch
@pytest.mark.any_mpi
@pytest.mark.parametrize("ranks", RANKS)
def test_memory_does_not_grow_in_1000_steps(ranks):
    ended = launch(ranks, PROGRAMS / "gpu_growth.py", timeout_s=200)
    assert ended.status == 0 and "memory grew by" in ended.output, ended.output
