"""CuPy with one GPU, which is the host: work is done when it is queued; g++ compiles kernels.

Tests put this folder on the path where there is no GPU. They then run the calls to CUDA, the
kernels and memory that processes share as on a real GPU, but not its asynchronous execution, which
`simulated_gpu` has.
"""

import ctypes
import functools
import hashlib
import mmap
import os
import re
import shutil
import struct
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

__version__ = "14.2.0"
_SHIM, _DRIVER = (Path(__file__).with_name(name) for name in ("kernels.cpp", "driver.cpp"))
# Smaller numbers than on a GPU, so that loops over the grid have several iterations.
_BLOCKS, _THREADS = 3, 64
_SAME = {"arange", "ascontiguousarray", "asfortranarray", "empty", "exp", "full", "isfinite",
         "log", "matmul", "maximum", "ones", "zeros", "zeros_like"}


class ndarray(NDArrayOperatorsMixin):
    """An array that, like CuPy's, works only with arrays of its kind."""

    def __init__(self, shape, dtype=float, memptr=None):
        if memptr is None:
            self.inside = np.empty(shape, dtype)
        else:
            nbytes = int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize
            memory = (ctypes.c_ubyte * nbytes).from_address(memptr.ptr) if nbytes else b""
            self.inside = np.frombuffer(memory, dtype).reshape(shape)
        self._owner = memptr

    dtype = property(lambda self: self.inside.dtype)
    shape = property(lambda self: self.inside.shape)
    strides = property(lambda self: self.inside.strides)
    size = property(lambda self: self.inside.size)
    nbytes = property(lambda self: self.inside.nbytes)
    ndim = property(lambda self: self.inside.ndim)
    flags = property(lambda self: self.inside.flags)
    data = property(lambda self: SimpleNamespace(ptr=self.inside.ctypes.data))
    device = property(lambda self: SimpleNamespace(id=0))
    T = property(lambda self: self._of(self.inside.T))
    __cuda_array_interface__ = property(lambda self: {})

    def _of(self, inside):
        return wrapped(inside, self._owner)

    def __array__(self, *args, **kwargs):
        raise TypeError("Implicit conversion to a NumPy array is not allowed")

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        return _calculated(getattr(ufunc, method), inputs, kwargs)

    def __len__(self):
        return len(self.inside)

    def __float__(self):
        return float(self.inside)

    def __int__(self):
        return int(self.inside)

    def __bool__(self):
        return bool(self.inside)

    def __getitem__(self, part):
        return self._of(self.inside[_unwrapped(part)])

    def __setitem__(self, part, value):
        if isinstance(value, np.ndarray) and value.ndim:
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        self.inside[_unwrapped(part)] = _unwrapped(value)

    def __getattr__(self, name):
        """Return a method of NumPy arrays."""
        if name not in ("all", "any", "argmax", "astype", "copy", "fill", "max", "mean", "min",
                        "ravel", "reshape", "sum", "view"):
            raise AttributeError(name)

        def method(*args, **kwargs):
            result = getattr(self.inside, name)(*map(_unwrapped, args), **kwargs)
            return self._of(np.asarray(result)) if result is not None else None

        return method

    def get(self):
        """Return a copy in host memory."""
        return self.inside.copy()

    def set(self, x):
        """Copy an array from host memory."""
        assert type(x) is np.ndarray and x.shape == self.shape and x.dtype == self.dtype
        self.inside[...] = x


def wrapped(inside, owner=None):
    """Return an array on the GPU with the memory of a NumPy array; not in CuPy."""
    x = ndarray.__new__(ndarray)
    x.inside, x._owner = inside, owner
    return x


def _unwrapped(x):
    if isinstance(x, tuple):
        return tuple(map(_unwrapped, x))
    return x.inside if isinstance(x, ndarray) else x


def _calculated(function, args, kwargs):
    for x in args:
        if isinstance(x, np.ndarray) and x.ndim:
            raise TypeError(f"Unsupported type {type(x)}")
    with np.errstate(all="ignore"):
        result = function(*map(_unwrapped, args),
                          **{name: _unwrapped(x) for name, x in kwargs.items()})
    out = kwargs.get("out")
    if out is not None:
        return out[0] if isinstance(out, tuple) else out
    return wrapped(np.asarray(result)) if result is not None else None


