"""Uses works and futures of the back end in every way; run by mpirun.

On a GPU if the argument is "cuda", see whereabouts, or by this way of progress.
"""

import os
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from whereabouts import CUDA, WHERE

import mpiring
import mpiring.torch  # noqa: F401 (registers the back end)
from mpiring.launch.start import load_mpi

if CUDA:
    torch.set_default_device(WHERE)
RANK, SIZE = load_mpi().COMM_WORLD.rank, load_mpi().COMM_WORLD.size
TOTAL = SIZE * (SIZE - 1) // 2


def many_at_once():
    xs = [torch.full((1000 + i,), float(RANK + i)) for i in range(40)]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    for i in reversed(range(40)):
        works[i].wait()
        assert works[i].is_completed() and works[i].is_success()
        assert works[i].exception() is None
        assert works[i].result()[0] is xs[i]
        assert (xs[i] == TOTAL + SIZE * i).all()


def a_waiter_in_another_thread():
    x, done = torch.full((1000,), float(RANK)), []
    work = dist.all_reduce(x, async_op=True)
    thread = threading.Thread(target=lambda: done.append(work.wait()))
    thread.start()
    thread.join()
    assert done == [True] and x[0] == TOTAL


def futures_that_chain():
    x = torch.full((5,), float(RANK))
    future = dist.all_reduce(x, async_op=True).get_future()
    chain = future.then(lambda ended: ended.value()[0] + 1).then(lambda ended: ended.value() * 2)
    assert (chain.wait() == 2 * (TOTAL + 1)).all()
    failed = future.then(lambda ended: 1 // 0)
    with pytest.raises(ZeroDivisionError, match="division"):
        failed.wait()
    # PyTorch itself waits for this one, and makes no progress.
    lists = [torch.empty(5) for _ in range(SIZE)]
    gathered = dist.all_gather(lists, x, async_op=True).get_future()
    assert torch.futures.wait_all([gathered])[0][0][SIZE - 1].equal(x)


def collectives_in_callbacks():
    """Callbacks meet only callbacks, though they run at any time, in any thread."""
    results = []
    for i in range(30):
        x = torch.full((2000,), float(RANK + i))

        def again(future, i=i):
            y = future.value()[0] + i
            dist.all_reduce(y)
            return dist.all_reduce(y, async_op=True).get_future().wait()[0]

        results.append(dist.all_reduce(x, async_op=True).get_future().then(again))
        if (RANK + i) % 3 == 0:
            time.sleep(0.002)
        dist.barrier()
    for i, result in enumerate(results):
        assert (result.wait() == SIZE * SIZE * (TOTAL + SIZE * i + i)).all()


def messages_in_any_number():
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    inbox = [torch.empty(4) for _ in range(100)]
    receives = [dist.irecv(x, left, tag=i) for i, x in enumerate(inbox)]
    # They wait for long, and hold nobody up.
    dist.barrier()
    assert not any(work.is_completed() for work in receives)
    dist.barrier()
    for i in reversed(range(100)):
        dist.send(torch.full((4,), float(i + RANK)), right, tag=i)
    for i, work in enumerate(receives):
        work.wait()
        assert inbox[i][0] == i + left and work.source_rank() == left
    strided = torch.zeros(4, 2)[:, 0]
    work = dist.irecv(strided, left)
    dist.send(torch.ones(4), right)
    work.wait()
    assert strided.sum() == 4


def every_collective_in_many_rounds():
    """In the background and in the foreground at once."""
    n, last = 100_003, SIZE - 1
    inputs = torch.arange(SIZE * n) + RANK
    parts = [*inputs.view(SIZE, n)]
    total = SIZE * torch.arange(SIZE * n) + TOTAL
    of_all = torch.cat([torch.arange(SIZE * n) + rank for rank in range(SIZE)])
    columns = torch.cat([parts[RANK] - RANK + rank for rank in range(SIZE)])

    def begun(**async_op):
        outputs = {
            "broadcast": inputs.clone(), "reduce": inputs.clone(),
            "gather": torch.zeros_like(of_all),
            "scatter": torch.zeros_like(parts[0]), "all_gather": torch.zeros_like(of_all),
            "reduce_scatter": torch.zeros_like(parts[0]), "all_to_all": torch.zeros_like(inputs)}
        gathered, scattered = [*outputs["gather"].view(SIZE, -1)], parts
        if RANK != last:
            gathered = scattered = None
        return outputs, [
            dist.broadcast(outputs["broadcast"], last, **async_op),
            dist.reduce(outputs["reduce"], last, **async_op),
            dist.gather(inputs, gathered, last, **async_op),
            dist.scatter(outputs["scatter"], scattered, last, **async_op),
            dist.all_gather_into_tensor(outputs["all_gather"], inputs, **async_op),
            dist.reduce_scatter_tensor(outputs["reduce_scatter"], inputs, **async_op),
            dist.all_to_all_single(outputs["all_to_all"], inputs, **async_op)]

    later, works = begun(async_op=True)
    now, _ = begun()
    for work in works:
        work.wait()
    for outputs in later, now:
        assert outputs["broadcast"].equal(torch.arange(SIZE * n) + last)
        assert outputs["reduce"].equal(total if RANK == last else inputs)
        assert RANK != last or outputs["gather"].equal(of_all)
        assert outputs["scatter"].equal(parts[RANK] - RANK + last)
        assert outputs["all_gather"].equal(of_all)
        assert outputs["reduce_scatter"].equal(total.view(SIZE, n)[RANK])
        assert outputs["all_to_all"].equal(columns)


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "another operation does not advance"
        time.sleep(1e-4)


def a_message_around():
    received = dist.irecv(torch.empty(3), (RANK - 1) % SIZE, tag=3)
    dist.send(torch.ones(3), (RANK + 1) % SIZE, tag=3)
    until(received.is_completed)


def what_is_begun_advances():
    """Rank 0 waits for the second operation first, and all others for the first one."""
    def begun():
        return dist.all_reduce(torch.ones(3), async_op=True)

    with mpiring.init() as other:
        for meanwhile in (
                lambda: until(begun().is_completed), lambda: until(begun().is_success),
                lambda: begun().get_future().then(lambda future: None).wait(),
                lambda: dist.destroy_process_group(dist.new_group(backend="mpiring")),
                dist.barrier, a_message_around, dist.group.WORLD.monitored_barrier,
                lambda: dist.all_gather_object([None] * SIZE, "text"), other.barrier,
                lambda: until(other.iallreduce(torch.ones(9)).test)):
            long = dist.all_reduce(torch.ones(1_000_000), async_op=True)
            for step in (meanwhile, long.wait)[::1 if RANK == 0 else -1]:
                step()


def barriers_that_name_the_missing():
    group = dist.group.WORLD
    group.monitored_barrier(timedelta(seconds=10))
    if RANK == 0:
        missing = ".*".join(map(str, range(1, SIZE)))
        with pytest.raises(mpiring.StallError, match=rf" Timed out .*{missing}"):
            group.monitored_barrier(timedelta(seconds=0.3), wait_all_ranks=True)


def coalesced_futures():
    xs = [torch.full((4,), float(RANK + i)) for i in range(3)]
    with dist.distributed_c10d._coalescing_manager(
            dist.group.WORLD, xs[0].device, async_ops=True) as manager:
        for x in xs:
            dist.group.WORLD.allreduce([x])
    (work,) = manager.works
    total = work.get_future().then(lambda future: sum(future.value()))
    assert work.wait() and (total.wait() == 3 * TOTAL + 3 * SIZE).all()
    assert work.is_completed() and work.is_success() and work.exception() is None
    assert all(map(torch.equal, work.result(), xs))


def a_barrier_with_a_timeout():
    if RANK == 0:
        options = dist.BarrierOptions()     # as dist.barrier(timeout=...) makes them
        options.timeout = timedelta(seconds=0.2)
        with pytest.raises(mpiring.StallError, match=" Timed out after 0.2 s"):
            dist.group.WORLD.barrier(options).wait()
        for rank in range(1, SIZE):
            dist.send(torch.zeros(1), rank)
    else:
        dist.recv(torch.zeros(1), 0)
        dist.barrier()


def timeouts_that_change():
    group = dist.group.WORLD
    assert group._group.config.stall_timeout_s == 20, "init_process_group's"
    group.set_timeout(timedelta(seconds=15))
    assert group._group._watch.config.stall_timeout_s == 15


def waits_that_end():
    if RANK == 0:
        x = torch.empty(3)
        work = dist.irecv(x, 1, tag=9)
        told = "recv 12 bytes from 1, tag 9: Timed out after 0.2 s"
        with pytest.raises(mpiring.StallError, match=told) as caught:
            work.wait(timedelta(seconds=0.2))
        assert work.exception() is caught.value
    dist.barrier()
    if RANK == 0:
        work.wait()
        assert (x == 1).all()
    elif RANK == 1:
        dist.send(torch.ones(3), 0, tag=9)


if sys.argv[1] != "cuda":
    os.environ["MPIRING_PROGRESS"] = sys.argv[1]
dist.init_process_group("mpiring", init_method="mpi://", timeout=timedelta(seconds=20))
for test in (many_at_once, a_waiter_in_another_thread, futures_that_chain, collectives_in_callbacks,
             messages_in_any_number, every_collective_in_many_rounds, coalesced_futures,
             what_is_begun_advances, a_barrier_with_a_timeout, timeouts_that_change, waits_that_end,
             barriers_that_name_the_missing):
    dist.barrier()
    test()
print("all is well", flush=True)
