"""Tests streams, events, memory and views on a real GPU."""

import mmap
import threading
import time

import kernel_cases as cases
import numpy as np
import pytest
from gpu_memory import GpuMemory, wait
from launching import PROGRAMS, launch, needed, until

from mpiring.gpu import cuda, kernels
from mpiring.gpu.arrays import vector_of
from mpiring.gpu.device import Device
from mpiring.gpu.interface import Flags

N = 1 << 22


@pytest.mark.parametrize(("op", "name"), cases.CASES)
def test_results_have_the_bits_of_the_host(memory, op, name):
    cases.check_combine(memory.device, memory, op, name)


@pytest.mark.parametrize("name", cases.ALARMED)
def test_an_alarm_tells_of_nan_and_inf(memory, name):
    cases.check_alarm(memory.device, memory, name)


def test_integers_need_no_alarm(memory):
    word = memory.device.gpu.pinned(4).view(np.uint32)
    word[:] = 7
    x, out = (memory.put(np.full(100, value, np.int32)) for value in (5, 0))
    memory.device.combine("sum", [x], 1, [out], (word, 8))
    memory.device.combine("sum", [x, out], 1, [x], (word, 8))
    assert (memory.get(x) == 10).all() and word[0] == 7


@pytest.mark.parametrize(("offsets", "packs"), [((0, 0, 0), 250), ((8, 8, 8), 249),
                                                ((4, 52, 20), 249), ((0, 4, 0), 0)])
def test_vectors_may_begin_anywhere(memory, offsets, packs):
    """Kernels read packs of 16 bytes if all vectors have the same alignment."""
    arrays = [cases.numbers(np.dtype(np.float32), 1000, seed) for seed in range(2)]
    sources = [memory.put(x, offset) for x, offset in zip(arrays, offsets)]
    out = memory.put(np.zeros(1000, np.float32), offsets[2])
    memory.device.combine("sum", sources, 1, [out])
    assert cases.same(memory.get(out), cases.expected("sum", arrays, 1))
    assert kernels.packing([x.address for x in (*sources, out)], 1000, 4).packs == packs


def test_a_single_source_is_divided_or_copied(memory):
    array = cases.numbers(np.dtype(np.float32), 100, 0)
    x, out = memory.put(array), memory.put(np.zeros_like(array))
    memory.device.combine("mean", [x], 3.0, [out])
    assert cases.same(memory.get(out), array / np.float32(3))
    memory.device.combine("mean", [x], 1, [x, out])
    assert cases.same(memory.get(out), array)


@pytest.mark.parametrize("names", cases.CONVERSIONS, ids=" to ".join)
def test_conversions_have_the_bits_of_the_host(memory, names):
    cases.check_convert(memory, names)


@pytest.mark.parametrize("codec", cases.CODECS, ids=repr)
def test_codecs_have_the_bits_of_the_host(memory, codec):
    cases.check_codec(memory, codec)


def test_updates_have_the_bits_of_the_host(memory):
    cases.check_elementwise(memory)


