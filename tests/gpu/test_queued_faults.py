"""Tests that a job whose ranks wait for each other on GPUs ends when a rank does something else."""

import pytest
from launching import PROGRAMS, launch

pytestmark = pytest.mark.launch
ON_GPUS = {"shared memory": {}, "NCCL on a node": {"MPIRING_NCCL": "yes"},
           "NCCL between nodes": {"MPIRING_NCCL": "auto", "MPIRING_SHARED_MEMORY": "0"}}


@pytest.mark.parametrize("way", ON_GPUS)
@pytest.mark.parametrize(("how", "text"), [
    ("raises", "ValueError: a wrong value"), ("exits", ""), ("is killed", ""),
    ("sleeps", "reduce Mean()"), ("differs", "step of another program")])
def test_a_rank_does_something_else(how, text, way):
    ended = launch(2, PROGRAMS / "on_simulated_gpu.py", PROGRAMS / "queued_fault.py", how,
                   MPIRING_STALL_TIMEOUT_S="4", **ON_GPUS[way])
    assert ended.status and "step 1" in ended.output and "all is well" not in ended.output
    assert text in ended.output, ended.output


def test_nccl_fails():
    """It notices at once that a rank is missing."""
    ended = launch(2, PROGRAMS / "on_simulated_gpu.py", PROGRAMS / "queued_fault.py", "fails",
                   MPIRING_STALL_TIMEOUT_S="100", MPIRING_NCCL="yes")
    assert ended.status and "has failed: remote process exited: in a test" in ended.output


@pytest.mark.parametrize("way", ON_GPUS)
def test_ranks_that_agree_end_well(way):
    ended = launch(2, PROGRAMS / "on_simulated_gpu.py", PROGRAMS / "queued_fault.py", "agrees",
                   **ON_GPUS[way])
    assert ended.status == 0 and ended.output.count("all is well") == 2, ended.output
