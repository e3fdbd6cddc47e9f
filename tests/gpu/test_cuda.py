"""Tests what CUDA is asked for, by a CuPy that only writes it down; see tests/gpu for the real one.
"""

import builtins
import ctypes
import mmap
import operator
import re
import struct
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from mpiring.errors import ConfigError, MissingDependencyError, TransportError
from mpiring.gpu import arrays, cuda, kernels, stream_memory, warps
from mpiring.gpu.interface import Flags
from mpiring.operations.agreement import collective_call
from mpiring.remedies import pip_install_cupy


class CudaError(RuntimeError):
    """As CuPy's."""

    def __init__(self, status):
        super().__init__(f"cuda error {status}")
        self.status = status


class FakeRuntime:
    """Two GPUs, and the thread's current one."""

    CUDARuntimeError = CudaError
    memcpyDefault, hostAllocPortable = 4, 1
    # What CuPy's take: so many whole numbers, or a handle.
    takes = {"malloc": 1, "free": 1, "deviceGetAttribute": 2, "eventRecord": 2,
             "streamWaitEvent": 2, "streamSynchronize": 1, "memcpyAsync": 5, "hostRegister": 3,
             "hostUnregister": 1, "ipcGetMemHandle": 1, "ipcOpenMemHandle": 0,
             "ipcCloseMemHandle": 1}

    def __init__(self):
        self.current, self.context = 0, 1
        self.asked_on = None
        self.calls, self.set = [], []
        self.status, self.fails = 600, {}
        self.returns = {"malloc": 1 << 21, "ipcGetMemHandle": bytes(range(64)),
                        "ipcOpenMemHandle": 4096, "deviceGetAttribute": 1}

    def getDeviceCount(self):
        return 2

    def getDeviceProperties(self, index):
        return {"name": b"Fake", "multiProcessorCount": 10}

    def getDevice(self):
        return self.current

    def setDevice(self, index):
        self.set.append(index)
        self.current = index

    def eventQuery(self, event):
        self.asked_on = self.current
        return self.status

    def pointerGetAttributes(self, address):
        return SimpleNamespace(device=1)

    def __getattr__(self, name):
        count = self.takes[name]

        def call(*args):
            if count:
                assert len([*map(operator.index, args)]) == count, (name, args)
            else:
                assert [type(x) for x in args] == [bytes] and len(args[0]) == 64, (name, args)
            self.calls.append((name, self.current, *args))
            if self.fails.get(name):
                raise CudaError(self.fails[name].pop())
            return self.returns.get(name)

        return call


class FakeArray:
    """As a CuPy array."""

    def __init__(self, x, dense=True):
        self.x, self.size, self.dtype = x, x.size, x.dtype
        self.shape, self.strides = x.shape, x.strides
        self.device = SimpleNamespace(id=1)
        self.data = SimpleNamespace(ptr=0x1000)
        self.flags = SimpleNamespace(c_contiguous=dense, f_contiguous=False)


class FakeModule:
    """As CuPy's: what it has been given to load, and the launches of what is in it."""

    def __init__(self, runtime):
        self._runtime = runtime

    def load(self, code):
        assert type(code) is bytes
        self._runtime.calls.append(("load", self._runtime.current, code))

    def get_function(self, name):
        def launch(grid, block, args, shared_mem=0, stream=None):
            assert type(grid) is type(block) is type(args) is tuple
            assert all(type(x) is np.ndarray and x.size == 1 for x in args), "not by value"
            self._runtime.calls.append(
                ("launch", self._runtime.current, name, stream.ptr, *args))

        return launch


