"""Tests GPUs by PyTorch alone, on streams that are simulated; training on them: tests/torch."""

import functools
import logging

import ml_dtypes
import numpy as np
import pytest
from launching import needed

from mpiring import ConfigError, MissingDependencyError, TransportError
from mpiring.gpu import arrays, cuda
from mpiring.gpu.device import await_event
from mpiring.gpu.vectors import multiply
from mpiring.memory.reduction import OPS, reduction

N = 301
DTYPES = ["bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
          "float16", ml_dtypes.bfloat16, "float32", "float64", "complex64", "complex128"]
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


def put(device, x):
    host, vector = device.gpu.pinned(x.nbytes), device.allocate(x.nbytes + 64)
    host.view(x.dtype)[...] = x
    vector = vector[64:]
    await_event(device.to_device(host, vector))
    return vector.view(x.dtype)


def get(device, x):
    host = device.gpu.pinned(x.nbytes)
    await_event(device.to_host(x, host))
    return host.view(x.dtype).copy()


def numbers(dtype, seed):
    """Return all bits that a dtype may have, but no NaN, whose payload PyTorch chooses."""
    random = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    if dtype == bool:
        return random.integers(0, 2, N).astype(bool)
    if dtype.kind in "iu":
        return random.integers(0, 256, N * dtype.itemsize, np.uint8).view(dtype)
    x = random.standard_normal((2, N)) * [[100], [1]]
    return (x[0] + 1j * x[1] if dtype.kind == "c" else x[0]).astype(dtype)


def defined(op, dtype):
    try:
        return reduction(op, dtype, 3)
    except ConfigError:
        return None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_have_the_bits_of_the_host(device, dtype):
    tried = 0
    for op in OPS:
        of_host = defined(op, dtype)
        for count in (1, 2, 3, 4) if of_host else ():
            xs = [numbers(dtype, seed) for seed in range(count)]
            expected = xs[0].copy()
            with np.errstate(all="ignore"):
                of_host.combine(xs, expected)
            # The result is stored elsewhere, or in place of one of the sources, or of all.
            for places in ([None], [0], [count - 1], [None, *range(count)]):
                vectors = [put(device, x) for x in xs]
                outs = [put(device, np.zeros_like(expected)) if place is None else vectors[place]
                        for place in places]
                device.combine(op, vectors, of_host.divisor, outs)
                for out in outs:
                    found = get(device, out)
                    if np.dtype(dtype).kind == "c" and op in ("prod", "mean"):
                        np.testing.assert_allclose(found, expected, rtol=1e-5)
                    else:
                        assert found.tobytes() == expected.tobytes(), (op, count, places)
                    tried += 1
    assert tried >= 48


def test_copies_and_zeros(device):
    x = put(device, np.arange(9.0))
    y = device.allocate(72).view(float)
    device.combine("sum", [x], 1, [y])
    device.clear(y[2:4])
    assert np.array_equal(get(device, y), [0, 1, 0, 0, 4, 5, 6, 7, 8])
    array = device.gpu.array(y[1:9], (4, 2))
    assert array.shape == (4, 2) and array[1, 1] == 4.0
    assert device.gpu.is_finite(array) and not device.gpu.is_finite(array / 0)


def test_tensors_of_any_shape_are_vectors(device):
    whole = torch.arange(24.0).requires_grad_()
    part = whole.view(2, 3, 4)[1]
    vector = arrays.vector_of(part)
    assert (vector.device, vector.size, vector.dtype) == (device, 12, np.float32)
    assert np.array_equal(get(device, vector[2:5]), [14, 15, 16])
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


def test_new_memory_is_not_written_to_later(device, accelerator, monkeypatch):
    """As PyTorch does where algorithms are to be deterministic."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **how: (
        x := empty(*size, **how), x.fill_(255) if x.numel() else x)[1])
    for _ in range(30):
        memory = device.allocate(64)
        device.clear(memory)
        assert not get(device, memory).any()


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
    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(MemoryError, match=r"64 bytes on GPU cpu \(simulated\): illegal address"):
        device.allocate(64)


def test_memory_that_cannot_be_pinned_is_told_of(device, accelerator, monkeypatch, caplog):
    monkeypatch.undo()
    from mpiring.memory.window import PAGE_BYTES
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
    from mpiring.memory.window import PAGE_BYTES
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda where: "H200")
    device = accelerator.device(torch.device("cuda", 3), "")
    monkeypatch.undo()
    cudart, asked = Refusing(), []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: _noted(asked, index))

    def zeros(n, device):
        raise RuntimeError("CUDA's last error")

    monkeypatch.setattr(torch, "zeros", zeros)
    whole = np.empty(3 * PAGE_BYTES, np.uint8)
    start = -whole.ctypes.data % PAGE_BYTES
    for _ in range(2):
        device.gpu.pin(whole[start:start + PAGE_BYTES])
    device.gpu.pin(whole[start + 1:])
    assert len(cudart.locked) == 1
    # Some other library has locked the next page.
    cudart.locked.append(whole.ctypes.data + start + PAGE_BYTES)
    device.gpu.pin(whole[start + PAGE_BYTES:][:PAGE_BYTES])
    del whole
    assert len(cudart.locked) == 1 and not caplog.text and set(asked) == {3}


def _noted(asked, index):
    import contextlib
    asked.append(index)
    return contextlib.nullcontext()


@pytest.mark.parametrize("hip", [None, "7.1"])
def test_cupy_is_taken_where_it_is_and_the_gpu_is_nvidias(accelerator, monkeypatch, hip):
    asked, of_cupy = [], object()

    def found(index):
        asked.append(index)
        if index == 1:
            raise MissingDependencyError("no compiler")
        return of_cupy

    monkeypatch.setattr(cuda, "device", found)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda where: "H200")
    zero, one = (arrays.device_of(torch.device("cuda", index)) for index in (0, 1))
    assert one is arrays.device_of(torch.device("cuda", 1)) and repr(one) == "GPU cuda:1 (H200)"
    assert asked == ([] if hip else [0, 1])
    assert (zero is of_cupy) == (hip is None)
    with pytest.raises(OSError, match="on NVIDIA's GPUs, only" if hip else "no compiler"):
        one.gpu.export(None)
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda where: "Max 1550")
    assert repr(arrays.device_of(torch.device("xpu", 2))) == "GPU xpu:2 (Max 1550)"


def test_a_pytorch_without_a_gpu_says_so(accelerator, monkeypatch):
    for found, wish, text in [
            (None, "", "finds no GPU: install"), (torch.device("mps"), "", "finds no GPU: install"),
            (torch.device("xpu"), "cuda", "finds no GPU of kind cuda: install")]:
        monkeypatch.setattr(torch.accelerator, "current_accelerator",
                            lambda check_available: found)
        with pytest.raises(MissingDependencyError, match=text):
            accelerator.available(wish)
    monkeypatch.setattr(torch.accelerator, "current_accelerator",
                        lambda check_available: torch.device("xpu"))
    assert accelerator.available().type == accelerator.available("xpu").type == "xpu"
