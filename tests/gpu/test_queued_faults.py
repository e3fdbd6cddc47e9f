"""Tests that a job whose ranks wait for each other on GPUs ends when a rank does something else."""

import pytest
from launching import PROGRAMS, launch

pytestmark = pytest.mark.launch


@pytest.mark.parametrize(("how", "text"), [
    ("raises", "ValueError: a wrong value"), ("exits", ""), ("is killed", ""),
    ("sleeps", "on a GPU reduce Mean()"), ("differs", "step of another program")])
def test_a_rank_does_something_else(how, text):
    ended = launch(2, PROGRAMS / "on_simulated_gpu.py", PROGRAMS / "queued_fault.py", how,
                   MPIRING_STALL_TIMEOUT_S="4")
    assert ended.status and "step 1" in ended.output and "all is well" not in ended.output
    assert text in ended.output, ended.output


def test_ranks_that_agree_end_well():
    ended = launch(2, PROGRAMS / "on_simulated_gpu.py", PROGRAMS / "queued_fault.py", "agrees")
    assert ended.status == 0 and ended.output.count("all is well") == 2, ended.output