def _fake():
    runtime = FakeRuntime()

    def compiled(source, options=(), arch=None, filename="kern.cu"):
        assert type(source) is str and type(options) is tuple
        return " ".join(options).encode(), None

    pool = SimpleNamespace(free_all_blocks=lambda: runtime.calls.append(("free_all_blocks",)))
    pointers = iter(range(100, 1000))
    return SimpleNamespace(
        __version__="14.2.0", ndarray=FakeArray, get_default_memory_pool=lambda: pool,
        cuda=SimpleNamespace(
            runtime=runtime, nvrtc=SimpleNamespace(getVersion=lambda: (13, 0)),
            driver=SimpleNamespace(ctxGetCurrent=lambda: runtime.context),
            compiler=SimpleNamespace(compile_using_nvrtc=compiled),
            function=SimpleNamespace(Module=lambda: FakeModule(runtime)),
            Stream=lambda non_blocking: SimpleNamespace(ptr=next(pointers)),
            UnownedMemory=lambda address, nbytes, owner, index: (address, nbytes, index),
            MemoryPointer=lambda memory, offset: memory,
            Event=lambda block, disable_timing: SimpleNamespace(ptr=next(pointers)),
            get_current_stream=lambda index: SimpleNamespace(ptr=7)))


@pytest.fixture
def cupy(monkeypatch):
    fake = _fake()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    cuda.cupy.cache_clear()
    monkeypatch.setattr(cuda, "_devices", {})
    monkeypatch.setattr(kernels, "_built", {})
    monkeypatch.setattr(ctypes, "CDLL", _no_library)
    stream_memory.driver.cache_clear()
    yield fake
    cuda.cupy.cache_clear()
    stream_memory.driver.cache_clear()


def _no_library(name):
    raise OSError(f"{name}: cannot open shared object file")


@pytest.fixture
def driver(cupy, monkeypatch):
    """Return NVIDIA's driver, as ctypes opens it: the status that it returns, and its calls."""
    def batch(stream, count, address, flags):
        raw = ctypes.string_at(address, 48 * count)
        operations = [struct.unpack_from("<I4xQQI", raw, start) for start in range(0, len(raw), 48)]
        driver.calls.append((cupy.cuda.runtime.current, stream, operations, flags))
        return driver.status

    driver = SimpleNamespace(cuStreamBatchMemOp_v2=batch, status=0, calls=[])
    monkeypatch.setattr(ctypes, "CDLL", {"libcuda.so.1": driver}.__getitem__)
    monkeypatch.setattr(cuda.Cuda, "pinned", lambda self, nbytes: np.zeros(nbytes, np.uint8))
    cupy.cuda.runtime.status = 0
    return driver


@pytest.fixture
def runtime(cupy):
    return cupy.cuda.runtime


def test_without_cupy_the_error_names_the_package(monkeypatch):
    cuda.cupy.cache_clear()
    real = builtins.__import__

    def importing(name, *args):
        if name == "cupy":
            raise ImportError("No module named 'cupy'")
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", importing)
    for ask in (lambda: cuda.device(0), cuda.versions, lambda: arrays.vector_on_gpu(1)):
        with pytest.raises(MissingDependencyError, match=re.escape(pip_install_cupy())):
            ask()


def test_without_a_driver_or_compiler_the_error_says_so(cupy):
    def fails(*args):
        raise CudaError("InsufficientDriver\nand much more")

    cupy.cuda.nvrtc.getVersion = fails
    with pytest.raises(MissingDependencyError, match=r"cannot compile.*\[ctk\].*sufficientDriver$"):
        cuda.device(0)
    cupy.cuda.runtime.getDeviceCount = fails
    with pytest.raises(MissingDependencyError, match="finds no GPU: .*InsufficientDriver"):
        cuda.device(0)


def test_a_gpu_is_one_object_and_has_to_be_there(cupy):
    assert cuda.device(1) is cuda.device(1) is not cuda.device(0)
    assert repr(cuda.device(1)) == "GPU 1 (Fake)"
    for index in (-1, 2):
        with pytest.raises(ConfigError, match="this process sees 2"):
            cuda.device(index)


