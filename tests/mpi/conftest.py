"""Makes a failure on one rank the failure of all, shown once."""

import os
import sys
import time

import pytest
from mpi4py import MPI

import mpiring


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
