"""Tests what a communicator takes of a node that many ranks share, on real MPI."""

import os
import time

import numpy as np
import pytest
from launching import SOON_S
from mpi4py import MPI

import mpiring
from mpiring.transport import waiting

pytestmark = pytest.mark.mpi


@pytest.fixture
def processors():
    """The processors that this rank may use; a test may change them."""
    allowed = os.sched_getaffinity(0)
    yield sorted(allowed)
    os.sched_setaffinity(0, allowed)


def test_ranks_that_share_a_processor_do_not_spin(processors):
    os.sched_setaffinity(0, processors[:1])
    # A launcher may have bound each rank to other processors.
    rivals = MPI.COMM_WORLD.allgather(processors[0]).count(processors[0])
    with mpiring.Communicator(MPI.COMM_WORLD) as comm:
        expected = waiting.patience(rivals, 1)
        assert comm._group.engine.patience == expected
        # The ranks of another group still share the processor.
        with comm.split(comm.rank // 2) as pair:
            memory = pair._group.sharing.memory
            assert memory is None or memory.patience == expected
            assert pair._group.engine.patience == expected


def test_ranks_on_different_processors_do_not_count(processors):
    own = processors[MPI.COMM_WORLD.rank % len(processors)]
    os.sched_setaffinity(0, [own])
    rivals = MPI.COMM_WORLD.allgather(own).count(own)
    with mpiring.Communicator(MPI.COMM_WORLD) as comm:
        if comm.local_size == comm.size:
            assert comm._group.engine.patience == waiting.patience(rivals, 1)


def test_a_communicator_has_one_thread_and_no_descriptor():
    def counts():
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    def check(more_threads):
        # What earlier tests have left may end at any time, and the system removes a thread a
        # moment after Python has joined it.
        until = time.monotonic() + SOON_S
        while (now := counts())[0] > threads + more_threads and time.monotonic() < until:
            time.sleep(0.01)
        assert now[0] <= threads + more_threads and now[1] <= descriptors, (now, threads)

    MPI.COMM_WORLD.Barrier()
    threads, descriptors = counts()
    with mpiring.Communicator(MPI.COMM_WORLD) as comm:
        comm.allreduce(np.ones(16), op="max")
        threaded = int(comm.size > 1 and MPI.Query_thread() == MPI.THREAD_MULTIPLE)
        check(threaded)
        with comm.split(0) as part:
            part.allreduce(np.ones(16), op="max")
            check(threaded)
    check(0)
