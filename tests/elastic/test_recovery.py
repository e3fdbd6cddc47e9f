"""Kills ranks of training jobs: the others go on, where MPI can; elastic_campaign.py does more."""

import functools
import subprocess

import pytest
from launching import PROGRAMS, launch, mpiexec, needed

pytestmark = pytest.mark.launch

TRAINING, STEPS = PROGRAMS / "elastic_training.py", 60
SURVIVES = ("--with-ft", "ulfm")


@functools.cache
def is_open_mpi():
    return "Open MPI" in subprocess.run(
        [mpiexec(), "--version"], capture_output=True, text=True, timeout=60).stdout


@pytest.fixture
def survives():
    if not is_open_mpi():
        pytest.skip(reason="this MPI ends the job when a rank dies")


@pytest.mark.parametrize(("place", "fates", "left", "variables"), [
    ("allreduce auto window", "0:averaging:20", 3, {}),
    ("commit", "1:commit:20,2:commit:20", 2, {}),
    ("allreduce ring", "3:compute:20,1:averaging:40", 2, {"MPIRING_SHARED_MEMORY": "0"}),
])
def test_the_others_go_on(survives, tmp_path, place, fates, left, variables):
    ended = launch(4, TRAINING, tmp_path, STEPS, place, fates, options=SURVIVES, **variables)
    assert ended.status == 0 and ended.output.count("right ") == left, ended.output
    assert f"of {4 if left == 3 or place == 'commit' else 3} ranks go on from step" in ended.output


def test_a_pytorch_model_goes_on(survives):
    needed("torch")
    ended = launch(4, PROGRAMS / "elastic_torch.py", "die", options=SURVIVES)
    assert ended.status == 0, ended.output
    assert ended.output.count("4 ranks at first, 2 at last") == 2, ended.output


def test_an_exception_ends_the_job_also_after_a_death(survives, tmp_path):
    ended = launch(3, TRAINING, tmp_path, STEPS, "raise", "0:compute:20", options=SURVIVES)
    assert ended.status != 0 and ended.seconds < 20
    assert "2 of 3 ranks go on from step 18" in ended.output, ended.output
    assert "ValueError: a bug in the user's code" in ended.output, ended.output


def test_elsewhere_training_is_plain(tmp_path):
    ended = launch(2, TRAINING, tmp_path, STEPS, "commit")
    assert ended.status == 0 and ended.output.count("right ") == 2, ended.output
    assert ended.output.count("a rank that dies ends this job") == 1, ended.output
