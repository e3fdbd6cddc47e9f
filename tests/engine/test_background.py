"""Tests that sums are compiled while a program runs, once and by a process that ends with it."""

import itertools
import logging
import subprocess
import time
from types import SimpleNamespace

import pytest
from launching import PROGRAMS, installed, launch, until

from mpiring.engine import background
from mpiring.engine.background import BackgroundCompiler
from mpiring.jit import cache

FAILS = "raise SystemExit('no compiler here')"
SLEEPS = "import time; time.sleep(600)"


class Counter:
    """Counts some operations each time that it is read."""

    def __init__(self, operations):
        self.operations = itertools.count(0, operations)

    @property
    def sequence(self):
        return next(self.operations)


class Calls:
    """Fast calls of rank 0 of two, which makes some operations each time they are counted."""

    def __init__(self, folder, operations):
        self.memory = SimpleNamespace(rank=0, ranks=(0, 1))
        config = SimpleNamespace(tuning_folder=str(folder), rounds="auto", machine_code=True)
        self.group = SimpleNamespace(
            config=config, sharing=SimpleNamespace(counter=Counter(operations)))


@pytest.fixture
def want(tmp_path, monkeypatch):
    """Return a function that lets a program compile, and returns the compiler and its processes."""
    installed("numba")
    monkeypatch.setattr(background, "_DELAY_S", 0.0)
    monkeypatch.setattr(background, "_INTERVAL_S", 0.01)
    for name, value in (("_folder", tmp_path), ("_codes", {}), ("_missing", set())):
        monkeypatch.setattr(cache, name, value)
    started, compiler = [], BackgroundCompiler()
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen",
                        lambda *words, **how: started.append(popen(*words, **how)) or started[-1])

    def run(program, operations=background._OPERATIONS):
        monkeypatch.setattr(background, "_PROGRAM", program)
        calls = Calls(tmp_path, operations)
        compiler.want(calls, "sum", "float32")
        return compiler, calls, started

    yield run
    compiler.stop()


def test_a_failure_is_logged_once_and_not_tried_again(want, caplog):
    caplog.set_level(logging.INFO)
    compiler, calls, started = want(FAILS)
    until(lambda: "no compiler here" in caplog.text)
    compiler.want(calls, "sum", "float32")
    compiler.stop()
    assert len(started) == 1
    assert caplog.text.count("in the background; comm.prepare() does it") == 1


def test_the_process_ends_with_the_communicator(want):
    compiler, calls, started = want(SLEEPS)
    until(lambda: started)
    compiler.stop()
    assert started[0].returncode == -9


def test_few_calls_compile_nothing(want):
    compiler, calls, started = want(SLEEPS, operations=0)
    time.sleep(0.2)
    compiler.stop()
    assert not started


@pytest.mark.launch
@pytest.mark.any_mpi
def test_sums_are_compiled_while_a_program_runs(tmp_path):
    installed("numba")
    ended = launch(2, PROGRAMS / "unprepared.py", timeout_s=500,
                   MPIRING_TUNING_FOLDER=str(tmp_path))
    assert ended.status == 0, ended.output
    assert ended.output.count(": compiled") == 2