def __getattr__(name):
    if name not in _SAME:
        raise AttributeError(f"has CuPy {name}, and does it the same?")
    return lambda *args, **kwargs: _calculated(getattr(np, name), args, kwargs)


def asarray(x, dtype=None):
    """Return an array on the GPU."""
    return x if isinstance(x, ndarray) else wrapped(np.array(x, dtype))


def asnumpy(x):
    """Return an array in host memory."""
    return x.get() if isinstance(x, ndarray) else np.asarray(x)


def savez(path, **arrays):
    """Save arrays to a file."""
    np.savez(path, **{name: x.get() for name, x in arrays.items()})


def get_default_memory_pool():
    """Return the pool of memory, which holds nothing."""
    return SimpleNamespace(free_all_blocks=lambda: None)


class CUDARuntimeError(RuntimeError):
    """A status of CUDA that is no success."""

    def __init__(self, status):
        super().__init__(f"status {status}")
        self.status = status


class _Runtime:
    """CUDA's runtime: allocations are files in memory, which other processes can open."""

    CUDARuntimeError = CUDARuntimeError
    memcpyDefault, hostAllocPortable = 4, 1

    def __init__(self):
        self._allocations, self._opened, self._locked = {}, {}, set()

    def getDeviceCount(self):
        # As the real one does. Later, the library is found by its name.
        ctypes.CDLL(_compiled("driver", _DRIVER.read_text(), "-Wl,-soname,libcuda.so.1"))
        return 1

    def getDevice(self):
        return 0

    def setDevice(self, index):
        self._check(index == 0, 101)

    def deviceGetAttribute(self, attribute, index):
        self._check(attribute == 91, 1)
        return 1

    def getDeviceProperties(self, index):
        return {"name": b"the host", "multiProcessorCount": 1}

    def runtimeGetVersion(self):
        return 13000

    driverGetVersion = runtimeGetVersion

    def memGetInfo(self):
        total = 64 << 30
        return total - sum(len(memory) for memory, _ in self._allocations.values()), total

    def pointerGetAttributes(self, address):
        return SimpleNamespace(device=0)

    @staticmethod
    def _check(holds, status):
        if not holds:
            raise CUDARuntimeError(status)

    def malloc(self, nbytes):
        file = os.memfd_create("gpu")
        os.ftruncate(file, nbytes)
        address, memory = _mapped(file, nbytes)
        self._allocations[address] = memory, file
        ctypes.memset(address, 0xA5, min(nbytes, 64 << 10))
        return address

    def free(self, address):
        self._check(address in self._allocations, 1)
        os.close(self._allocations.pop(address)[1])

    def memcpyAsync(self, out, x, nbytes, kind, stream):
        self._check(kind == self.memcpyDefault and stream, 21)
        ctypes.memmove(out, x, nbytes)

    def memsetAsync(self, out, value, nbytes, stream):
        ctypes.memset(out, value, nbytes)

    def streamSynchronize(self, stream):
        self._check(stream, 400)

    def eventRecord(self, event, stream):
        self._check(event, 400)

    def eventQuery(self, event):
        return 0

    def streamWaitEvent(self, stream, event):
        self._check(event, 400)

    def hostRegister(self, address, nbytes, flags):
        self._check(address % mmap.PAGESIZE == 0, 1)
        self._check(address not in self._locked, 712)
        self._locked.add(address)

    def hostUnregister(self, address):
        self._check(address in self._locked, 713)
        self._locked.remove(address)

    def ipcGetMemHandle(self, address):
        self._check(address in self._allocations, 1)
        memory, file = self._allocations[address]
        return struct.pack("<8q", os.getpid(), file, len(memory), *range(5))

    def ipcOpenMemHandle(self, handle):
        process, number, nbytes, *_ = struct.unpack("<8q", handle)
        # CUDA refuses memory of the same process, too.
        self._check(process != os.getpid(), 201)
        file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
        address, memory = _mapped(file, nbytes)
        os.close(file)
        self._opened[address] = memory
        return address

    def ipcCloseMemHandle(self, address):
        self._check(address in self._opened, 1)
        del self._opened[address]


