"""Provides a library with the functions of NCCL, for GPUs that the host simulates."""

import os
from pathlib import Path

import cupy_or_host
import simulated_gpu

from mpiring.gpu import nccl
from mpiring.gpu.interface import DeviceVector

_SOURCE = Path(__file__).with_name("host_cuda") / "nccl.cpp"


def installed(monkeypatch, gpu=None):
    """Let mpiring find the library, and a GPU of this rank alone, which is simulated if given."""
    cupy_or_host.compiler()
    path = cupy_or_host.host_cupy()._compiled("libnccl.so", _SOURCE.read_text())
    monkeypatch.setattr(nccl, "_candidates", lambda: [path])
    if gpu is not None:
        gpu.address = f"simulated {os.getpid()}"
        monkeypatch.setattr(nccl, "address_of", lambda x: (
            simulated_gpu.content(x) if isinstance(x, DeviceVector) else x).ctypes.data)