def test_the_threads_device_is_what_it_was(runtime):
    gpu = cuda.Cuda(1)
    with pytest.raises(ZeroDivisionError), gpu.current():
        assert runtime.current == 1
        raise ZeroDivisionError
    assert runtime.set == [1, 0]
    with cuda.Cuda(0).current():
        assert runtime.set == [1, 0], "nothing to be done"
    # A thread that used no GPU gets no context on another.
    runtime.context = 0
    with gpu.current():
        pass
    assert runtime.set == [1, 0, 1]


def test_all_calls_find_their_device_current(runtime):
    on = cuda.device(1)
    x = on.allocate(100)
    host = pages(100)
    on.to_host(x, host), on.to_device(host, x)
    on.combine("sum", [x, x], 1, [x])
    on.gpu.pin(host)
    on.gpu.close(on.gpu.open(on.gpu.export(x), 100, on))
    names = {call[0]: call[1] for call in runtime.calls if call[0] != "streamWaitEvent"}
    assert set(names) == {"malloc", "memcpyAsync", "eventRecord", "hostRegister", "ipcGetMemHandle",
                          "ipcOpenMemHandle", "ipcCloseMemHandle", "load", "launch"}
    assert set(names.values()) == {1} and runtime.current == 0
    event = on.event()
    on.gpu.follow(event)
    assert runtime.calls[-1] == ("streamWaitEvent", 1, 7, event.pointer)
    assert not event.test() and runtime.asked_on == 1 and runtime.current == 0


def pages(nbytes):
    """Return memory that begins with a page, as all that processes share."""
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def test_a_kernel_is_compiled_once_for_each_gpu_and_keeps_subnormal_numbers(runtime):
    """CuPy's RawKernel, which this CuPy does not have, would compile with -ftz=true."""
    for index in (0, 0, 1):
        x = cuda.device(index).allocate(100).view(np.float32)
        cuda.device(index).combine("sum", [x, x], 1, [x])
    assert [call[:2] for call in runtime.calls if call[0] == "load"] == [("load", 0), ("load", 1)]
    (code,) = {call[2] for call in runtime.calls if call[0] == "load"}
    assert b"--fmad=false" in code and b"ftz" not in code
    launches = [call for call in runtime.calls if call[0] == "launch"]
    assert [call[1] for call in launches] == [0, 0, 1]
    assert {call[2] for call in launches} == {"mpiring_sum_float32_2_to_1_none"}


def test_kernels_get_addresses_and_numbers_on_the_stream_for_work(runtime):
    kernel, device = warps.narrowing("float16"), cuda.device(1)
    x = device.allocate(12).view(np.float32)
    device.launch(kernel, None, x, None, 7, x[1:])
    device.launch(kernel, None, x[:0], None, 7, x)
    (launch,) = [call for call in runtime.calls if call[0] == "launch"]
    assert launch[1:4] == (1, kernel.name, device._work.changes()._stream.ptr)
    assert launch[4].tobytes() == struct.pack("=QQIxxxxQq", 1 << 21, 0, 7, (1 << 21) + 4, 3)


def test_events_end_once_and_tell_of_failures(runtime):
    event = cuda.device(0).event()
    assert not event.test()
    runtime.status = 700
    with pytest.raises(TransportError, match="the GPU failed: cuda error 700"):
        event.test()
    runtime.status = 0
    assert event.test()
    runtime.status = 700
    assert event.test(), "once done, always done"


def test_a_users_stream_is_that_of_the_array(runtime):
    x = cuda.device(1).allocate(100)
    for stream, pointer in [(None, 7), (8, 8), (SimpleNamespace(cuda_stream=0), 0)]:
        runtime.calls.clear()
        used = x.device.gpu.user_stream(stream)
        used.download(x, pages(100)), used.upload(pages(100), x), used.record()
        used.synchronize()
        assert [(call[1], call[-1]) for call in runtime.calls] == [(1, pointer)] * 4
        assert runtime.current == 0
    runtime.fails["streamSynchronize"] = [700]
    with pytest.raises(TransportError, match="the GPU failed: cuda error 700"):
        used.synchronize()


