"""Tests what ends a training, and that everything is afterwards as it was before."""

import os
import signal
import subprocess
import sys
import time

import pytest
from launching import PROGRAMS, ROOT, environment, finish, launch, needed, start
from threads import Meeting, ThreadComm, on_ranks

from mpiring.errors import ConfigError
from mpiring.resilience import Stopping


@pytest.fixture
def comm():
    return ThreadComm(0, Meeting(1))


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)


def steps_until_stop(stopping, most=1000):
    for step in range(most):
        if stopping.now():
            return step
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


def test_a_later_handler_may_call_it_after_close(comm):
    calls = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: calls.append(number))
    try:
        with Stopping(comm):
            stopping_handler = signal.getsignal(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, lambda *arguments: stopping_handler(*arguments))
        os.kill(os.getpid(), signal.SIGUSR1)
        assert calls == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


PROGRAM = """
import time
from threads import Meeting, ThreadComm
from mpiring.resilience import Stopping, stopping
stopping._DUPLICATE_S = 0.1
with Stopping(ThreadComm(0, Meeting(1))) as stop:
    print("ready", flush=True)
    while True:
        time.sleep(0.01)
        if stop.now():
            print("stopped", flush=True)
"""


def test_the_second_signal_ends_the_process():
    path = os.pathsep.join([str(ROOT / "tests" / "helpers"), environment()["PYTHONPATH"]])
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True,
                          env=environment(PYTHONPATH=path)) as job:
        assert job.stdout.readline() == "ready\n"
        job.send_signal(signal.SIGTERM)
        assert job.stdout.readline() == "stopped\n"
        time.sleep(0.2)
        job.send_signal(signal.SIGTERM)
        job.stdout.read()
    assert job.returncode == -signal.SIGTERM


@pytest.mark.launch
@pytest.mark.parametrize("arguments", [
    ("fork", "SIGTERM"), ("spawn", "SIGTERM"), ("fork", "SIGUSR1", "before"),
    ("forkserver", "SIGUSR1"), ("pool", "SIGUSR1"), ("subprocess", "SIGUSR1")])
def test_a_signal_to_all_processes_of_a_job_ends_no_child(arguments):
    """Slurm sends signals to all of them."""
    needed("torch")
    ended = launch(1, PROGRAMS / "signaled_children.py", *arguments)
    assert ended.status == 0, ended.output
    assert f": {arguments[1]} on rank 0" in ended.output


@pytest.mark.launch
@pytest.mark.any_mpi
def test_a_fork_ends_on_sigterm_however_early_it_comes():
    """As `terminate()` of multiprocessing sends it, which then waits for the fork."""
    ended = launch(1, "-c", """
import os, signal, time, mpiring
from mpiring.resilience import Stopping
with mpiring.init() as comm, Stopping(comm, signals=[signal.SIGTERM]) as stopping:
    for _ in range(50):
        fork = os.fork()
        if not fork:
            time.sleep(1)
            os._exit(7)
        os.kill(fork, signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(fork, 0)[1]) == signal.SIGTERM
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) and not stopping.now()
print("all is well")""")
    ended.assert_well(1)


@pytest.mark.launch
@pytest.mark.any_mpi
def test_a_signal_to_mpirun_ends_no_child():
    needed("torch")
    # PyTorch warns of more workers than cores.
    job = start(2, "-W", "ignore", PROGRAMS / "signaled_children.py", "fork")
    for _ in range(2):
        assert "is ready" in job.stdout.readline()
    job.send_signal(signal.SIGUSR1)
    ended = finish(job)
    assert ended.status == 0 and ended.output.count(": SIGUSR1 on rank") == 2, ended.output


def test_children_that_a_signal_would_end_are_named(comm, caplog):
    with subprocess.Popen(["sleep", "60"]) as child, Stopping(comm):
        with subprocess.Popen(["sleep", "60"]) as protected:
            protected.send_signal(signal.SIGUSR1)
            protected.terminate()
        child.send_signal(signal.SIGUSR1)
    assert (child.returncode, protected.returncode) == (-signal.SIGUSR1, -signal.SIGTERM)
    assert f"rank 0 started processes {child.pid} before Stopping" in caplog.text
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with subprocess.Popen(["sleep", "60"]) as later:
        later.send_signal(signal.SIGUSR1)
    assert later.returncode == -signal.SIGUSR1


class Clock:
    """Time that passes only in `sleep`."""

    def __init__(self):
        self.now, self.localtime, self.strftime = 1e9, time.localtime, time.strftime

    def time(self):
        return self.now

    monotonic = time

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    fake = Clock()
    monkeypatch.setattr("mpiring.resilience.stopping.time", fake)
    return fake


class Saves:
    save_s = 10.0


@pytest.mark.parametrize("limit_s, step_s, options, kept_s", [
    (0, 0.1, {}, 0),                                    # the first answer says so
    (100, 0.1, {}, 5 + 2 * 0.1),                        # a twentieth, for an unknown checkpoint
    (10_000, 1.0, {}, 60 + 2 * 1.0),                    # but no more than that
    (5, 0.01, {}, 0.5),                                 # and no less
    (100, 0.1, {"checkpoints": Saves()}, 2 * 10 + 2 * 0.1),
    (100, 3.0, {"checkpoints": Saves()}, 2 * 10 + 2 * 3),
    (100, 0.1, {"margin_s": 7.0}, 7),
])
def test_a_time_limit_stops_before_it_is_over(comm, clock, limit_s, step_s, options, kept_s):
    began = clock.now
    with Stopping(comm, time_limit_s=limit_s, **options) as stopping:
        while not stopping.now():
            clock.sleep(step_s)
    assert stopping.reason == f"the time limit of {limit_s:g} s on rank 0"
    # At the first step after the margin has begun, or one later; a long step is not late.
    late_s = clock.now - began - (limit_s - kept_s)
    assert 0 <= late_s + 1e-6 and late_s <= step_s * (2 if step_s < 0.25 else 1) + 1e-6


def test_a_slow_step_is_forgotten_slowly(comm, clock):
    with Stopping(comm, time_limit_s=10_000, margin_s=None, checkpoints=Saves()) as stopping:
        stopping.now()
        clock.sleep(50)
        for _ in range(100):
            assert not stopping.now()
            clock.sleep(0.1)
        assert 2 * 5 < stopping._margin(10_000) - 20 < 2 * 50 * 0.98**90


def test_the_end_of_a_slurm_job_stops(comm, clock, monkeypatch, caplog):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(clock.now) + 100))
    with Stopping(comm) as stopping:
        while not stopping.now():
            clock.sleep(0.1)
    assert 94 < clock.now - 1e9 < 96
    assert stopping.reason.startswith("the end of the Slurm job at ")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(clock.now) - 2))
    with Stopping(comm) as stopping:
        assert steps_until_stop(stopping, 5) is None
    (record,) = caplog.records
    assert "SLURM_JOB_END_TIME has passed" in record.message


def test_what_cannot_work_is_refused(comm):
    for options in ({"time_limit_s": -1}, {"margin_s": float("nan")}):
        with pytest.raises(ConfigError, match="expected seconds, 0 or more"):
            Stopping(comm, **options)
    with pytest.raises(ConfigError, match="rank 0: .*create Stopping in the main thread"):
        on_ranks(1, Stopping)


def test_an_exception_restores_handlers_and_waits_for_nobody(comm):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), Stopping(comm) as stopping:
        stopping.now()
        comm.allgather_object = None
        1 / 0
    assert signal.getsignal(signal.SIGTERM) == before
