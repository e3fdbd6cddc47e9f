"""Makes a failure on one rank the failure of all, shown once."""

import os
import sys
import time
from types import SimpleNamespace

import cupy_or_host
import pytest
import simulated_gpu
from mpi4py import MPI

import mpiring
from mpiring.gpus import cupy_for


def pytest_sessionstart(session):
    """Let only rank 0 report; a rank that fails prints for itself."""
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    if MPI.COMM_WORLD.rank:
        reporter._tw._file = open(os.devnull, "w")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """End the job when a test fails: the other ranks would wait for this one."""
    report = (yield).get_result()
    world = MPI.COMM_WORLD
    if report.failed and world.size > 1:
        with item.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(f"\nrank {world.rank} of {world.size}: {item.nodeid} failed in {report.when}\n"
                  f"{report.longreprtext}", file=sys.stderr, flush=True)
            time.sleep(0.5)
            world.Abort(1)


@pytest.fixture(scope="session")
def comm():
    """A communicator over all ranks."""
    with mpiring.init() as communicator:
        yield communicator


@pytest.fixture(scope="session")
def apart():
    """A communicator in which each rank is a node, as compression needs."""
    config = mpiring.Config(shared_memory=False, tuning=False, gpu_aware="no")
    with mpiring.Communicator(MPI.COMM_WORLD, config=config) as communicator:
        yield communicator


@pytest.fixture
def breakable():
    """Return a function that opens communicators, which a test may leave in any state."""
    opened = []

    def open_one(**settings):
        opened.append(mpiring.Communicator(MPI.COMM_WORLD, config=mpiring.Config(**settings)))
        return opened[-1]

    yield open_one
    MPI.COMM_WORLD.Barrier()
    for communicator in opened:
        communicator._group.closed = True
        communicator._group._unregister()


@pytest.fixture(params=["simulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu(request, comm, monkeypatch):
    """Return an object that puts arrays on a simulated GPU, or on NVIDIA's through CuPy."""
    if request.param == "simulated":
        return simulated_gpu.installed(monkeypatch)
    cupy_or_host.installed(monkeypatch)
    return SimpleNamespace(put=cupy_for(comm).asarray)