def test_memory_is_whole_blocks_freed_with_its_last_owner(runtime):
    on = cuda.device(1)
    x = on.allocate((2 << 20) + 1)
    assert ("malloc", 1, 4 << 20) in runtime.calls and x.nbytes == (2 << 20) + 1
    part = x[5:9]
    del x
    assert "free" not in {call[0] for call in runtime.calls}
    del part
    assert runtime.calls[-1] == ("free", 1, 1 << 21)
    runtime.fails["malloc"] = [2]
    on.allocate(10)
    assert ("free_all_blocks",) in runtime.calls
    runtime.fails["malloc"] = [2, 2]
    with pytest.raises(MemoryError, match=r"2097152 bytes on GPU 1 \(Fake\): cuda error 2"):
        on.allocate(10)


def test_handles_are_eight_numbers_and_refusals_are_errors_of_the_system(runtime):
    on = cuda.device(0)
    x = on.allocate(10)
    handle = on.gpu.export(x)
    assert len(handle) == 8 and struct.pack("<8q", *handle) == bytes(range(64))
    assert on.gpu.open(handle, 10, on).address == 4096
    assert ("ipcOpenMemHandle", 0, bytes(range(64))) in runtime.calls
    runtime.fails = {"ipcGetMemHandle": [801], "ipcOpenMemHandle": [217]}
    with pytest.raises(OSError, match="801"):
        on.gpu.export(x)
    with pytest.raises(OSError, match="217"):
        on.gpu.open(handle, 10, on)


def test_a_barrier_is_one_call_of_the_driver(runtime, driver):
    """It writes (2) the own word, and waits (1) for the others; 32 bits of a number count."""
    device, words = cuda.device(1), np.zeros((3, 16), np.uint32)
    assert device.gpu.unqueued == ""
    flags = Flags([word[:1] for word in words], 1)
    first, *others = [words.ctypes.data + 64 * rank for rank in (1, 0, 2)]
    for number in (7, (1 << 32) + 8):
        del driver.calls[:]
        device.meet(flags, number)
        number %= 1 << 32
        stream = device._work.changes()._stream.ptr
        assert driver.calls == [(1, stream, [
            (2, first, number, 0), *((1, other, number, 0) for other in others)], 0)]
    assert runtime.current == 0
    driver.status = 700
    with pytest.raises(TransportError, match="failed: cuStreamBatchMemOp, barrier 9 of 3 .*700"):
        device.meet(flags, 9)


def test_a_gpu_without_barriers_of_streams_says_why(runtime, driver, monkeypatch):
    driver.status = 801
    assert "cuda error 801" in cuda.Cuda(0).unqueued
    driver.status = 0
    monkeypatch.setitem(runtime.returns, "deviceGetAttribute", 0)
    assert "other addresses" in cuda.Cuda(0).unqueued
    stream_memory.driver.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    assert re.search("cuStreamBatchMemOp_v2.*; install a driver for CUDA 12", cuda.Cuda(0).unqueued)
    monkeypatch.setattr(ctypes, "CDLL", _no_library)
    assert cuda.Cuda(0).unqueued == "libcuda.so.1: cannot open shared object file"


def test_pages_are_locked_as_long_as_somebody_has_them(runtime, caplog):
    gpu = cuda.Cuda(0)
    gpu.pin(pages(1000)[1:])
    assert not runtime.calls, "what lies elsewhere in its pages is not ours"
    memory = pages(100)
    address = memory.ctypes.data
    view = memory[10:]
    gpu.pin(memory)
    asked = len(runtime.calls)
    gpu.pin(memory)
    assert len(runtime.calls) == asked, "they are"
    others = pages(100)
    runtime.fails["hostRegister"] = [1, 712]
    gpu.pin(others)
    assert not caplog.text, "somebody else has locked them"
    gpu.pin(others)
    assert "100 bytes of host memory cannot be locked" in caplog.text
    del memory, others
    assert "hostUnregister" not in {call[0] for call in runtime.calls}
    del view
    assert runtime.calls[-1] == ("hostUnregister", 0, address)


