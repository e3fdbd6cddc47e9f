"""Breaks Slurm jobs in every way: each ends soon, says why, and leaves nothing behind."""

import time

import pytest
from launching import PROGRAMS, ROOT, SOON_S

pytestmark = pytest.mark.launch

TRAIN = ROOT / "slurm" / "train.sbatch"
PREEMPTIBLE = ROOT / "slurm" / "preemptible.sbatch"
FAULT = PROGRAMS / "fault.py"
TWO_NODES = ["--nodes=2", "--ntasks-per-node=1"]
IMPATIENT = {"MPIRING_STALL_WARNING_S": "1", "MPIRING_STALL_TIMEOUT_S": "3"}
REASONS = {
    "killed": "",
    "raise": "ValueError: a bug in the user's code",
    "leaves early": "",
    "shape": "BufferMismatchError: rank",
    "missing call": "rank 1 has NOT CALLED it",
}
# srun's own ways to see that a rank is gone; the others end by MPI_Abort.
BY_SRUN = ("killed", "raise", "leaves early")


def broken(slurm, faults, **variables):
    """Submit a job for each fault, all at once."""
    return {fault: slurm.submit(TRAIN, FAULT, fault, options=TWO_NODES, **IMPATIENT, **variables)
            for fault in faults}


def check(job, fault):
    job.wait_for("is ready")
    began = time.monotonic()
    shown = job.wait()
    assert time.monotonic() - began < SOON_S
    assert shown["JobState"] == "FAILED" and shown["ExitCode"] != "0:0", job.output
    assert REASONS[fault] in job.output
    job.until(lambda: not job.processes(), "all its processes are gone", SOON_S)
    assert shown["Restarts"] == "0", "no resume was asked for"


@pytest.mark.any_mpi
def test_scancel_ends_a_job_for_good_and_leaves_nothing(slurm, trainings):
    """The first test; trainings begin meanwhile, see conftest.py."""
    jobs = [slurm.submit(script, FAULT, "wait for ever", options=TWO_NODES)
            for script in (TRAIN, PREEMPTIBLE)]
    for job in jobs:
        job.wait_for("is ready")
        job.cancel()
    began = time.monotonic()
    for job in jobs:
        assert job.wait()["JobState"] == "CANCELLED"
        job.until(lambda: not job.processes(), "all its processes are gone", SOON_S)
        assert job.show()["JobState"] == "CANCELLED", "it was not requeued"
    assert time.monotonic() - began < SOON_S


@pytest.mark.any_mpi
def test_a_broken_job_ends(slurm):
    for fault, job in broken(slurm, REASONS).items():
        check(job, fault)


def test_only_what_did_not_fail_by_itself_is_tried_again(slurm):
    tried = {fault: slurm.submit(PREEMPTIBLE, FAULT, fault, options=TWO_NODES, ATTEMPTS="1",
                                 **IMPATIENT) for fault in REASONS}
    for fault, job in tried.items():
        shown = job.wait()
        assert shown["RunTime"] <= f"00:00:{SOON_S}", job.output
        again = fault in ("killed", "missing call")
        assert (shown["ExitCode"] == "75:0") == again, f"{fault}: {shown['ExitCode']} {job.output}"
        assert ("not finished after 1 attempts" in job.output) == again
        assert ("in attempt 1: the job ends" in job.output) != again


@pytest.mark.any_mpi
def test_srun_ends_what_a_rank_has_left(slurm):
    """As test_a_broken_job_ends, where MPICH's ranks are started by srun instead of mpirun.

    One rank per node and libfabric, since Slurm's pmi2 garbles what MPICH sends it else.
    """
    for fault, job in broken(slurm, BY_SRUN, SLURM_MPI_TYPE="pmi2", MPICH_CH4_NETMOD="ofi").items():
        check(job, fault)


@pytest.mark.any_mpi
def test_a_log_that_cannot_be_written(slurm):
    """Slurm says it, since the job cannot."""
    nowhere = slurm.submit(TRAIN, FAULT, "no close", options=["--output=/nonexistent/log"])
    full = slurm.submit(TRAIN, FAULT, "no close", options=["--output=/dev/full"])
    unread = slurm.submit(PREEMPTIBLE, FAULT, "no close", options=["--error=/dev/null"])
    assert unread.wait()["ExitCode"] == "2:0"
    assert (nowhere.wait()["JobState"], nowhere.show()["Reason"]) == ("FAILED", "JobLaunchFailure")
    assert (full.wait()["JobState"], full.show()["ExitCode"]) == ("FAILED", "1:0")
