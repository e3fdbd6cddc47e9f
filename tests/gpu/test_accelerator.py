"""Tests GPUs by PyTorch alone, on streams that are simulated; training on them: tests/torch."""

import functools
import logging
from contextlib import nullcontext

import kernel_cases as cases
import numpy as np
import pytest
from launching import needed

from mpiring import ConfigError, MissingDependencyError, TransportError
from mpiring.gpu import arrays, cuda
from mpiring.gpu.interface import await_event
from mpiring.gpu.vectors import multiply
from mpiring.memory.window import PAGE_BYTES

torch = needed("torch")


@pytest.fixture
def accelerator(monkeypatch):
    import simulated_accelerator
    simulated_accelerator.install(monkeypatch)
    from mpiring.gpu import accelerator
    monkeypatch.setattr(accelerator, "_devices", {})
    monkeypatch.setattr(arrays, "device_of", functools.cache(arrays.device_of.__wrapped__))
    return accelerator


@pytest.fixture
def device(accelerator):
    return arrays.device_of(torch.device("cpu"))


@pytest.mark.parametrize(("op", "name"), cases.CASES)
def test_results_have_the_bits_of_the_host(memory, op, name):
    """But for what PyTorch makes of NaN, and of zeros of either sign."""
    cases.check_combine(memory.device, memory, op, name, plain=True)


def test_copies_and_zeros(device, memory):
    x = memory.put(np.arange(9.0), 64)
    y = device.allocate(72).view(float)
    device.combine("mean", [x], 2, [y])
    assert np.array_equal(memory.get(y), np.arange(9.0) / 2)
    device.combine("sum", [x], 1, [y])
    device.clear(y[2:4])
    assert np.array_equal(memory.get(y), [0, 1, 0, 0, 4, 5, 6, 7, 8])
    array = device.gpu.array(y[1:9], (4, 2))
    assert array.shape == (4, 2) and array[1, 1] == 4.0
    assert device.gpu.is_finite(array) and not device.gpu.is_finite(array / 0)


def test_tensors_of_any_shape_are_vectors(device, memory):
    cube = torch.arange(24.0).requires_grad_()
    part = cube.view(2, 3, 4)[1]
    vector = arrays.vector_of(part)
    assert (vector.device, vector.size, vector.dtype) == (device, 12, np.float32)
    assert np.array_equal(memory.get(vector[2:5]), [14, 15, 16])
    with torch.inference_mode():
        x = torch.ones(5, dtype=torch.bfloat16)
        device.combine("sum", [arrays.vector_of(x)] * 3, 2, [arrays.vector_of(x)])
        await_event(device.event())
        assert (x == 1.5).all()
        lent = device.allocate(4)
    device.clear(lent)
    await_event(device.event())
    with pytest.raises(ConfigError, match="not contiguous"):
        arrays.vector_of(torch.ones(4, 4).T)


def test_memory_is_kept_until_streams_have_done_with_it(device, monkeypatch):
    """Its block is free for others only behind what is queued on them when it dies."""
    used = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: used.append(stream))
    x = device.allocate(64)
    assert len(set(used)) == 4
    device.gpu.array(x, (64,))
    assert len(set(used)) == 5, "the user's"


