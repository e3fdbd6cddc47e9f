"""Tests operations that are queued on GPUs, across real ranks, whose hosts do not wait."""

import sys
import time

import cupy_or_host
import numpy as np
import pytest
import simulated_gpu

import mpiring
from mpiring import BufferMismatchError, StallError
from mpiring.engine import queued
from mpiring.numpy import DataParallel
from mpiring.operations import queue
from mpiring.optim import SGD

pytestmark = pytest.mark.mpi

SHAPES = {"a": (300,), "b": (20, 30), "c": (7,), "d": (1001,)}


def skip_alone(comm):
    if comm.size == 1:
        pytest.skip(reason="there is no other rank")


def skip_on_the_host(gpu):
    if not (hasattr(gpu, "gpu") or cupy_or_host.REAL):
        pytest.skip(reason="without a GPU, the host waits for the work that it queues")


def model(comm, gpu, **settings):
    return DataParallel({name: gpu.put(np.zeros(shape, np.float32))
                         for name, shape in SHAPES.items()}, comm, bucket_bytes=1500, **settings)


def step(dp, gpu, number, wait=True):
    """Average gradients that depend on rank and step."""
    for name in reversed(SHAPES):
        value = np.full(SHAPES[name], number + dp.comm.rank, np.float32)
        dp.grads[name][...] = gpu.put(value)
        dp.ready(name)
    if wait:
        dp.wait()


def check(dp, number):
    mean = number + (dp.comm.size - 1) / 2
    for name, view in dp.grads.items():
        assert (view.get() == mean).all(), (name, number)


def test_the_host_waits_for_nothing_in_a_step(comm, gpu, monkeypatch):
    """Not for more calls than ranks compare later, either, and handles are those of the queue."""
    skip_alone(comm)
    dp = model(comm, gpu)
    handles, waits = [], []
    start = queued.QueuedOperation._start
    monkeypatch.setattr(queued.QueuedOperation, "_start", lambda *args: handles.append(
        start(*args)) or handles[-1])
    for module in (mpiring.gpu.interface, mpiring.training.fused, mpiring.buckets.bucket):
        if hasattr(module, "await_event"):
            monkeypatch.setattr(module, "await_event", waits.append)
    monkeypatch.setattr(queued.QueuedHandle, "has_finite_result", lambda self: True)
    steps = 2 * queue.RING // len(dp.gradients.buckets) + 3
    for number in range(steps):
        step(dp, gpu, number)
    assert len(handles) == steps * len(dp.gradients.buckets) > 2 * queue.RING and not waits
    monkeypatch.undo()
    check(dp, steps - 1)


def test_means_of_all_steps(comm, gpu):
    dp = model(comm, gpu)
    for number in range(16):
        step(dp, gpu, number)
        if number % 3 == comm.rank % 3:
            check(dp, number)
    assert dp.finite
    check(dp, 15)


def test_calls_and_functions_per_bucket(comm, gpu, monkeypatch):
    """All of a step's, divided by its buckets; only the simulated GPU counts CUDA's calls."""
    skip_alone(comm)
    dp = model(comm, gpu)
    calls, functions, counts = [], [], []
    for name in ("record", "wait", "meet", "combine", "download", "upload", "clear", "launch"):
        method = getattr(simulated_gpu.Stream, name)
        monkeypatch.setattr(simulated_gpu.Stream, name, lambda *args, name=name, method=method: (
            calls.append(name) or method(*args)))

    def count(frame, event, argument):
        if event == "call" and "/mpiring/" in frame.f_code.co_filename:
            functions.append(frame.f_code.co_qualname if sys.version_info >= (3, 11) else
                             frame.f_code.co_name)

    for number in range(6):
        for name in reversed(SHAPES):
            dp.grads[name][...] = 1.0
        # Otherwise, the host may wait for the last step.
        assert dp.finite
        del calls[:], functions[:]
        sys.setprofile(count)
        for name in reversed(SHAPES):
            dp.ready(name)
        dp.wait()
        sys.setprofile(None)
        counts.append(len(functions))
    buckets = len(dp.gradients.buckets)
    assert buckets == 4
    assert len(calls) <= 12 * buckets, calls
    # In some steps, this rank looks which buckets are over.
    assert min(counts) <= 60 * buckets, functions


