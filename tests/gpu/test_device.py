"""Tests vectors on a GPU, and what is lent to copies; the order of work is in test_on_device.py."""

from functools import partial

import kernel_cases as cases
import ml_dtypes
import numpy as np
import pytest
from gpu_memory import GpuMemory
from simulated_gpu import SimulatedGpu, content, installed

from mpiring import ConfigError, StallError
from mpiring.gpu.arrays import device_named, is_on_gpu, vector_of
from mpiring.gpu.device import Device, Staging
from mpiring.gpu.interface import DeviceVector, Flags, await_event
from mpiring.gpu.vectors import copy_to
from mpiring.memory.arrays import chunks_of, pieces_of
from mpiring.simulated.network import SimulatedNetwork


@pytest.fixture
def device():
    return Device(SimulatedGpu())


def test_a_vector_is_cut_as_numpys_are(device):
    x = np.arange(37, dtype="float32")
    on_gpu = device.gpu.vector(device, x)
    assert (len(on_gpu), on_gpu.nbytes, on_gpu.shape) == (37, 148, (37,))
    for cut in (lambda v: chunks_of(v, 5), lambda v: pieces_of(v, 16),
                lambda v: [v[3:], v[:0], v[40:], v[-7:-2], v[5:3], v.view(np.uint8)[4:12]]):
        for vector, array in zip(cut(on_gpu), cut(x), strict=True):
            assert vector.dtype == array.dtype and np.array_equal(content(vector), array)
            assert vector.base is on_gpu.base


def test_mpi_is_told_where_bytes_are(device):
    x = device.gpu.vector(device, np.zeros(8, ml_dtypes.bfloat16))[2:].view(np.uint8)
    interface = x.__cuda_array_interface__
    assert interface["shape"] == (12,) and interface["typestr"] == "|u1"
    assert interface["data"] == (x.address, False)


def test_a_long_double_has_no_place_on_a_gpu(device):
    with pytest.raises(ConfigError, match="use float64"):
        DeviceVector(device, 0, 1, np.dtype("longdouble"))


def test_copies_of_all_kinds(device):
    x = np.arange(1000.0)
    host, back = device.gpu.pinned(8000).view(float), device.gpu.pinned(8000).view(float)
    host[...] = x
    first, second = (device.allocate(8000).view(float) for _ in range(2))
    copy_to(first, host)
    copy_to(second, first)
    copy_to(back, second)
    await_event(device.event())
    assert np.array_equal(back, x)
    plain = np.empty(1000)
    copy_to(plain, x)
    assert np.array_equal(plain, x)


@pytest.mark.parametrize("names", cases.CONVERSIONS, ids=" to ".join)
def test_conversions_have_the_bits_of_the_host(device, names):
    cases.check_convert(GpuMemory(device), names)


def test_scratch_memory_has_few_lengths(device, monkeypatch):
    """Each new length would be allocated, and to give memory back waits for the GPU."""
    lengths = []
    allocate = device.gpu.allocate
    monkeypatch.setattr(device.gpu, "allocate", lambda nbytes, of: lengths.append(nbytes) or (
        allocate(nbytes, of)))
    for nbytes in range(0, 16 << 20, 123_457):
        with device.scratch.borrow(nbytes, "uint8"):
            pass
    assert len(lengths) == 8


def test_staging_memory_is_reused_once_nothing_uses_it():
    actions = []
    device = Device(SimulatedGpu(actions.append))
    staging = device.staging
    slot = staging.acquire(5000)
    assert slot.size == 8192
    x = device.allocate(5000)
    staging.release(slot, device.to_device(slot[:5000], x))
    # The copy is under way.
    assert staging.acquire(8192) is not slot
    while actions:
        actions.pop(0)()
    while (again := staging.acquire(4097)) is not slot:
        staging.release(again)
    assert staging.acquire(1).size == 4096


def gpus_that_meet(p, **kwargs):
    """Return GPUs, each with its Device and the flags of a node."""
    words = np.full((p, 1), (1 << 32) - 2, np.uint32)
    gpus = [SimulatedGpu(seed=rank, **kwargs) for rank in range(p)]
    for gpu in gpus:
        gpu.pin(words)
    return [(Device(gpu), Flags([*words], rank)) for rank, gpu in enumerate(gpus)]