def test_what_a_device_queues_is_done_in_order(device):
    """Copies in, sums and copies out of many pieces, with no wait in between."""
    rng = np.random.default_rng(0)
    arrays = rng.standard_normal((2, N)).astype(np.float32)
    host = device.gpu.pinned(arrays.nbytes).view(np.float32).reshape(2, N)
    host[...] = arrays
    out = device.gpu.pinned(arrays[0].nbytes).view(np.float32)
    a, b = (device.allocate(4 * N).view(np.float32) for _ in range(2))
    for piece in (slice(i, i + N // 16) for i in range(0, N, N // 16)):
        device.to_device(host[0][piece], a[piece])
        device.to_device(host[1][piece], b[piece])
        device.combine("mean", [a[piece], b[piece]], 2, [a[piece], b[piece]])
        device.to_host(b[piece], out[piece])
    wait(device.event())
    assert (out == (arrays[0] + arrays[1]) / np.float32(2)).all()


def test_an_event_is_not_done_before_its_work(asynchronous, device):
    x = device.allocate(64 << 20)
    host = device.gpu.pinned(64 << 20)
    before = device.event()
    wait(before)
    events = [device.to_host(x, host) for _ in range(20)]
    assert not events[-1].test(), "1.3 GB cannot have been copied at once"
    wait(events[-1])
    assert all(event.test() for event in events)


def test_cupy_arrays_are_waited_for_and_seen_without_a_copy(asynchronous, device, cupy):
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = cupy.zeros(16 * N, cupy.float32)
        for _ in range(200):
            x += 1
        vector = vector_of(x)
    assert not vector.ready.test(), "200 kernels over 256 MiB cannot be done yet"
    wait(vector.ready)
    device.combine("sum", [vector, vector], 1, [vector])
    wait(device.event())
    assert (cupy.asnumpy(x) == 400).all()
    again = vector.device.gpu.array(vector, (2, 8 * N))
    assert again.data.ptr == x.data.ptr and again.shape == (2, 8 * N)
    address = x.data.ptr
    del x, vector
    # The array keeps the memory, and CuPy's pool does not hand it out again.
    assert cupy.zeros(16 * N, cupy.float32).data.ptr != address and (again == 400).all()


def test_layouts_and_dtypes_of_cupy_arrays(device, cupy):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for dtype in (np.int8, np.float16, ml_dtypes.bfloat16, np.complex128):
        x = cupy.asarray(np.arange(12).astype(dtype)).reshape(3, 4)
        assert vector_of(x).dtype == dtype
        vector = vector_of(x)
        seen = vector.device.gpu.array(vector, (3, 4))
        assert cupy.asnumpy(seen).tobytes() == cupy.asnumpy(x).tobytes()
    columns = cupy.asfortranarray(cupy.arange(12.0).reshape(3, 4))
    vector = vector_of(columns)
    assert (vector.device.gpu.array(vector, (4, 3)).T == columns).all()
    assert vector_of(cupy.zeros((0, 3))).size == 0
    with pytest.raises(ValueError, match="not contiguous"):
        vector_of(columns[::2])


def test_tensors_are_seen_without_cupy_arrays(device):
    torch = needed("torch")
    if not torch.cuda.is_available():
        pytest.skip(reason="this PyTorch has no CUDA")
    x = torch.ones(N, device="cuda", dtype=torch.bfloat16)
    needed("ml_dtypes")
    vector = vector_of(x)
    wait(vector.ready)
    device.combine("sum", [vector] * 3, 1, [vector])
    wait(device.event())
    assert bool((x == 3).all())
    seen = vector_of(torch.ones(5, device="cuda"))
    assert seen.size == 5 and seen.dtype == np.float32 and seen.ready is not None


def test_any_thread_may_call(device):
    """Each has CUDA's context for itself."""
    results = []

    def work():
        memory = GpuMemory(device)
        x = memory.put(np.arange(1000.0))
        device.combine("sum", [x, x], 1, [x])
        results.append(memory.get(x))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 4 and all((x == 2 * np.arange(1000.0)).all() for x in results)


def test_locked_pages_are_copied_beside_the_host(asynchronous, device):
    """A copy from pages that are not locked would not return before it is done."""
    memory = np.frombuffer(mmap.mmap(-1, 256 << 20), np.uint8)
    memory[:] = 1
    x = device.allocate(memory.nbytes)
    device.gpu.pin(memory)
    device.gpu.pin(memory)
    began = time.perf_counter()
    event = device.to_device(memory, x)
    queued_s = time.perf_counter() - began
    wait(event)
    assert queued_s < (time.perf_counter() - began) / 2


def words(device, before=0):
    """Return the words of two ranks in pinned memory."""
    memory = device.gpu.pinned(8).view(np.uint32)
    memory[:] = before
    return [memory[:1], memory[1:]]


def test_streams_meet(device):
    """Without a barrier, sums would be those of other rounds; the third is number 0 of 32 bits."""
    pair, numbers = words(device, (1 << 32) - 3), range((1 << 32) - 2, (1 << 32) + 20)
    memory = GpuMemory(device)
    xs = [memory.put(np.full(N, rank + 1.0)) for rank in range(2)]
    halves = slice(N // 2), slice(N // 2, N)
    results = []

    def work(rank):
        on, flags = Device(device.gpu), Flags(pair, rank)
        for number in numbers:
            on.meet(flags, number)
            half = [x[halves[(rank + number) % 2]] for x in xs]
            on.combine("mean", half, 2, half)
            on.combine("sum", [*half], 1, half)
        results.append(on)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for on in results:
        wait(on.event())
    want = 3 * 2.0 ** (len(numbers) - 1)
    assert len(results) == 2 and all((memory.get(x) == want).all() for x in xs)
    assert [int(word[0]) for word in pair] == 2 * [19]


@pytest.mark.parametrize("by", ["stream", "host"])
def test_a_late_rank_is_waited_for(asynchronous, device, by):
    """A stream writes the rank's word, or the host, by which a failed rank's barriers end."""
    pair = words(device)
    devices = [Device(device.gpu) for _ in pair]
    x, host = device.allocate(8), device.gpu.pinned(8)
    devices[0].meet(Flags(pair, 0), 1)
    early = devices[0].to_host(x, host)
    time.sleep(0.05)
    assert not early.test() and pair[0][0] == 1 and pair[1][0] == 0
    if by == "stream":
        devices[1].meet(Flags(pair, 1), 1)
    else:
        pair[1][0] = 1
    until(early.test)
    wait(devices[1].event())


@pytest.mark.launch
def test_processes_open_each_others_memory():
    ended = launch(2, PROGRAMS / "gpu_sharing.py")
    assert ended.status == 0 and ended.output.count("shared") == 2, ended.output


@pytest.mark.launch
def test_mpi_is_handed_pointers_only_if_it_takes_them():
    """Whatever this MPI can do, nothing dies here, and the answer comes in time."""
    ended = launch(2, "-c", """
from mpi4py import MPI
from mpiring import Config
from mpiring.launch import gpu_aware
if MPI.COMM_WORLD.rank == 0:
    library = MPI.Get_library_version()
    print("takes", gpu_aware.takes_pointers(Config(tuning_folder=""), library, 0))
MPI.COMM_WORLD.Barrier()
""", timeout_s=200)
    assert ended.status == 0 and "takes " in ended.output, ended.output


def test_versions_name_all_parts():
    assert "CuPy" in cuda.versions() and "driver" in cuda.versions()