def test_cupy_arrays_are_ready_when_their_stream_is(runtime):
    x = arrays.vector_on_gpu(FakeArray(np.zeros((3, 4), np.float32)))
    assert (x.address, x.size, x.dtype) == (0x1000, 12, np.float32)
    assert x.device is cuda.device(1) and x.owner.shape == (3, 4)
    assert runtime.calls[-1] == ("eventRecord", 1, x.ready.pointer, 7)
    with pytest.raises(ConfigError, match="cupy.ascontiguousarray"):
        arrays.vector_on_gpu(FakeArray(np.zeros((3, 4)), dense=False))


class Foreign:
    """What has the interface, and is of no package known here."""

    def __init__(self, **changed):
        self.__cuda_array_interface__ = {
            "shape": (3, 4), "typestr": "<f4", "data": (0x2000, False), "version": 3} | changed


@pytest.mark.parametrize("changed", [
    {}, {"strides": None}, {"strides": (16, 4)}, {"shape": (3, 1, 4), "strides": (16, 7, 4)}])
def test_the_interface_of_others_is_honoured(runtime, changed):
    x = arrays.vector_on_gpu(Foreign(**changed))
    assert (x.address, x.size, x.dtype, x.ready) == (0x2000, 12, np.float32, None)
    x = arrays.vector_on_gpu(Foreign(**changed, stream=1))
    assert runtime.calls[-1] == ("eventRecord", 1, x.ready.pointer, 1)
    with pytest.raises(ConfigError, match="on which stream .* pass cupy.asarray"):
        arrays.vector_on_gpu(Foreign(**changed, version=2))
    empty = arrays.vector_on_gpu(Foreign(
        shape=(0, 4), data=(0, False), strides=(0, 0), stream=1))
    assert empty.size == 0 and empty.ready is None


@pytest.mark.parametrize("flags", [None, {"C_CONTIGUOUS": True}])
def test_arrays_of_others_are_described_without_flags_and_shape(cupy, flags):
    """Numba's flags are a dict, and a buffer of RAPIDS' has neither."""
    x = Foreign()
    if flags is not None:
        x.flags, x.shape = flags, (3, 4)
    shape = "(12,)" if flags is None else "(3, 4)"
    vector = arrays.vector_on_gpu(x)
    assert collective_call("allgather", None, x, vector).detail == f"float32 {shape} on a GPU"


@pytest.mark.parametrize(("changed", "message"), [
    *(({"strides": strides}, "not contiguous") for strides in [(4, 16), (4, 12), (32, 8), (0, 4)]),
    ({"data": (0x2000, True)}, "read-only"), ({"mask": object()}, "mask"),
    ({"typestr": ">f4"}, "foreign byte order"), ({"typestr": "|O"}, "cannot travel")])
def test_what_is_refused_is_told_as_on_the_host(cupy, changed, message):
    with pytest.raises(ConfigError, match=message):
        arrays.vector_on_gpu(Foreign(**changed))
    with pytest.raises(ConfigError, match="expected a cupy.ndarray, got builtins.list"):
        arrays.vector_on_gpu([1])
    assert arrays.vector_on_gpu(Foreign(data=(0x2000, True)), writeable=False).size == 12


def test_an_older_cupy_has_no_bfloat16(cupy):
    import ml_dtypes
    cupy.__version__ = "13.6.0"
    x = cuda.device(0).vector_at(0x3000, 4, ml_dtypes.bfloat16, None)
    with pytest.raises(ConfigError, match="13.6.0 has no bfloat16"):
        x.device.gpu.array(x, (4,))
