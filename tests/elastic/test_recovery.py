"""Kills ranks of training jobs: the others go on, where MPI can; elastic_campaign.py does more."""

import functools
import os
import subprocess

import pages
import pytest
from jobs import run
from launching import HANG_S, PROGRAMS, ROOT, SOON_S, installed, launch, mpiexec

pytestmark = pytest.mark.launch

TRAINING, STEPS = PROGRAMS / "elastic_training.py", 60
SURVIVES = ("--with-ft", "ulfm")
GROWS = (*SURVIVES, "--prtemca", "state_base_recoverable", "1")


@functools.cache
def is_open_mpi():
    return "Open MPI" in subprocess.run(
        [mpiexec(), "--version"], capture_output=True, text=True, timeout=HANG_S).stdout


@pytest.fixture
def survives():
    if not is_open_mpi():
        assert "EXPECTED_MPI" not in os.environ, f"{mpiexec()} is not Open MPI's, as in CI"
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


def test_a_failure_after_a_recovery_is_told_by_the_new_communicator(survives):
    ended = launch(3, PROGRAMS / "reported.py", "recovered", "exception", options=SURVIVES)
    assert ended.status != 0 and ended.seconds < SOON_S
    _, *reports = ended.output.split("the last operations of rank ")
    assert [report[0] for report in reports] == ["1", "0"], ended.output
    assert all("float32 (77,)" in report for report in reports), ended.output


@pytest.mark.parametrize(("place", "variables"), [
    ("commit", {}), ("allreduce ring", {"MPIRING_SHARED_MEMORY": "0"})])
def test_new_ranks_replace_dead_ones(survives, tmp_path, place, variables):
    """All samples are used once, and the weights are those of a job in which no rank has died."""
    ended = launch(3, TRAINING, tmp_path, STEPS, place, "2:compute:20,0:averaging:40", 3,
                   options=GROWS, **variables)
    assert ended.status == 0, ended.output
    assert ended.output.count("3 ranks, [3]") == 3, ended.output
    assert ended.output.count("2 of 3 ranks and 1 new ones resume from step ") == 2, ended.output


def test_new_ranks_join_at_a_commit(survives, tmp_path):
    ended = launch(2, TRAINING, tmp_path, STEPS, "commit", "", 3, options=GROWS)
    assert ended.status == 0, ended.output
    assert ended.output.count("3 ranks, [3, 2]") == 3, ended.output
    assert "2 of 2 ranks and 1 new ones resume from step 1;" in ended.output, ended.output


def test_the_others_go_on_if_no_new_rank_can_start(survives, tmp_path):
    """Open MPI's mpirun returns an error status afterwards."""
    ended = launch(3, TRAINING, tmp_path, STEPS, "commit", "2:compute:20", 3,
                   options=(*GROWS, "--bind-to", "none", "--host", "localhost:3"),
                   PRTE_MCA_rmaps_default_mapping_policy=":nooversubscribe")
    assert ended.output.count("2 ranks, [3, 2]") == 2, ended.output
    assert "2 ranks continue without new ones: rank 0: MPI_Comm_spawn: " in ended.output


def test_an_exception_ends_the_job_also_with_new_ranks(survives, tmp_path):
    ended = launch(3, TRAINING, tmp_path, STEPS, "raise", "0:compute:20", 3, options=GROWS)
    assert ended.status != 0
    assert "2 of 3 ranks and 1 new ones resume from step 18" in ended.output, ended.output
    assert "ValueError: a bug in the user's code" in ended.output, ended.output
    assert ended.output.count(" resume from step ") == 1, ended.output


@pytest.mark.parametrize(("fate", "options", "left"), [("die", SURVIVES, 2), ("grow", GROWS, 4)])
def test_a_pytorch_model_goes_on(survives, fate, options, left):
    installed("torch")
    ended = launch(4, PROGRAMS / "elastic_torch.py", fate, options=options)
    assert ended.status == 0, ended.output
    assert ended.output.count(f"4 ranks at first, {left} at last") == left, ended.output


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


@pytest.mark.parametrize(("call", "options", "left"), [
    ("elastic.run(train, state)", SURVIVES, 2),
    ("elastic.run(train, state, max_ranks=3)", GROWS, 3)])
def test_the_program_of_the_documentation(survives, tmp_path, call, options, left):
    """Rank 0 dies in step 15, and the others begin again at step 10; test_docs lets it live."""
    page, program = "docs/how_to/elastic.md", tmp_path / "program.py"
    assert call in (ROOT / page).read_text()
    text = pages.example(page, "elastic.State(").text
    program.write_text(text.replace("elastic.run(train, state)", call))
    ended = launch(3, program, 15, options=options)
    assert ended.status == 0, ended.output
    assert ended.output.count(f"right with {left}") == left, ended.output
