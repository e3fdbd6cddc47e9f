"""Tests that nothing grows: in 1,000 steps, and with communicators that are never closed."""

import gc
import os
import resource
import sys
import threading
import warnings

import numpy as np
import pytest
from launching import until
from mpi4py import MPI

import mpiring
from mpiring.numpy import DataParallel

pytestmark = [pytest.mark.launch, pytest.mark.any_mpi]

# The first steps, of a small model, fill the record of the last 2,048 fast calls.
SMALL, WARM_UP, STEPS, MANY = 2400, 2500, 1000, 5


def usage(comm):
    # How many objects describe an operation depends on which rank was late.
    comm.recorder._flights.clear()
    gc.collect()
    with open("/proc/self/statm") as file:
        pages = map(int, file.read().split()[:2])
        virtual, resident = (number * resource.getpagesize() for number in pages)
    with open("/proc/self/maps") as file:
        windows = sum("memfd:mpiring" in line for line in file)
    return {"virtual": virtual, "resident": resident, "windows": windows,
            "files": len(os.listdir("/proc/self/fd")), "objects": sys.getallocatedblocks()}


def many_steps(comm):
    """Return what a rank uses after the first steps, and after a thousand more."""
    random = np.random.default_rng(0)
    params = {f"w{i}": random.standard_normal((16, 300 * i)) for i in range(1, 6)}
    dp = DataParallel(params, comm, bucket_bytes=50_000)
    small = DataParallel({"w1": np.zeros((1, 1))}, comm)
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            before = usage(comm)
        model = small if step < SMALL else dp
        for name in reversed([*model.grads]):
            model.grads[name][...] = comm.rank + step
            model.ready(name)
        model.wait()
        assert model.grads["w1"][0, 0] == step + (comm.size - 1) / 2
        scratch = comm.empty((100, 1 + step % 7))
        scratch[...] = 1
        comm.allreduce(scratch)
    return before, usage(comm)


@pytest.mark.parametrize("progress", ["thread", "inline"])
def test_nothing_grows_in_a_thousand_steps(progress, ranks):
    before, after = ranks(2, many_steps, MPIRING_PROGRESS=progress)[0]
    assert before["windows"] >= 2, before
    # The meeting place and the buckets stay; the last small arrays may wait for collection. UCX
    # keeps 0.3 kB for each window that is unmapped, and Python's memory grows by 1 MiB at a time.
    for kind, most in (("windows", 2), ("files", 2), ("objects", STEPS // 2),
                       ("virtual", 2 << 20), ("resident", 2 << 20)):
        assert after[kind] <= before[kind] + most, (before, after)


def threads():
    return sum(thread.name == "mpiring" for thread in threading.enumerate())


def files():
    return len(os.listdir("/proc/self/fd"))


def dropped_ones_give_back_threads_and_descriptors(comm):
    before, kept = (threads(), files()), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(MANY):
            mpiring.init()
            comm.split(0)
            # The other ranks drop these later.
            kept += [mpiring.init(), comm.split(0)]
            if comm.rank == 0:
                kept.clear()
        until(lambda: threads() == before[0] + len(kept) // 2)
        kept.clear()
        until(lambda: (threads(), files()) == before)
    assert len(caught) == 4 * MANY
    for warning in caught:
        assert warning.category is ResourceWarning and warning.filename == __file__
        assert f"a communicator of {comm.size} ranks, made in this line" in str(warning.message)
        assert "call close()" in str(warning.message)
    assert len({warning.lineno for warning in caught}) == 3
    assert comm.allreduce(np.ones(3))[0] == comm.size


def operations_outlive_their_communicators(comm):
    x, called = np.ones(1 << 20, np.float32), []
    handles = [comm.split(0).iallreduce(x.copy()), mpiring.init().iallreduce(x.copy())]
    mpiring.init().messages()
    # Nobody waits: the threads complete them, and then go.
    until(lambda: all(handle.complete for handle in handles))
    until(lambda: threads() == 1)
    for handle in handles:
        assert (handle.wait() == comm.size).all()
        handle.when_done(called.append)
    assert called == [None, None]


def there_is_room_for_so_many(comm):
    others = []
    try:
        # Open MPI has room for more than anybody wants to wait for.
        while len(others) < 3000:
            others.append(MPI.COMM_WORLD.Dup())
    except MPI.Exception:
        place = rf"{os.path.basename(__file__)}:\d+"
        match = (rf"rank {comm.rank}: making a communicator \({4 * MANY + 5} communicators of "
                 rf"mpiring's are open in this process, {4 * MANY + 3} of them dropped without "
                 rf"close\(\), made at .*{place} \({2 * MANY}\).*close\(\) those")
        for make in (lambda: comm.split(0), mpiring.init):
            with pytest.raises(mpiring.TransportError, match=match):
                make()
    for other in others:
        other.Free()
    comm.split(0).close()
    mpiring.init().close()


def drop_communicators(comm):
    dropped_ones_give_back_threads_and_descriptors(comm)
    operations_outlive_their_communicators(comm)
    there_is_room_for_so_many(comm)


def test_dropped_communicators_give_back_what_is_theirs_alone(ranks):
    ranks(2, drop_communicators)
