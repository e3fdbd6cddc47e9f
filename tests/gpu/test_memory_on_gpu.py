"""Tests that GPU memory is reused and freed; nothing else may use the GPU meanwhile."""

import numpy as np
import pytest
from gpu_memory import wait
from launching import PROGRAMS, launch

from mpiring.data import prefetch


def test_freed_memory_is_available_again(device):
    runtime = device.gpu.runtime

    def one():
        x = device.allocate(32 << 20)
        wait(device.to_host(x, host))

    host = device.gpu.pinned(32 << 20)
    one()
    free, _ = runtime.memGetInfo()
    for _ in range(100):
        one()
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
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_memory_does_not_grow_in_1000_steps(ranks):
    ended = launch(ranks, PROGRAMS / "gpu_growth.py", timeout_s=200)
    assert ended.status == 0 and "memory grew by" in ended.output, ended.output
