"""Disturbs training jobs of a real Slurm: they go on, and learn the same weights bit by bit."""

import os
import re
import signal
import time

import pages
import pytest
from launching import PROGRAMS, ROOT, SOON_S, needed

pytestmark = [pytest.mark.launch, pytest.mark.any_mpi]

TRAIN, PREEMPTIBLE = ROOT / "slurm" / "train.sbatch", ROOT / "slurm" / "preemptible.sbatch"
# What Slurm itself waits, as slurm_cluster.py sets it: until a requeued job may start, and until it
# gives up a node that is silent.
REQUEUE_S, SILENCE_S = 10, 90
STEPS_PER_EPOCH = 15


def check(training, undisturbed, *, lost_steps):
    """Hold a job that was disturbed once to what all of them promise."""
    job = training.job
    job.wait_for("attempt 2 of")
    job.wait_for("finished in attempt 2")
    assert job.wait()["Restarts"] == "1"
    undisturbed.job.wait_for("finished in attempt 1")
    assert training.weights() == undisturbed.weights() != []
    assert len(training.weights()) == 2
    epochs = re.findall(r"^epoch +(\d+)", job.output, re.MULTILINE)
    if not lost_steps:
        assert epochs == ["1", "2", "3"], "no step was done twice"
    else:
        assert len(epochs) - len(set(epochs)) <= lost_steps / STEPS_PER_EPOCH


@pytest.fixture(scope="module")
def on_n4(slurm, trainings):
    """Return a training and a job of train.sbatch on a node whose daemon was killed."""
    training = trainings.start("lost", nodes="n[1,4]", step_s=4)
    job = sleeping(slurm, "n4")
    training.job.wait_for("epoch   1")
    slurm.kill_node("n4")
    return training, job


def sleeping(slurm, node):
    return slurm.submit(TRAIN, "-c", "import time; time.sleep(300)", options=[
        "--nodes=1", "--ntasks-per-node=1", f"--nodelist={node}"])


def test_jobs_go_on_whatever_happens(on_n4, slurm, trainings):
    """All of them at once, since most of the time they wait for Slurm."""
    by_user, killed = trainings.start("by user"), trainings.start("killed")
    preempted, ended = trainings.start("preempted", nodes="n[2-3]"), sleeping(slurm, "n3")
    for training in (by_user, killed, preempted):
        training.job.wait_for("epoch   1")
    began = time.monotonic()
    by_user.job.cancel("--signal=USR1")
    os.kill(killed.job.processes("train_numpy.py")[-1], signal.SIGKILL)
    urgent = slurm.submit(TRAIN, PROGRAMS / "where.py", options=[
        "--partition=urgent", "--nodelist=n3", "--nodes=1", "--cpus-per-task=4"])
    for training in (by_user, killed):
        training.job.wait_for("attempt 2 of")
    assert time.monotonic() - began < SOON_S + REQUEUE_S
    assert "stopped at step" in by_user.job.output and "SIGUSR1 on rank" in by_user.job.output
    assert "status 0: back" not in killed.job.output
    assert urgent.wait()["JobState"] == "COMPLETED", urgent.output
    preempted.job.wait_for("attempt 2 of", timeout_s=SOON_S + REQUEUE_S)
    assert "stopped at step" in preempted.job.output and "SIGTERM on rank" in preempted.job.output
    # That of train.sbatch does not go on: it would begin again from the start.
    assert ended.wait()["JobState"] in ("FAILED", "PREEMPTED")
    for training, lost_steps in ((by_user, 0), (preempted, 0), (killed, 15)):
        check(training, trainings.undisturbed, lost_steps=lost_steps)


def test_a_signal_ends_no_worker_of_a_data_loader(slurm):
    """Slurm sends it to all processes of a step; mpirun and srun pass on what they get."""
    needed("torch")
    jobs = {options: slurm.submit(
        PREEMPTIBLE, PROGRAMS / "signaled_children.py", "fork", ATTEMPTS="1",
        options=["--nodes=2", "--ntasks-per-node=1"])
        for options in (("--signal=USR1", "--batch"), ("--signal=TERM",))}
    for options, job in jobs.items():
        job.wait_for("rank 0 is ready")
        job.wait_for("rank 1 is ready")
        job.cancel(*options)
    for job in jobs.values():
        assert job.wait()["ExitCode"] == "75:0", job.output
        assert job.output.count("\nstopped at step") == 2, job.output


def test_the_program_of_the_page_goes_on_with_several_nodes(slurm, tmp_path):
    """With three, because another test has lost the fourth one."""
    needed("torch")
    program = tmp_path / "train.py"
    program.write_text(pages.example("docs/how_to/slurm_resume.md", "Stopping").shown)
    job = slurm.submit(
        PREEMPTIBLE, PROGRAMS / "slow_attempt.py", 2, program, tmp_path / "run1", 60,
        options=["--nodes=3", "--ntasks-per-node=1"])
    job.wait_for("step 20 ")
    job.cancel("--signal=USR1")
    job.wait_for("finished in attempt 2")
    assert job.wait()["Restarts"] == "1"
    (stopped,) = re.findall(r"^stopped at step (\d+): SIGUSR1", job.output, re.MULTILINE)
    assert 20 <= int(stopped) < 60
    assert re.findall(r"^begin at step (\d+)", job.output, re.MULTILINE) == ["0", stopped]
    steps = re.findall(r"^step (\d+) ", job.output, re.MULTILINE)
    assert steps == [str(step) for step in range(10, 70, 10)], "no step was done twice"


def test_attempts_are_bounded(trainings):
    """The last one still writes its checkpoint, so that another job can go on."""
    training = trainings.start("bounded", ATTEMPTS="1")
    training.job.wait_for("epoch   1")
    training.job.cancel("--signal=USR1", "--batch")
    shown = training.job.wait()
    assert shown["ExitCode"] == "75:0" and shown["Restarts"] == "0"
    assert "not finished after 1 attempts: submit it again to resume" in training.job.output
    again = trainings.start("again", checkpoint=training.folder, step_s=0)
    again.job.wait_for("finished in attempt 1")
    assert again.weights() == trainings.undisturbed.weights()
    assert "epoch   1" not in again.job.output


def test_a_full_disk_ends_the_job(slurm, trainings):
    """The next attempt would fail in the same way."""
    training = trainings.start("full", step_s=0, checkpoint=slurm.folder / "small" / "run")
    training.job.wait_for("epoch   1")
    began = time.monotonic()
    shown = training.job.wait()
    assert time.monotonic() - began < SOON_S
    assert (shown["JobState"], shown["ExitCode"], shown["Restarts"]) == ("FAILED", "1:0", "0")
    assert "No space left on device" in training.job.output
    assert "failed with status 1 in attempt 1: the job ends" in training.job.output


def test_a_lost_node(on_n4, slurm, trainings):
    training, job = on_n4
    training.job.until(lambda: training.job.show()["Restarts"] == "1", "Slurm has requeued it",
                       SILENCE_S)
    assert job.wait()["JobState"] == "NODE_FAIL"
    slurm.start_node("n4")
    training.job.wait_for("attempt 2 of", timeout_s=SOON_S + REQUEUE_S)
    check(training, trainings.undisturbed, lost_steps=15)
