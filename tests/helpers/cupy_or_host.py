"""Provides CuPy to tests: the real package if there is a GPU, otherwise the one in host_cuda."""

import functools
import importlib.util
import os
import shutil
import sys
from pathlib import Path

from launching import missing

from mpiring.errors import MissingDependencyError
from mpiring.gpu import cuda, kernels
from mpiring.operations import on_device

_FOLDER = Path(__file__).with_name("host_cuda")


def _finds_gpu():
    try:
        cuda.cupy()
    except MissingDependencyError:
        return False
    return True


REAL = _finds_gpu()


def compiler():
    """Return the path of g++; skip, or fail in CI, if it is missing."""
    return shutil.which("g++") or missing("no g++: apt-get install g++")


@functools.cache
def host_cupy():
    """Return the package in host_cuda, without making it importable."""
    spec = importlib.util.spec_from_file_location("cupy", _FOLDER / "cupy.py")
    package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    return package


def installed(monkeypatch):
    """Make CuPy importable in this process and in the jobs that it starts; return it."""
    if not REAL:
        compiler()
        monkeypatch.setitem(sys.modules, "cupy", host_cupy())
        monkeypatch.setattr(cuda, "cupy", functools.cache(cuda.cupy.__wrapped__))
        monkeypatch.setattr(cuda, "_devices", {})
        # Each GPU of a process keeps its slots.
        monkeypatch.setattr(on_device, "SLOT_BYTES", 1 << 20)
        monkeypatch.setattr(kernels, "_built", {})
        monkeypatch.setenv("PYTHONPATH", str(_FOLDER), prepend=os.pathsep)
    return cuda.cupy()
