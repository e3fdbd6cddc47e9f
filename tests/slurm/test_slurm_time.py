"""Looks at what became of the jobs whose time was over; conftest.py has started them early."""

import re

import pytest

pytestmark = [pytest.mark.launch, pytest.mark.any_mpi]

KILL_WAIT_S = 30


def test_a_warned_job_goes_on(trainings):
    """USR1 before the limit, checkpoint, requeue, resume, with the same weights bit by bit."""
    job = trainings.warned.job
    # A third attempt where the machine is so busy that the second one's time was over, too.
    job.wait_for(r"finished in attempt [2-9]")
    assert re.search(r"^stopped at step \d+: SIGUSR1 on rank 0", job.output, re.MULTILINE)
    assert re.findall(r"^epoch +(\d+)", job.output, re.MULTILINE) == ["1", "2", "3"]
    assert trainings.warned.weights() == trainings.undisturbed.weights() != []
    assert job.wait()["JobState"] == "COMPLETED" and int(job.show()["Restarts"]) >= 1


def test_a_job_is_ended_at_its_limit(trainings):
    shown = trainings.limited.wait("TIMEOUT")
    hours, minutes, seconds = map(int, shown["RunTime"].split(":"))
    assert 60 <= minutes * 60 + seconds <= 60 + KILL_WAIT_S + 30
    assert "DUE TO TIME LIMIT" in trainings.limited.output
    trainings.limited.until(lambda: not trainings.limited.processes(), "it is gone", KILL_WAIT_S)
