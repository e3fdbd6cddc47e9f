"""Keeps real MPI tests out of plain runs, and gives every run in CI all its tools."""

import gc
import os
import weakref
from functools import partial
from pathlib import Path

import contract
import jobs
import pytest
import slurm_cluster
from launching import MACHINE_CODE, STARTS, default_signals, needed

from mpiring.engine import engine
from mpiring.jit import cache, copies, sums
from mpiring.transport import compiled

# Workers of pytest-xdist say that they have a terminal of 80 columns, to which text is wrapped.
os.environ.pop("COLUMNS", None)

MPI_FOLDER = "mpi"
CLIENTS_FOLDER = "clients"
# Tests that start jobs, in the order in which one worker runs them. Beside the first ones the other
# worker runs tests that start none, and then, from the end, jobs that keep all cores busy, beside
# those here that mostly wait.
ORDER = ("slurm/", "test_real_mpi", "test_faults", "test_jobs", "tools/doctor/", "test_resume",
         "tools/test_lab", "torch/", "tools/bench/", "benchmarks/", "test_examples")


def pytest_addoption(parser):
    """Declare what a run by hand may ask for."""
    parser.addoption("--full", action="store_true",
                     help="all combinations in tables of contracts, not only all pairs of values")


def pytest_configure(config):
    """Let jobs react to signals, however the tests were started."""
    default_signals()
    contract.full = config.getoption("--full")
    if config.pluginmanager.has_plugin("hypothesispytest"):
        # A busy machine is no reason to fail.
        from hypothesis import HealthCheck, settings
        settings.register_profile("patient", deadline=None,
                                  suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("patient")


def pytest_ignore_collect(collection_path, config):
    """Collect tests/mpi only under mpiexec, and tests/clients only where the command names it.

    test_real_mpi.py starts the one; the other needs wheels that nothing else does.
    """
    if collection_path.name == MPI_FOLDER and not config.getoption("with_mpi", False):
        return True
    # Pytest does not ask for a folder that the command names.
    if collection_path.name == CLIENTS_FOLDER:
        return True
    return None


def pytest_collection_modifyitems(items):
    """Run tests that start jobs first: of two workers, the second begins at the end."""
    def place(item):
        if item.get_closest_marker("launch") is None:
            return len(ORDER) + 1
        path = item.path.relative_to(Path(__file__).parent).as_posix()
        return next((i for i, name in enumerate(ORDER) if path.startswith(name)), len(ORDER))

    items.sort(key=place)


def pytest_collection_finish():
    """Let garbage collections pass by what has been collected: each would take 0.2 s."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    """Refuse to run where a variable of the user's would change what is tested."""
    foreign = [name for name in os.environ if name.startswith("MPIRING_")]
    if foreign and not item.config.getoption("with_mpi", False):
        pytest.fail(f"unset {', '.join(foreign)} before running the tests")


def pytest_sessionfinish(session):
    """End the jobs that ran one program after the other, and add up what the workers started."""
    jobs.end_all()
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["starts"] = dict(STARTS), jobs.spent["rank_s"]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Take over how many jobs a worker has started."""
    starts, rank_s = getattr(node, "workeroutput", {}).get("starts", ({}, 0.0))
    STARTS.update(starts)
    jobs.spent["rank_s"] += rank_s


def pytest_terminal_summary(terminalreporter):
    """Say how many jobs were started: each rank imports what it needs anew."""
    if STARTS:
        ranks = sum(size * number for size, number in STARTS.items())
        sizes = ", ".join(f"{number} of {size}" for size, number in sorted(STARTS.items()))
        terminalreporter.write_line(
            f"{STARTS.total()} jobs of {ranks} ranks were started: {sizes}; ranks that stay took "
            f"{jobs.spent['rank_s']:.0f} s of ranks to start and import")


@pytest.fixture
def ranks():
    """Return `ranks(n, function)`, which calls `function(comm)` on n ranks; see jobs.call."""
    return jobs.call


@pytest.fixture
def own_engines(monkeypatch):
    """Let a test find the engines that it makes, and no others of this process."""
    monkeypatch.setattr(engine, "_engines", weakref.WeakValueDictionary())


@pytest.fixture(scope="session")
def slurm():
    """Return a Slurm of four nodes, up for all tests that want one; see slurm_cluster.py."""
    with slurm_cluster.running() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def machine_code():
    """Return a folder with the code of all compiled sums, also for jobs."""
    needed("numba")
    MACHINE_CODE.mkdir(parents=True, exist_ok=True)
    wanted = [partial(compiled.code, "sum", name, 2) for name in compiled.DTYPES]
    wanted += [copies.code, *(partial(sums.code, name) for name in sums.DTYPES)]
    # Of two workers each compiles half: what the other one has made is found.
    order = -1 if os.environ.get("PYTEST_XDIST_WORKER") == "gw1" else 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "_folder", MACHINE_CODE)
        codes = [code(compiles=True) for code in wanted[::order]]
    assert None not in codes
    return MACHINE_CODE