def test_other_operations_keep_their_order(comm, gpu):
    """Those on which ranks agree each time, and those on which they have agreed."""
    dp = model(comm, gpu)
    random = np.random.default_rng(7)
    expected, handles, xs = [], [], []
    for number in range(24):
        kind = random.integers(4)
        if kind == 0:
            step(dp, gpu, number)
            if number % 5 == 0:
                check(dp, number)
        elif kind == 1:
            n = int(random.integers(1, 200_000))
            xs.append(gpu.put(np.full(n, comm.rank + number, np.float32)))
            handles.append(comm.iallreduce(xs[-1], op="mean"))
            expected.append(number + (comm.size - 1) / 2)
        elif kind == 2:
            x = comm.empty(int(random.integers(70_000, 90_000)), np.float32, device="cuda")
            x[...] = comm.rank
            comm.allreduce(x, op="max")
            assert (x.get() == comm.size - 1).all()
        else:
            x = gpu.put(np.full(80_000, comm.rank, np.int32))
            comm.broadcast(x, root=number % comm.size)
            assert (x.get() == number % comm.size).all()
        if comm.rank == number % comm.size:
            time.sleep(0.002)
    for handle, x, value in zip(handles, xs, expected):
        assert handle.wait() is x and (x.get() == value).all()


def test_two_communicators_in_different_orders(comm, gpu):
    skip_on_the_host(gpu)
    with comm.split(0) as other:
        models = [model(comm, gpu), model(other, gpu)]
        for number in range(5):
            order = models if comm.rank % 2 else models[::-1]
            for dp in order:
                step(dp, gpu, number, wait=False)
            for dp in order:
                dp.wait()
            for dp in models:
                check(dp, number)


def test_a_step_without_finite_means(comm, gpu, caplog):
    dp = model(comm, gpu)
    step(dp, gpu, 0)
    for name in reversed(SHAPES):
        value = np.full(SHAPES[name], np.inf if comm.rank == 0 and name == "c" else 1, np.float32)
        dp.grads[name][...] = gpu.put(value)
        dp.ready(name)
    dp.wait()
    # Nobody asks now; the next step finds out.
    step(dp, gpu, 2)
    assert dp.finite
    check(dp, 2)
    step(dp, gpu, 3)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == (comm.rank == 0), warnings
    assert all(text.startswith("step 1: NaN or Inf") and " c" in text for text in warnings)


def test_the_next_step_warns_when_it_begins(comm, gpu, caplog):
    """Also if it has only one gradient."""
    dp = DataParallel({"a": gpu.put(np.zeros(300, np.float32))}, comm)
    for value in (np.nan, 1):
        dp.grads["a"][...] = gpu.put(np.full(300, value, np.float32))
        dp.ready("a")
        dp.wait()
    warnings = [record.getMessage()[:11] for record in caplog.records]
    assert warnings.count("step 0: NaN") == (comm.rank == 0), warnings


@pytest.mark.parametrize("sharded", [False, True])
def test_an_optimizer_has_the_bits_of_the_host(comm, gpu, sharded):
    results = []
    for put, get in ((gpu.put, lambda x: x.get()), (lambda x: x, lambda x: x)):
        params = {name: put(np.ones(shape, np.float32)) for name, shape in SHAPES.items()}
        dp = DataParallel(params, comm, bucket_bytes=1500)
        optimizer = SGD(dp, 0.1, momentum=0.9, sharded=sharded)
        for number in range(6):
            random = np.random.default_rng([number, comm.rank])
            for name in reversed(SHAPES):
                dp.grads[name][...] = put(random.random(SHAPES[name], np.float32))
                dp.ready(name)
            assert optimizer.step()
        results.append([get(x).tobytes() for x in params.values()])
    assert results[0] == results[1]


def test_ranks_that_differ_are_told_at_the_latest_in_the_next_step(comm, gpu, breakable):
    skip_alone(comm)
    skip_on_the_host(gpu)
    dp = model(breakable(), gpu)
    step(dp, gpu, 0)
    dp.gradients.label = f"step {'of another' * (comm.rank == 1)} program"
    with pytest.raises(BufferMismatchError, match="another program") as error:
        for number in range(2):
            step(dp, gpu, number)
    assert "rank 1 called" in str(error.value)


@pytest.mark.parametrize("how", ["asks", "closes"])
def test_a_rank_that_is_missing_is_named(comm, gpu, breakable, how):
    if comm.size != 2:
        pytest.skip(reason="takes long")
    skip_on_the_host(gpu)
    own = breakable(stall_timeout_s=4, stall_warning_s=0)
    dp = model(own, gpu)
    step(dp, gpu, 0)
    assert dp.finite
    if comm.rank == comm.size - 1:
        time.sleep(6)
        return
    step(dp, gpu, 1)
    # On a busy machine, an answer may come too late.
    problem = f"rank {comm.size - 1} (has NOT CALLED it|does not answer)"
    with pytest.raises(StallError, match=problem) as error:
        dp.finite if how == "asks" else own.close()
    assert "on a GPU reduce Mean()" in str(error.value)
    time.sleep(1)
