"""Tests how it is proved that MPI takes GPU memory, with trials that end in every way."""

import json
import logging
import sys
import time

import pytest
from launching import PROGRAMS, SOON_S, environment, mpiexec

from mpiring import Config
from mpiring.gpu import cuda
from mpiring.launch import gpu_aware
from mpiring.launch.start import find_mpiexec

LIBRARY = "some MPI 1.0"
TRIAL = sys.executable, str(PROGRAMS / "gpu_trial.py")


@pytest.mark.launch
@pytest.mark.any_mpi
@pytest.mark.parametrize(("how", "problem"), [
    ("well", ""), ("wrong", "arrived changed"), ("crash", "status"),
    ("hang", "a trial ")])
def test_a_trial_tells_what_went_wrong(how, problem, monkeypatch):
    monkeypatch.setattr(gpu_aware, "variables_for_another_job", environment)
    began = time.monotonic()
    told = gpu_aware.trial_problem(
        [mpiexec(), "-n", "2", *TRIAL, how], 1.0 if how == "hang" else 60.0)
    assert problem in told and bool(problem) == bool(told), told
    assert how != "hang" or time.monotonic() - began < SOON_S


def trial(comm):
    if comm.rank == 0:
        return gpu_aware.trial_problem([find_mpiexec(), "-n", "2", *TRIAL, "well"])


@pytest.mark.launch
def test_a_trial_can_be_made_inside_a_job(ranks):
    """Its ranks are no ranks of that job: the launcher's variables are not handed on."""
    assert ranks(2, trial) == ["", None]


def test_without_a_launcher_nothing_is_proved(monkeypatch, caplog):
    monkeypatch.setattr(cuda, "versions", lambda: "CuPy 14")
    monkeypatch.setattr(gpu_aware, "find_mpiexec", lambda: None)
    assert not gpu_aware.takes_pointers(Config(tuning_folder=""), LIBRARY, 0)
    assert "no mpiexec" in caplog.text and "MPIRING_GPU_AWARE=yes" in caplog.text
    assert "cannot be started" in gpu_aware.trial_problem(["/nowhere/mpiexec"])


def test_what_is_configured_is_not_tried(monkeypatch):
    monkeypatch.setattr(gpu_aware, "trial_problem", None)
    assert gpu_aware.takes_pointers(Config(gpu_aware="yes"), LIBRARY, 0)
    assert not gpu_aware.takes_pointers(Config(gpu_aware="no"), LIBRARY, 0)


def test_a_result_is_kept_for_the_same_libraries(monkeypatch, tmp_path, caplog):
    trials = []

    def trial(command):
        trials.append(command)
        return "it died" if len(trials) == 1 else ""

    monkeypatch.setattr(cuda, "versions", lambda: "CuPy 14")
    monkeypatch.setattr(gpu_aware, "find_mpiexec", lambda: "mpiexec")
    monkeypatch.setattr(gpu_aware, "trial_problem", trial)
    config = Config(tuning_folder=str(tmp_path / "new"))
    with caplog.at_level(logging.WARNING):
        assert not gpu_aware.takes_pointers(config, LIBRARY, 0)
        assert not gpu_aware.takes_pointers(config, LIBRARY, 0)
    assert len(trials) == 1 and "it died" in caplog.text
    assert trials[0][:3] == ["mpiexec", "-n", "2"]
    assert trials[0][-2:] == ["mpiring.launch.gpu_aware", "0"]
    # Another library has to prove it anew; so has one whose file nobody can read.
    assert gpu_aware.takes_pointers(config, "another MPI", 0) and len(trials) == 2
    assert gpu_aware.takes_pointers(config, "another MPI", 0) and len(trials) == 2
    files = list((tmp_path / "new").iterdir())
    assert len(files) == 2 and all("about" in json.loads(file.read_text()) for file in files)
    for file in files:
        file.write_text("{")
    assert gpu_aware.takes_pointers(config, LIBRARY, 0) and len(trials) == 3
