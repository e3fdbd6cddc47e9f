"""Tests the cluster in one machine: places, traffic, speed, and that nothing is left behind."""

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from launching import HANG_S, PROGRAMS, ROOT, SOON_S, environment, installed, missing

from mpiring import ConfigError, LaunchError, MissingDependencyError
from mpiring.tools.lab import lab

pytestmark = [pytest.mark.launch, pytest.mark.any_mpi]

TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv")


@pytest.fixture(autouse=True)
def no_other_tests_lab():
    """Wait until no other tests use a lab: a machine has only one that stays up."""
    with open(Path(tempfile.gettempdir(), "mpiring-test-lab.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture
def possible():
    """Skip, or fail in CI, where the lab cannot be."""
    needs = [tool for tool in TOOLS if shutil.which(tool) is None]
    needs += ["root"] if os.geteuid() != 0 else []
    try:
        lab._mpich_mpiexec()
    except MissingDependencyError:
        needs.append("MPICH's mpiexec")
    if needs:
        missing(f"the lab needs {needs}")


def command(*words):
    return [sys.executable, "-m", "mpiring", "lab", *map(str, words)]


def run(*words, timeout_s=HANG_S):
    return subprocess.run(command(*words), cwd=ROOT, env=environment(), text=True,
                          capture_output=True, timeout=timeout_s)


def python(*words):
    return ("--", sys.executable, *words)


def holders():
    """Return the processes of all labs."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"bridge0" in path.read_bytes() or b"remote-shell" in path.read_bytes():
                pids.append(int(path.parts[2]))
        except OSError:
            pass
    return pids


def gone(timeout_s=SOON_S):
    deadline = time.monotonic() + timeout_s
    while holders():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_two_levels(possible):
    """Also of three of the four ranks."""
    ended = run("run", "--hosts", 2, "--ranks-per-host", 2, "--placement", "round-robin",
                *python(PROGRAMS / "two_levels.py"))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "checked [0, 1, 0, 1]\nchecked [0, 1, 0]\n"
    assert gone()


def test_the_first_allreduce_between_hosts_measures_and_keeps(possible, tmp_path):
    settings = environment(MPIRING_TUNING="1", MPIRING_TUNING_FOLDER=str(tmp_path))
    for _ in range(2):
        ended = subprocess.run(
            command("run", "--hosts", 2, "--ranks-per-host", 2, *python(PROGRAMS / "tuned.py")),
            cwd=ROOT, text=True, capture_output=True, timeout=HANG_S, env=settings)
        assert ended.returncode == 0, ended.stderr
        # At least the check of a kept model; on a busy machine it is measured anew.
        assert int(re.fullmatch(r"tuned (\d+) operations\n", ended.stdout)[1]) > 5
        (file,) = tmp_path.iterdir()
        assert "ranks per node [2, 2]" in file.read_text()
    assert gone()


def test_pytorch_finds_rank_0_where_names_mean_nothing(possible):
    installed("torch")
    ended = run("run", "--hosts", 2, "--ranks-per-host", 2, *python(PROGRAMS / "torch_meeting.py"))
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == [
        f"rank {rank} of 4, local {rank % 2} of 2, met at 10.77.0.1" for rank in range(4)]


def test_gloo_connects_hosts_where_names_mean_nothing(possible):
    """By default, Gloo would use the address of the host's name."""
    installed("torch")
    ended = run("run", "--hosts", 2, *python(PROGRAMS / "torch_gloo.py", "mpi://"))
    assert ended.returncode == 0, ended.stderr
    first, second = ended.stdout.splitlines()
    assert first == second and first.startswith("weights ")


def test_the_doctor_measures_the_links(possible):
    ended = run("run", "--hosts", 2, "--rate", "200mbit", *python("-m", "mpiring", "doctor"))
    assert ended.returncode == 0, ended.stdout
    assert "ranks: 2 ranks on 2 nodes, 1 on each" in ended.stdout
    gbit = float(re.search(r"between nodes: [\d.]+ us, ([\d.]+) Gbit/s", ended.stdout)[1])
    assert 0.01 < gbit < 0.21, ended.stdout
    assert gone()


@pytest.mark.parametrize(("ranks_per_host", "placement", "places"), [
    (2, "block", "[(0, 0, 3), (0, 1, 3), (1, 0, 3), (1, 1, 3), (2, 0, 3), (2, 1, 3)]"),
    (2, "round-robin", "[(0, 0, 3), (1, 0, 3), (2, 0, 3), (0, 1, 3), (1, 1, 3), (2, 1, 3)]")],
    ids=["block", "round-robin"])
def test_links_between_placed_ranks_carry_what_theory_says_at_their_rate(
        possible, ranks_per_host, placement, places):
    """The ring leaves each host once, wherever the ranks are."""
    began = time.monotonic()
    ended = run("run", "--hosts", 3, "--rate", "50mbit", "--traffic",
                "--ranks-per-host", ranks_per_host, "--placement", placement,
                *python(PROGRAMS / "where.py"))
    assert ended.returncode == 0, ended.stderr
    counts = re.findall(r"host (\d): sent ([\d,]+) bytes, received ([\d,]+)", ended.stdout)
    assert [host for host, _, _ in counts] == ["1", "2", "3"]
    p = 3 * ranks_per_host
    assert f"places {places} sum {p:.1f}" in ended.stdout
    payload = 2 * (p - 1) / p * 4_000_000
    for _, *bytes_both_ways in counts:
        for count in bytes_both_ways:
            assert payload < int(count.replace(",", "")) < 1.1 * payload
    assert time.monotonic() - began > payload / (50e6 / 8)
    assert gone()


def test_a_lab_that_stays(possible):
    assert run("down").returncode == 0
    assert "no lab is up" in run("status").stdout
    try:
        assert "2 hosts are up, with links of 100mbit" in run(
            "up", "--hosts", 2, "--rate", "100mbit").stdout
        again = run("up")
        assert again.returncode == 2 and "a lab is up already" in again.stderr
        ended = run("run", *python(PROGRAMS / "where.py"))
        assert "[(0, 0, 2), (1, 0, 2)] sum 2.0" in ended.stdout, ended.stderr
        (first, second) = re.findall(r"sent ([\d,]+) bytes", run("status").stdout)
        assert int(first.replace(",", "")) > 4_000_000
        assert run("run", *python("-c", "raise SystemExit(3)")).returncode == 3
        other_rate = run("run", "--rate", "1gbit", *python("-c", "1"))
        assert other_rate.returncode == 2 and "has links of 100mbit" in other_rate.stderr
        too_many = run("run", "--hosts", 3, *python("-c", "1"))
        assert too_many.returncode == 2 and "the lab has 2 hosts" in too_many.stderr
    finally:
        assert "the lab is down" in run("down").stdout
    assert gone() and "no lab is up" in run("status").stdout


def test_two_labs_do_not_collide(possible):
    jobs = [subprocess.Popen(command("run", "--hosts", 2, *python(PROGRAMS / "where.py")),
                             cwd=ROOT, env=environment(), text=True, stdout=subprocess.PIPE)
            for _ in range(2)]
    try:
        for job in jobs:
            assert "[(0, 0, 2), (1, 0, 2)] sum 2.0" in job.communicate(timeout=HANG_S)[0]
    finally:
        for job in jobs:
            # One that hangs would take a core from all tests that follow.
            job.send_signal(signal.SIGINT)
            job.communicate()
    assert gone()


def test_a_lab_that_nobody_wants_any_more_ends(possible):
    """As when `lab up` is interrupted before it has noted the lab."""
    _, process = lab._start(2, "1gbit", "read -r go; exec sleep infinity")
    assert holders()
    process.communicate()
    assert gone() and lab.running_lab() is None


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_behind(possible, end):
    # One rank speaks: the outputs of two may mix within a line.
    program = ("import os, time; os.environ['PMI_RANK'] == '0' and print('up', flush=True); "
               "time.sleep(60)")
    with subprocess.Popen(command("run", "--hosts", 2, *python("-c", program)), cwd=ROOT,
                          env=environment(), text=True, stdout=subprocess.PIPE) as job:
        try:
            assert job.stdout.readline() == "up\n"
            assert holders()
        finally:
            job.send_signal(end)
        assert job.wait(SOON_S) != 0
    assert gone(), f"left behind: {holders()}"
    links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True).stdout
    assert "bridge0" not in links and "port1" not in links


def test_bad_labs(possible):
    for hosts, rate, message in ((0, "1gbit", "hosts=0: expected 1 to 250"),
                                 (2, "0gbit", "rate='0gbit': expected a number")):
        with pytest.raises(ConfigError, match=message), lab.temporary(hosts, rate):
            pass


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda tool, **where: None)
    with pytest.raises(MissingDependencyError, match="apt-get install iproute2"):
        lab.up(2, "1gbit")
    monkeypatch.setattr(shutil, "which", lambda tool, **where: tool)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LaunchError, match="needs root; you are user 1000"):
        lab.up(2, "1gbit")
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(LaunchError, match="this is darwin"):
        lab.up(2, "1gbit")