def test_streams_meet_when_all_have_arrived():
    devices = gpus_that_meet(3)
    xs = [device.gpu.vector(device, np.array([10.0 ** rank]))
          for rank, (device, _) in enumerate(devices)]
    events = []
    for rank, (device, flags) in enumerate(devices):
        assert not any(event.test() for event in events * 100), "they wait for the last"
        for turn in range(3):
            # 32 bits of the number overflow.
            device.meet(flags, (1 << 32) - 1 + turn)
            if turn == rank:
                device.combine("sum", xs, 1, xs)
        events.append(device.event())
    while not all([event.test() for event in events]):
        pass
    assert [content(x)[0] for x in xs] == [111 * 9] * 3


def test_a_barrier_without_one_rank_ends_a_simulation():
    """The network has nothing left to do, and says who waits."""
    network = SimulatedNetwork(3, node_of=3)
    devices = gpus_that_meet(3)
    for rank, (device, _) in enumerate(devices):
        device.gpu.later = partial(network.later, 0, rank)

    def program(missing, net):
        device, flags = devices[net.rank]
        if net.rank != missing:
            device.meet(flags, (1 << 32) - (missing is None))
            yield [device.event()]

    network.run(partial(program, None))
    with pytest.raises(StallError, match="rank 0 waits for an event.*rank 2 waits for an event"):
        network.run(partial(program, 1))


class Copy:
    """An event that says how often it was asked, and whether the pool was locked then."""

    def __init__(self, staging, done):
        self.staging, self.done, self.looks = staging, done, 0

    def test(self):
        assert not self.staging._lock.locked(), "CUDA is asked with the pool locked"
        self.looks += 1
        return self.done


class Plain:
    """A GPU as far as Staging needs it."""

    def pinned(self, nbytes):
        return np.empty(nbytes, np.uint8)


def test_few_slots_are_looked_at_and_only_idle_ones_are_freed(monkeypatch):
    monkeypatch.setattr("mpiring.gpu.device._KEEP_BYTES", 1 << 20)
    staging = Staging(Plain())
    slots = [staging.acquire(5000) for _ in range(300)]
    copies = [Copy(staging, False) for _ in slots]
    for slot, copy in zip(slots, copies):
        staging.release(slot, copy)
    # More than are kept, but copies use them.
    assert {id(slot) for slot, _ in staging._idle} == set(map(id, slots))
    before = sum(copy.looks for copy in copies)
    staging.acquire(5000)
    assert sum(copy.looks for copy in copies) - before <= 4
    # Of ever new lengths, after the copies are done.
    for copy in copies:
        copy.done = True
    for nbytes in [1 << power for power in range(12, 20)] * 40:
        slots = [staging.acquire(nbytes) for _ in range(4)]
        for slot in slots:
            staging.release(slot)
    assert len(staging._idle) <= 16 or sum(slot.size for slot, _ in staging._idle) <= 1 << 20
    last = staging.acquire(nbytes)
    assert any(last is slot for slot in slots), "what was used last is not kept"


def test_a_device_has_a_name(monkeypatch, device):
    simulated = installed(monkeypatch)
    assert device_named(device, 0) is device
    assert device_named("cuda", 5) is device_named("cuda:0", 0) is simulated
    for wish in ("gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0"):
        with pytest.raises(ConfigError, match="expected cpu, cuda"):
            device_named(wish, 0)


def test_arrays_are_seen_where_they_are(monkeypatch):
    gpu = installed(monkeypatch)
    x = gpu.put(np.arange(12.0).reshape(3, 4))
    assert is_on_gpu(x) and not is_on_gpu(np.zeros(3)) and not is_on_gpu(3)
    vector = vector_of(x)
    await_event(vector.ready)
    assert np.array_equal(content(vector), np.arange(12.0))
    assert vector_of(vector) is vector
    assert type(vector_of(np.zeros((2, 2)))) is np.ndarray
    with pytest.raises(ConfigError, match="not contiguous"):
        vector_of(x[:, 1:])
    with pytest.raises(ConfigError, match="expected a numpy.ndarray, got builtins.list"):
        vector_of([1, 2])
