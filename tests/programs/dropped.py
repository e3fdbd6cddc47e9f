"""Drops communicators without closing them, at other times on every rank; run by mpirun."""

import os
import threading
import time
import warnings

import numpy as np
import pytest
from mpi4py import MPI

import mpiring

MANY = 5


def threads():
    return sum(thread.name == "mpiring" for thread in threading.enumerate())


def files():
    return len(os.listdir("/proc/self/fd"))


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)


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


comm = mpiring.init()
dropped_ones_give_back_threads_and_descriptors(comm)
operations_outlive_their_communicators(comm)
there_is_room_for_so_many(comm)
print("all is well", flush=True)
# At the end all of them are closed, by all ranks in one order.
