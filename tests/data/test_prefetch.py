"""Tests that batches come to a device in order, whole, and early; on a simulated GPU."""

import collections
import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
import weakref
from unittest.mock import MagicMock

import numpy as np
import pytest
import simulated_gpu
from launching import PROGRAMS, ROOT, SOON_S, environment, finish, needed

from mpiring import ConfigError, MissingDependencyError
from mpiring.data import prefetch, prefetched
from mpiring.data.prefetched import Prefetched
from mpiring.gpu import carriers, cuda

Pair = collections.namedtuple("Pair", "images labels")


@pytest.fixture
def gpu(monkeypatch):
    """Let arrays of a simulated GPU be taken for CuPy's."""
    return simulated_gpu.installed(monkeypatch)


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    """Return each kind of device in turn: what comes of threads holds for both."""
    if request.param == "cuda":
        request.getfixturevalue("gpu")
    return request.param


def host(x):
    return x if isinstance(x, np.ndarray) else x.get()


def batches(count, shape=(40, 5)):
    for number in range(count):
        random = np.random.default_rng(number)
        yield random.random(shape, np.float32), random.integers(9, size=shape[:1])


def fetchers():
    return [thread for thread in threading.enumerate() if thread.name == "mpiring prefetch"]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_batches_come_whole_and_in_order(device, depth):
    wanted = list(batches(30))
    batches_seen = 0
    for (images, labels), right in zip(prefetch(wanted, device, depth=depth), wanted, strict=True):
        assert np.array_equal(host(images), right[0]) and images.dtype == np.float32
        assert np.array_equal(host(labels), right[1]) and labels.shape == (40,)
        batches_seen += 1
    assert batches_seen == 30 and not fetchers()


@pytest.mark.parametrize("seed", range(5))
def test_memory_is_not_written_to_while_it_may_be_read(gpu, seed):
    gpu.gpu._random.seed(seed)
    wanted = [np.full(1000 + number % 7, number, np.float32) for number in range(60)]
    copies = []
    for x in prefetch(wanted, "cuda"):
        # Read when the user's stream comes to it, long after the batch is let go.
        copies.append(gpu.put(np.zeros(x.shape, x.dtype)))
        copies[-1][...] = x
        del x
    for copied, right in zip(copies, wanted, strict=True):
        assert np.array_equal(copied.get(), right)


def test_memory_is_reused_and_what_is_kept_stays(gpu, monkeypatch):
    sizes, allocate = [], gpu.gpu.allocate

    def counted(nbytes, device=None):
        sizes.append(nbytes)
        return allocate(nbytes, device)

    monkeypatch.setattr(gpu.gpu, "allocate", counted)
    wanted = [np.full(3000, number) for number in range(50)]
    fetched = prefetch(wanted, "cuda:0")
    for _ in range(3):
        for x in fetched:
            del x
    assert len(sizes) <= 8
    arrived = list(prefetch(wanted, "cuda"))
    assert [int(x.get()[7]) for x in arrived] == list(range(50))


def test_pinned_memory_is_reused_only_after_the_copy_from_it(monkeypatch):
    torch = needed("torch")
    from mpiring.gpu import accelerator
    pinned, stream = [], MagicMock()
    events = [types.SimpleNamespace(query=lambda i=i: i in done) for i in range(5)]
    stream.record_event.side_effect, done = events, set()
    empty = torch.empty

    def counted(n, *, pin_memory, **how):
        pinned.append(n)
        return empty(n, **how)

    for where, name, value in [
            (accelerator, "available", lambda kind: None), (torch, "Stream", lambda device: stream),
            (accelerator, "in_use", lambda stream: stream), (torch, "empty", counted),
            (torch.accelerator, "current_stream", lambda device: stream),
            (torch.Tensor, "record_stream", lambda self, stream: None),
            (torch.Tensor, "to", lambda self, device, non_blocking: self.clone())]:
        monkeypatch.setattr(where, name, value)
    carrier = carriers.TensorCarrier("cpu", 0)
    # Copies that are done before a batch is sent, lengths, and the memory allocated by then.
    cases = [([], 3, 1), ([], 3, 2), ([0], 3, 2), ([1], 4, 3), ([2], 3, 3)]
    arrivals = []
    for i, (ended, n, count) in enumerate(cases):
        done.update(ended)
        arrivals.append(carrier.send([torch.full((n,), float(i)), torch.tensor(i)]))
        assert len(pinned) == count
    for i, (arrive, (_, n, _)) in enumerate(zip(arrivals, cases)):
        x, number = arrive()
        assert x.tolist() == [i] * n and number.item() == i


