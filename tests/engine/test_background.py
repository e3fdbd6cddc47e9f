"""Tests that sums are compiled while a program runs, once and by a process that ends with it."""

import logging
import subprocess
import time
from types import SimpleNamespace

import pytest
from launching import PROGRAMS, installed, launch

from mpiring.engine import background
from mpiring.engine.background import BackgroundCompiler
from mpiring.jit import cache
from mpiring.transport.layout import COUNTER_SEQUENCE

FAILS = "raise SystemExit('no compiler here')"
SLEEPS = "import time; time.sleep(600)"


class Calls:
    """Fast calls of rank 0 of two, which has made many calls since it was first asked."""

    def __init__(self, folder):
        self.memory = SimpleNamespace(rank=0, ranks=(0, 1))
        config = SimpleNamespace(tuning_folder=str(folder), rounds="auto", machine_code=True)
        self.words = [0] * (COUNTER_SEQUENCE + 1)
        self.group = SimpleNamespace(
            config=config, sharing=SimpleNamespace(counter=SimpleNamespace(words=self.words)))


@pytest.fixture
def want(tmp_path, monkeypatch):
    """Return a function that lets a program compile, and returns the compiler and its processes."""
    installed("numba")
    monkeypatch.setattr(background, "_DELAY_S", 0.0)
    monkeypatch.setattr(background, "_LOOK_S", 0.01)
    for name, value in (("_folder", tmp_path), ("_codes", {}), ("_missing", set())):
        monkeypatch.setattr(cache, name, value)
    started, calls, compiler = [], Calls(tmp_path), BackgroundCompiler()
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen",
                        lambda *words, **how: started.append(popen(*words, **how)) or started[-1])

    def run(program, operations=background._OPERATIONS):
        monkeypatch.setattr(background, "_PROGRAM", program)
        compiler.want(calls, "sum", "float32")
        time.sleep(0.1)
        calls.words[COUNTER_SEQUENCE] += operations
        return compiler, calls, started

    yield run
    compiler.stop()


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_failure_is_logged_once_and_not_tried_again(want, caplog):
    caplog.set_level(logging.INFO)
    compiler, calls, started = want(FAILS)
    until(lambda: "no compiler here" in caplog.text)
    compiler.want(calls, "sum", "float32")
    compiler.stop()
    assert len(started) == 1
    assert caplog.text.count("in the background; comm.prepare() does it") == 1


def test_the_process_ends_with_the_communicator(want):
    compiler, _, started = want(SLEEPS)
    until(lambda: started)
    compiler.stop()
    assert started[0].returncode == -9


def test_few_calls_compile_nothing(want):
    compiler, _, started = want(SLEEPS, operations=1)
    time.sleep(0.2)
    compiler.stop()
    assert not started


@pytest.mark.launch
@pytest.mark.any_mpi
def test_sums_are_compiled_while_a_program_runs(tmp_path):
    installed("numba")
    ended = launch(2, PROGRAMS / "unprepared.py", timeout_s=600,
                   MPIRING_TUNING_FOLDER=str(tmp_path))
    assert ended.status == 0, ended.output
    assert ended.output.count(": compiled") == 2