def _mapped(file, nbytes):
    memory = mmap.mmap(file, nbytes)
    return np.frombuffer(memory, np.uint8).ctypes.data, memory


class _Used(threading.local):
    """The streams that a thread uses, the current one last."""

    def __init__(self):
        self.streams = []


_used = _Used()


class _Stream:
    """A stream, whose work is always done."""

    def __init__(self, null=False, non_blocking=False):
        # The CUDA Array Interface numbers the default stream 1.
        self.ptr = 1 if null else id(self)

    def __enter__(self):
        _used.streams.append(self)
        return self

    def __exit__(self, *error):
        _used.streams.pop()

    def synchronize(self):
        pass


_Stream.null = _Stream(null=True)


class _Event:
    def __init__(self, block=False, disable_timing=False):
        self.ptr, self.when = id(self), None

    def record(self, stream=None):
        self.when = time.perf_counter()

    def synchronize(self):
        pass


class _Module:
    def load(self, code):
        assert type(code) is bytes
        self._library = ctypes.CDLL(code.decode())

    def get_function(self, name):
        run = getattr(self._library, f"run_{name}")
        size = ctypes.c_ulong.in_dll(self._library, f"size_{name}").value

        def launch(grid, block, args, shared_mem=0, stream=None):
            (job,) = args
            assert isinstance(stream, _Stream) and job.nbytes == size and len(grid) == 1
            run(ctypes.c_void_p(job.ctypes.data))

        return launch


def compile_using_nvrtc(source, options=(), arch=None, filename="kern.cu"):
    """Compile a kernel with g++; return the path of the library as its code."""
    assert type(source) is str and "--fmad=false" in options
    (name,) = re.findall(r"(\w+)\(const MPIRING_CONSTANT Job job\)", source)
    text = (f"{_SHIM.read_text()}namespace of_{name} {{\n{source}\n"
            f"static void thread(const void *job) {{ {name}(*(const Job *)job); }}\n"
            f'extern "C" {{ unsigned long size_{name} = sizeof(Job); }}\n'
            f'extern "C" void run_{name}(const void *job) '
            f"{{ launch(thread, job, {_BLOCKS}, {_THREADS}); }}\n}}\n")
    library = _compiled(
        name, text, "-ffp-contract=off", "-fno-strict-aliasing", "-Wno-unknown-pragmas",
        "-Wno-parentheses", "-Wno-unused-function", "-Wno-unused-variable", "-Wno-bool-operation")
    return library.encode(), None


@functools.cache
def _compiled(name, text, *options):
    """Return the path of a library, which is compiled once for all processes."""
    folder = Path(tempfile.gettempdir(), f"mpiring-host-kernels-{os.getuid()}")
    folder.mkdir(exist_ok=True)
    library = folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        new = library.with_suffix(f".{os.getpid()}")
        subprocess.run(
            [shutil.which("g++"), "-O1", "-std=c++17", "-shared", "-fPIC", "-Wall", "-Werror",
             *options, "-x", "c++", "-o", new, "-"], input=text, text=True, check=True, timeout=280)
        new.replace(library)
    return str(library)


def _pinned(nbytes, flags):
    return mmap.mmap(-1, nbytes)


cuda = SimpleNamespace(
    runtime=_Runtime(), driver=SimpleNamespace(ctxGetCurrent=lambda: 1),
    nvrtc=SimpleNamespace(getVersion=lambda: (13, 0)), Stream=_Stream, Event=_Event,
    compiler=SimpleNamespace(compile_using_nvrtc=compile_using_nvrtc),
    function=SimpleNamespace(Module=_Module),
    pinned_memory=SimpleNamespace(PinnedMemory=_pinned,
                                  PinnedMemoryPointer=lambda memory, offset: memory),
    UnownedMemory=lambda address, nbytes, owner, index: SimpleNamespace(ptr=address, owner=owner),
    MemoryPointer=lambda memory, offset: memory,
    Device=lambda index: SimpleNamespace(
        use=lambda: None, synchronize=lambda: None, pci_bus_id=f"0000:{index}"),
    get_current_stream=lambda index=0: _used.streams[-1] if _used.streams else _Stream.null,
    get_elapsed_time=lambda began, ended: 1e3 * (ended.when - began.when))