def test_new_memory_is_not_written_to_later(device, memory, monkeypatch):
    """As PyTorch does where algorithms are to be deterministic."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **how: (
        x := empty(*size, **how), x.fill_(255) if x.numel() else x)[1])
    for _ in range(30):
        x = device.allocate(64)
        device.clear(x)
        assert not memory.get(x).any()


def test_what_takes_cupy_says_so(device):
    with pytest.raises(OSError, match="by CuPy, and on NVIDIA's GPUs, only"):
        device.gpu.export(device.allocate(4))
    with pytest.raises(OSError, match="by CuPy, and on NVIDIA's GPUs, only"):
        device.gpu.open((0,) * 8, 4, device)
    with pytest.raises(MissingDependencyError, match="_multiply needs CuPy: pip install cupy"):
        multiply(device.allocate(4).view(np.float32), 2)
    with pytest.raises(ConfigError, match="no event of PyTorch's"):
        device.gpu.follow(object())


def test_a_gpu_that_fails_or_is_full_says_so(device, accelerator, monkeypatch):
    event = device.event()

    def fail(*arguments, **more):
        raise torch.OutOfMemoryError("illegal address")

    monkeypatch.setattr(event.event, "query", fail)
    with pytest.raises(TransportError, match="the GPU failed: illegal address"):
        event.test()
    stream = device.gpu.user_stream()
    monkeypatch.setattr(stream._stream, "synchronize", fail)
    with pytest.raises(TransportError, match="the GPU failed: illegal address"):
        stream.synchronize()
    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(MemoryError, match=r"64 bytes on GPU cpu \(simulated\): illegal address"):
        device.allocate(64)


def test_memory_that_cannot_be_pinned_is_told_of(device, monkeypatch, caplog):
    monkeypatch.undo()
    memory = np.empty(3 * PAGE_BYTES, np.uint8)
    memory = memory[-memory.ctypes.data % PAGE_BYTES:][:PAGE_BYTES]
    with caplog.at_level(logging.WARNING, "mpiring"):
        device.gpu.pin(memory)
    assert "be locked for GPU cpu (simulated) (PyTorch cannot do that for cpu)" in caplog.text


class Refusing:
    """As torch.cuda.cudart(): locks each address once."""

    def __init__(self):
        self.locked = []

    def cudaHostRegister(self, address, nbytes, flags):
        if address in self.locked:
            return 712
        self.locked.append(address)
        return 0

    def cudaHostUnregister(self, address):
        self.locked.remove(address)


def test_pages_are_locked_by_cuda_for_as_long_as_they_are_mapped(accelerator, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda where: "H200")
    device = accelerator.device(torch.device("cuda", 3), "")
    monkeypatch.undo()
    cudart, asked = Refusing(), []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: (
        asked.append(index), nullcontext())[1])

    def zeros(n, device):
        raise RuntimeError("CUDA's last error")

    monkeypatch.setattr(torch, "zeros", zeros)
    pages = np.empty(3 * PAGE_BYTES, np.uint8)
    start = -pages.ctypes.data % PAGE_BYTES
    for _ in range(2):
        device.gpu.pin(pages[start:start + PAGE_BYTES])
    device.gpu.pin(pages[start + 1:])
    assert len(cudart.locked) == 1
    # Some other library has locked the next page.
    cudart.locked.append(pages.ctypes.data + start + PAGE_BYTES)
    device.gpu.pin(pages[start + PAGE_BYTES:][:PAGE_BYTES])
    del pages
    assert len(cudart.locked) == 1 and not caplog.text and set(asked) == {3}


@pytest.mark.parametrize("hip", [None, "7.1"])
def test_cupy_is_taken_where_it_is_and_the_gpu_is_nvidias(accelerator, monkeypatch, hip):
    asked, of_cupy = [], object()

    def cupy_device(index):
        asked.append(index)
        if index == 1:
            raise MissingDependencyError("no compiler")
        return of_cupy

    monkeypatch.setattr(cuda, "device", cupy_device)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda where: "H200")
    gpu_0, gpu_1 = (arrays.device_of(torch.device("cuda", index)) for index in (0, 1))
    assert gpu_1 is arrays.device_of(torch.device("cuda", 1)) and repr(gpu_1) == "GPU cuda:1 (H200)"
    assert asked == ([] if hip else [0, 1])
    assert (gpu_0 is of_cupy) == (hip is None)
    with pytest.raises(OSError, match="on NVIDIA's GPUs, only" if hip else "no compiler"):
        gpu_1.gpu.export(None)
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda where: "Max 1550")
    assert repr(arrays.device_of(torch.device("xpu", 2))) == "GPU xpu:2 (Max 1550)"


def test_a_pytorch_without_a_gpu_says_so(accelerator, monkeypatch):
    for available, wish, text in [
            (None, "", "finds no GPU: install"), (torch.device("mps"), "", "finds no GPU: install"),
            (torch.device("xpu"), "cuda", "finds no GPU of kind cuda: install")]:
        monkeypatch.setattr(torch.accelerator, "current_accelerator",
                            lambda check_available: available)
        with pytest.raises(MissingDependencyError, match=text):
            accelerator.available(wish)
    monkeypatch.setattr(torch.accelerator, "current_accelerator",
                        lambda check_available: torch.device("xpu"))
    assert accelerator.available().type == accelerator.available("xpu").type == "xpu"
