"""Tests what ends a training, and that everything is afterwards as it was before."""

import os
import signal
import subprocess
import sys
import time

import pytest
from launching import environment
from threads import Meeting, ThreadComm, on_ranks

from mpiring.config import job_end
from mpiring.errors import ConfigError
from mpiring.resilience import Stopping


@pytest.fixture
def comm():
    return ThreadComm(0, Meeting(1))


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)


def steps_until_stop(stopping, most=1000, step_s=0.0):
    for step in range(most):
        if stopping.now():
            return step
        time.sleep(step_s)
    return None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_stops_one_step_later(comm, number):
    before = signal.getsignal(number)
    with Stopping(comm) as stopping:
        assert steps_until_stop(stopping, 5) is None and stopping.reason == ""
        os.kill(os.getpid(), number)
        assert steps_until_stop(stopping) == 1
        assert stopping.reason == f"{number.name} on rank 0"
        assert stopping.now(), "and for good"
    assert signal.getsignal(number) == before


def test_an_earlier_handler_is_called_too(comm):
    calls = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: calls.append(number))
    try:
        with Stopping(comm) as stopping:
            os.kill(os.getpid(), signal.SIGUSR1)
            # Launchers may pass on what the ranks have received themselves.
            os.kill(os.getpid(), signal.SIGUSR1)
            assert calls == [signal.SIGUSR1] and steps_until_stop(stopping) == 1
        os.kill(os.getpid(), signal.SIGUSR1)
        assert len(calls) == 2
    finally:
        signal.signal(signal.SIGUSR1, before)


PROGRAM = """
import os, signal, sys, time
from threads import Meeting, ThreadComm
from mpiring.resilience import Stopping, stopping
stopping._TWICE_S = 0.1
with Stopping(ThreadComm(0, Meeting(1))) as stop:
    if sys.argv[1] == "fork" and os.fork():
        ended = os.WTERMSIG(os.wait()[1])
        print("the worker ended with", ended, "its parent", stop.now(), flush=True)
        sys.exit()
    print("ready", flush=True)
    if sys.argv[1] == "fork":
        os.kill(os.getpid(), signal.SIGTERM)
    while True:
        time.sleep(0.01)
        if stop.now():
            print("stopped", flush=True)
"""


def started(mode):
    here = os.path.dirname(__file__)
    path = os.pathsep.join([here, os.path.dirname(here), environment()["PYTHONPATH"]])
    return subprocess.Popen([sys.executable, "-c", PROGRAM, mode], stdout=subprocess.PIPE,
                            text=True, env=environment(PYTHONPATH=path))


def test_the_second_signal_ends_the_process():
    with started("twice") as job:
        assert job.stdout.readline() == "ready\n"
        job.send_signal(signal.SIGTERM)
        assert job.stdout.readline() == "stopped\n"
        time.sleep(0.2)
        job.send_signal(signal.SIGTERM)
        job.stdout.read()
    assert job.returncode == -signal.SIGTERM


def test_a_forked_worker_ends_at_once():
    with started("fork") as job:
        assert job.stdout.read().splitlines() == [
            "ready", "the worker ended with 15 its parent False"]
    assert job.returncode == 0


@pytest.mark.parametrize("limit_s, step_s, margin_s, least, most", [
    (0, 0.01, None, 1, 1),          # the first answer says so
    (0.8, 0.02, None, 5, 15),       # half a second is kept in any case
    (0.5, 0.02, 0.2, 5, 16),
    (1.5, 0.3, None, 1, 3),         # two steps are kept, and long ones wait for the answer
])
def test_a_time_limit_stops_before_it_is_over(comm, limit_s, step_s, margin_s, least, most):
    with Stopping(comm, time_limit_s=limit_s, margin_s=margin_s) as stopping:
        assert least <= steps_until_stop(stopping, step_s=step_s) <= most
    assert stopping.reason == f"the time limit of {limit_s:g} s on rank 0"


class Saves:
    save_s = 0.3


def test_time_is_kept_for_a_checkpoint(comm):
    began = time.monotonic()
    with Stopping(comm, time_limit_s=1.2, checkpoints=Saves()) as stopping:
        assert steps_until_stop(stopping, step_s=0.01)
    assert 0.4 < time.monotonic() - began < 0.9


def test_the_end_of_a_slurm_job_stops(comm, monkeypatch, caplog):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 2))
    with Stopping(comm) as stopping:
        assert steps_until_stop(stopping, step_s=0.01) > 3
    assert stopping.reason.startswith("the end of the Slurm job at ")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) - 2))
    with Stopping(comm) as stopping:
        assert steps_until_stop(stopping, 5) is None
    (record,) = caplog.records
    assert "SLURM_JOB_END_TIME is over" in record.message


def test_slurms_variable():
    assert job_end({}) is None and job_end({"SLURM_JOB_END_TIME": "0"}) is None
    assert job_end({"SLURM_JOB_END_TIME": "1795284174"}) == 1795284174
    assert job_end({"SLURM_JOB_END_TIME": "Unknown"}) is None


def test_what_cannot_work_is_refused(comm):
    for options in ({"time_limit_s": -1}, {"margin_s": float("nan")}):
        with pytest.raises(ConfigError, match="expected seconds, 0 or more"):
            Stopping(comm, **options)
    with pytest.raises(ConfigError, match="rank 0: .*make Stopping in the main thread"):
        on_ranks(1, Stopping)


def test_an_exception_restores_handlers_and_waits_for_nobody(comm):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), Stopping(comm) as stopping:
        stopping.now()
        comm.allgather_object = None
        1 / 0
    assert signal.getsignal(signal.SIGTERM) == before