def test_any_nest_goes_and_all_else_passes(gpu):
    images = np.arange(12.0).reshape(3, 4)
    words = np.array(["a", "bc"])
    batch = {"pair": Pair(images.T, [np.float32(2), None]), "words": words,
             "more": collections.OrderedDict(x=(np.array(5), np.empty((0, 2)), "text", 3))}
    (moved,) = prefetch([batch], "cuda")
    assert list(moved) == list(batch) and moved["words"] is words
    assert type(moved["pair"]) is Pair and moved["pair"].labels == [np.float32(2), None]
    assert np.array_equal(moved["pair"].images.get(), images.T)
    number, nothing, text, three = moved["more"]["x"]
    assert type(moved["more"]) is collections.OrderedDict and (text, three) == ("text", 3)
    assert number.get() == 5 and number.shape == () and nothing.shape == (0, 2)
    assert isinstance(batch["pair"].images, np.ndarray), "what was given is as it was"
    assert list(prefetch(["no", "arrays"], "cuda")) == ["no", "arrays"]
    (moved,) = prefetch([collections.UserDict(x=np.ones(3).view(np.memmap))], "cuda")
    assert type(moved) is collections.UserDict and (moved["x"].get() == 1).all()
    hidden = np.ma.masked_array([1.0], [True])
    assert next(iter(prefetch([hidden], "cuda"))) is hidden, "no mask is lost"
    assert list(prefetch([], "cuda")) == []


def test_the_loader_runs_ahead_so_far_and_no_further(device):
    drawn, asked = [], threading.Semaphore(0)

    def loader():
        for number in range(9):
            drawn.append(number)
            asked.release()
            yield np.zeros(number)

    fetched = iter(prefetch(loader(), device, depth=3))
    assert next(fetched).shape == (0,)
    for _ in range(4):
        assert asked.acquire(timeout=10)
    assert not asked.acquire(timeout=0.05) and drawn == [0, 1, 2, 3]
    fetched.close()
    assert not fetchers() and drawn == [0, 1, 2, 3]


def test_an_error_comes_at_its_place(device):
    def loader():
        yield from batches(2)
        raise OSError("the disk is gone")

    arrived = []
    with pytest.raises(OSError, match="the disk is gone"):
        for batch in prefetch(loader(), device, depth=4):
            arrived.append(batch)
    assert len(arrived) == 2 and not fetchers()


def test_it_can_be_left_early_and_begun_again(device):
    fetched = prefetch(list(batches(20)), device)
    for _ in range(3):
        for number, (images, _) in enumerate(fetched):
            if number == 4:
                break
        assert not fetchers()
        assert np.array_equal(host(images), list(batches(5))[4][0])
    first, second = iter(fetched), iter(fetched)
    for (left, _), (right, _) in zip(first, second, strict=True):
        assert np.array_equal(host(left), host(right))
    assert not fetchers()


def test_on_the_cpu_batches_pass_and_are_not_kept():
    wanted = list(batches(3))
    assert all(x is y for x, y in zip(prefetch(wanted, "cpu"), wanted, strict=True))
    assert not fetchers()
    for x in prefetch((np.ones(number) for number in range(1, 5)), "cpu", depth=1):
        gone = threading.Event()
        weakref.finalize(x, gone.set)
        del x
        assert gone.wait(SOON_S)


class Numbers:
    """Yields numbers, and resumes; as StatefulDataLoader, it changes the state it has returned."""

    def __init__(self, count=20):
        self.count, self.state = count, {"epoch": 0, "drawn": 0}

    def __iter__(self):
        while self.state["drawn"] < self.count:
            self.state["drawn"] += 1
            yield 100 * self.state["epoch"] + self.state["drawn"]
        self.state.update(epoch=self.state["epoch"] + 1, drawn=0)

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = json.loads(json.dumps(state))


@pytest.mark.parametrize("stop", [1, 7, 19, 20])
def test_the_state_is_that_of_the_last_batch_whatever_was_drawn_ahead(stop):
    fetched = prefetch(Numbers(), "cpu", depth=3)
    assert fetched.state_dict() == {"epoch": 0, "drawn": 0}
    states = []
    for number in fetched:
        time.sleep(0.001)   # the thread may be any number of batches ahead
        assert fetched.state_dict() == {"epoch": 0, "drawn": number}
        states.append(fetched.state_dict())
        if number == stop:
            break
    assert fetched.state_dict() == states[-1] == {"epoch": 0, "drawn": stop}
    states[-1]["drawn"] = "changed"
    resumed = prefetch(Numbers(), "cpu")
    resumed.load_state_dict(fetched.state_dict())
    assert list(resumed) == list(range(stop + 1, 21))
    assert resumed.state_dict() == {"epoch": 1, "drawn": 0}, "the epoch is over"
    assert list(resumed) == list(range(101, 121))
    fetched.load_state_dict({"epoch": 3, "drawn": 18})
    assert fetched.state_dict() == {"epoch": 3, "drawn": 18} and list(fetched) == [319, 320]


def test_an_iteration_that_yields_nothing_leaves_the_state():
    class Broken(Numbers):
        def __iter__(self):
            self.state["drawn"] += 5
            raise OSError("the disk is gone")
            yield

    fetched = prefetch(Broken(), "cpu")
    with pytest.raises(OSError, match="the disk is gone"):
        list(fetched)
    assert fetched.state_dict() == {"epoch": 0, "drawn": 0}


