"""Runs GPU kernels on the host, compiled by g++.

This needs no GPU. `HostStream` runs kernels at once, on host memory.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
from launching import missing

from mpiring.gpu.device import DeviceVector
from mpiring.gpu.cuda import CudaStream

_SHIM = Path(__file__).with_suffix(".cpp")
# Smaller numbers than on a GPU, so that loops over the grid have several iterations.
_BLOCKS, _THREADS = 3, 64


def compiler():
    """Return the path of g++; skip, or fail in CI, if it is missing."""
    return shutil.which("g++") or missing("no g++: apt-get install g++")


def compiled(needed, folder):
    """Compile kernels into one library, and return its path."""
    parts = [_SHIM.read_text()]
    for kernel in needed:
        name = kernel.name
        parts.append(
            f"namespace of_{name} {{\n{kernel.source}\n"
            f"static void thread(const void *job) {{ {name}(*(const Job *)job); }}\n"
            f'extern "C" {{ unsigned long size_{name} = sizeof(Job); }}\n'
            f'extern "C" void run_{name}(const void *job) '
            f"{{ launch(thread, job, {_BLOCKS}, {_THREADS}); }}\n}}\n")
    source, library = folder / "kernels.cpp", folder / "kernels.so"
    source.write_text("".join(parts))
    subprocess.run(
        [compiler(), "-O1", "-std=c++17", "-ffp-contract=off", "-fno-strict-aliasing", "-shared",
         "-fPIC", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-Wno-parentheses",
         "-Wno-unused-function", "-Wno-unused-variable", "-Wno-bool-operation",
         "-o", library, source], check=True, timeout=280)
    return library


class HostStream(CudaStream):
    """A stream that runs everything at once, on host memory.

    Args:
        library: A path, from `compiled`.
    """

    def __init__(self, library):
        self._library = ctypes.CDLL(library)
        self.launched = []

    def _launch(self, kernel, work, **values):
        self.launched.append(values)
        job = kernel.arguments(**values)
        assert job.nbytes == ctypes.c_ulong.in_dll(self._library, f"size_{kernel.name}").value
        getattr(self._library, f"run_{kernel.name}")(ctypes.c_void_p(job.ctypes.data))

    def _copy(self, to, source, nbytes):
        ctypes.memmove(to, source, nbytes)


class HostMemory:
    """Host memory in place of GPU memory; see kernel_cases.py."""

    def put(self, x, offset=0):
        """Return a vector with the elements of an array."""
        memory = np.empty(x.nbytes + 128, np.uint8)
        start = -memory.ctypes.data % 64 + offset
        copy = memory[start:start + x.nbytes].view(x.dtype)
        copy[...] = x
        return DeviceVector(None, copy.ctypes.data, x.size, x.dtype, copy)

    def get(self, x):
        """Return the content of a vector."""
        return x.owner


def same(x, y):
    """Return whether vectors have the same bits, except for NaN."""
    parts = [part.view(part.real.dtype) for part in (x, y)]
    different = parts[0].view(f"u{parts[0].itemsize}") != parts[1].view(f"u{parts[1].itemsize}")
    return all(np.isnan(parts[0][different]) & np.isnan(parts[1][different]))
