"""Tests NCCL's functions with a communicator of one rank; without a GPU, by the tests' library."""

import cupy_or_host
import fake_nccl
import numpy as np
import pytest

from mpiring.errors import TransportError
from mpiring.gpu.interface import await_event
from mpiring.gpu.nccl import Nccl, nccl_library


@pytest.fixture
def nccl(device, monkeypatch):
    if not cupy_or_host.REAL:
        fake_nccl.installed(monkeypatch)
    library = nccl_library()
    return Nccl(library, device, 0, 1, library.new_identity())


def test_each_function(nccl, device, memory):
    want = np.random.default_rng(1).standard_normal(10_001).astype(np.complex64)
    x = memory.put(want)
    nccl.allreduce(x, "sum")
    nccl.reduce_scatter([x], "mean")
    nccl.allgather([x])
    nccl.allgather_vectors([x])
    nccl.broadcast(x, 0)
    nccl.exchange({}, {})
    await_event(device.event())
    nccl.check()
    assert np.array_equal(memory.get(x), want)
    nccl.close()
    with pytest.raises(TransportError, match="is closed"):
        nccl.broadcast(x, 0)


def test_work_is_repeated(nccl, device, memory):
    """As that of a bucket is."""
    x = memory.put(np.arange(5000.0))
    with device.noting() as program:
        nccl.allreduce(x, "sum")
    assert len(program.steps) == 1 and callable(program.steps[0])
    nccl.abort()
    nccl.abort()
    with pytest.raises(TransportError, match="is closed"):
        nccl.check()


@pytest.mark.parametrize("dtype, op", [("float32", "max"), ("float16", "sum"), ("int16", "sum")])
def test_it_refuses_what_it_would_do_otherwise(nccl, memory, dtype, op):
    with pytest.raises(TypeError, match=f"NCCL has no {op} of {dtype}"):
        nccl.allreduce(memory.put(np.ones(10, dtype)), op)