def test_length_and_state_are_the_loaders():
    fetched = prefetch([1, 2], "cpu")
    assert len(fetched) == 2
    with pytest.raises(TypeError, match="has no len"):
        len(prefetch(iter([1]), "cpu"))
    for call in (fetched.state_dict, lambda: fetched.load_state_dict({})):
        with pytest.raises(ConfigError, match=r"a list, has no state_dict.*seen="):
            call()


def test_an_iteration_can_be_left_while_the_loader_is_busy(monkeypatch, caplog):
    """After 5 s it is left alone; the next iteration begins when it has ended."""
    monkeypatch.setattr(prefetched, "_PATIENCE_S", 0.1)
    go_on, begun = threading.Event(), []

    class Stream:
        def __iter__(self):
            begun.append(len(fetchers()))
            yield 1
            go_on.wait(SOON_S)
            yield 2

    fetched = prefetch(Stream(), "cpu")
    began_s = time.monotonic()
    for number in fetched:
        break
    assert number == 1 and time.monotonic() - began_s < SOON_S / 2
    assert "the loader has not returned for 0.1 s" in caplog.text and len(fetchers()) == 1
    threading.Timer(0.05, go_on.set).start()
    assert list(fetched) == [1, 2] and begun == [1, 1] and not fetchers()


def test_ctrl_c_passes_while_the_loader_hangs():
    """It may be so late: by SOON_S, which the start of Python takes on a busy machine."""
    job = subprocess.Popen(
        [sys.executable, PROGRAMS / "hanging_loader.py"], stdout=subprocess.PIPE, text=True,
        stderr=subprocess.STDOUT, cwd=ROOT, env=environment(), start_new_session=True)
    try:
        assert job.stdout.readline() == "the loader hangs\n"
        began_s = time.monotonic()
        os.kill(job.pid, signal.SIGINT)
    finally:
        ended = finish(job, SOON_S)
    assert ended.output == "Ctrl-C has come\n" and ended.status == 0
    assert time.monotonic() - began_s < SOON_S


def test_waits_for_batches_are_recorded():
    """Each is at least as long as the loader makes it, and ends before the batch is used."""
    waits = []
    comm = types.SimpleNamespace(recorder=types.SimpleNamespace(
        waited_for_data=lambda began_s, ended_s: waits.append((began_s, ended_s))))

    def loader():
        for number in range(3):
            time.sleep(0.05)
            yield number

    used = [time.monotonic() for _ in Prefetched(loader(), None, 1, comm)]
    assert len(waits) == 4, "also for the end"
    # A busy machine may let the thread begin before the wait does, but not each time.
    assert max(ended - began for began, ended in waits) >= 0.04
    assert all(began <= ended <= at for (began, ended), at in zip(waits, used))
    with pytest.raises(ConfigError, match="Communicator"):
        prefetch([], "cpu", comm=comm)


def test_what_cannot_work_is_told(monkeypatch, gpu):
    for device in ("gpu", "cuda:x", None, "cuda1"):
        with pytest.raises(ConfigError, match="expected cpu, cuda, or cuda: and a number"):
            prefetch([], device)
    with pytest.raises(ConfigError, match="depth=0"):
        prefetch([], "cpu", depth=0)

    def missing():
        raise MissingDependencyError("no CuPy")

    monkeypatch.setattr(cuda, "cupy", missing)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(MissingDependencyError, match="no CuPy"):
        prefetch([], "cuda")


def test_pytorch_without_a_gpu_says_so(gpu):
    torch = needed("torch")
    if torch.cuda.is_available():
        return
    with pytest.raises(MissingDependencyError, match="PyTorch .* finds no GPU"):
        next(iter(prefetch([torch.zeros(3)], torch.device("cuda", 0))))
    # Of the arrays beside them, CuPy takes care.
    assert next(iter(prefetch([np.ones(3)], "cuda:0"))).get().sum() == 3


def test_tensors_of_a_batch_lie_in_one_piece():
    torch = needed("torch")
    xs = [torch.arange(6).view(2, 3).T, torch.tensor(True), torch.empty(0, 4),
          torch.ones(3, dtype=torch.bfloat16), torch.tensor([1 + 2j]).conj(), torch.ones(1) * 3]
    starts, nbytes = carriers.aligned_offsets([x.nbytes for x in xs])
    memory = torch.empty(nbytes, dtype=torch.uint8)
    parts = carriers.tensors_at(memory, starts, xs)
    for part, x in zip(parts, xs, strict=True):
        part.copy_(x)
    for part, x in zip(parts, xs, strict=True):
        assert part.dtype == x.dtype and part.shape == x.shape and torch.equal(part, x)
        assert part.is_contiguous() and part.data_ptr() % part.element_size() == 0
