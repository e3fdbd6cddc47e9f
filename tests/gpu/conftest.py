"""Provides CuPy to the tests in the files *_on_gpu.py; without a GPU, work is done on the host.

Other tests in this folder cover what a GPU would do asynchronously, on a simulated GPU, and the
errors of CUDA, with a CuPy that records calls.
"""

import os

import cupy_or_host
import pytest
from gpu_memory import GpuMemory

from mpiring.gpu import cuda

# By default, CUDA has 8 queues for all streams of a process. A stream that waits for another one in
# its queue would wait forever; here, a process has the streams of several ranks.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.stem.endswith("_on_gpu"):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _package(request, monkeypatch):
    if request.path.stem.endswith("_on_gpu"):
        cupy_or_host.installed(monkeypatch)


@pytest.fixture
def device():
    """Return the first GPU."""
    return cuda.device(0)


@pytest.fixture
def memory(device):
    return GpuMemory(device)


@pytest.fixture
def cupy():
    """Return CuPy."""
    return cuda.cupy()


@pytest.fixture
def asynchronous():
    """Skip a test without a GPU, because the host does work at once."""
    if not cupy_or_host.REAL:
        pytest.skip(reason="there is no GPU")
