"""Kills ranks of training jobs: the others go on, where MPI can; elastic_campaign.py does more."""

import functools
import subprocess

import pages
import pytest
from jobs import run
from launching import HANG_S, PROGRAMS, SOON_S, installed, launch, mpiexec

pytestmark = pytest.mark.launch

TRAINING, STEPS = PROGRAMS / "elastic_training.py", 60
SURVIVES = ("--with-ft", "ulfm")


@functools.cache
def is_open_mpi():
    return "Open MPI" in subprocess.run(
        [mpiexec(), "--version"], capture_output=True, text=True, timeout=HANG_S).stdout


@pytest.fixture
def survives():
    if not is_open_mpi():
        pytest.skip(reason="this MPI ends the job when a rank dies")


@pytest.mark.parametrize(("place", "fates", "sizes", "variables"), [
    ("commit", "1:commit:20,2:commit:20", [4, 2], {}),
    ("allreduce ring", "3:compute:20,1:averaging:40", [4, 3, 2], {"MPIRING_SHARED_MEMORY": "0"}),
])
def test_the_others_go_on(survives, tmp_path, place, fates, sizes, variables):
    ended = launch(4, TRAINING, tmp_path, STEPS, place, fates, options=SURVIVES, **variables)
    assert ended.status == 0, ended.output
    assert ended.output.count(f"{sizes[-1]} ranks, {sizes}") == sizes[-1], ended.output
    for before, left in zip(sizes, sizes[1:]):
        assert f"{left} of {before} ranks resume from step " in ended.output, ended.output


def test_a_pytorch_model_goes_on(survives):
    installed("torch")
    ended = launch(4, PROGRAMS / "elastic_torch.py", "die", options=SURVIVES)
    assert ended.status == 0, ended.output
    assert ended.output.count("4 ranks at first, 2 at last") == 2, ended.output


def test_a_script_of_horovod_goes_on(survives):
    installed("torch")
    ended = launch(4, PROGRAMS / "horovod_elastic.py", "die", options=SURVIVES)
    assert ended.status == 0, ended.output
    assert ended.output.count("4 ranks at first, 2 at last") == 2, ended.output


def test_a_script_of_horovod_elsewhere():
    installed("torch")
    ended = run(2, PROGRAMS / "horovod_elastic.py")
    assert ended.status == 0, ended.output
    assert ended.output.count("2 ranks at first, 2 at last") == 2, ended.output


def test_an_exception_ends_the_job_also_after_a_death(survives, tmp_path):
    ended = launch(3, TRAINING, tmp_path, STEPS, "raise", "0:compute:20", options=SURVIVES)
    assert ended.status != 0 and ended.seconds < SOON_S
    assert "2 of 3 ranks resume from step 18" in ended.output, ended.output
    assert "ValueError: a bug in the user's code" in ended.output, ended.output


def test_elsewhere_training_is_plain(tmp_path):
    ended = run(2, TRAINING, tmp_path, STEPS, "commit")
    assert ended.status == 0 and ended.output.count("right ") == 2, ended.output
    assert ended.output.count("a rank that dies ends this job") == 1, ended.output


def test_the_program_of_the_documentation(survives, tmp_path):
    """Rank 0 dies in step 15, and the two others begin again at step 10; test_docs lets it live."""
    program = tmp_path / "program.py"
    program.write_text(pages.example("docs/how_to/elastic.md", "elastic.run").text)
    ended = launch(3, program, 15, options=SURVIVES)
    assert ended.status == 0, ended.output
    assert ended.output.count("right with 2") == 2, ended.output
