"""Tests that a job whose ranks wait for each other on GPUs ends when a rank does something else."""

import pytest
from launching import PROGRAMS, launch

pytestmark = pytest.mark.launch
ON_GPUS = {"shared memory": {}, "NCCL on a node": {"MPIRING_NCCL": "yes"},
           "NCCL between nodes": {"MPIRING_NCCL": "auto", "MPIRING_SHARED_MEMORY": "0"}}


def trained(how, way, **variables):
    """Return how a job has ended in which a rank does something else."""
    return launch(2, PROGRAMS / "on_simulated_gpu.py", PROGRAMS / "queued_fault.py", how,
                  **ON_GPUS[way], **variables)


@pytest.mark.parametrize(("how", "text", "way"), [
    ("raises", "ValueError: a wrong value", "shared memory"), ("exits", "", "shared memory"),
    ("is killed", "", "shared memory"),
    *(pytest.param(how, text, way, marks=pytest.mark.any_mpi) for way in ON_GPUS for how, text in (
        ("sleeps", "reduce Mean()"), ("differs", "step of another program"))),
    *(pytest.param("is killed", "", way, marks=pytest.mark.any_mpi) for way in [*ON_GPUS][1:])])
def test_a_rank_does_something_else(how, text, way):
    ended = trained(how, way, MPIRING_STALL_TIMEOUT_S="4")
    assert ended.status and "step 1" in ended.output and "all is well" not in ended.output
    assert text in ended.output, ended.output


@pytest.mark.any_mpi
def test_nccl_fails():
    """It notices at once that a rank is missing."""
    ended = trained("fails", "NCCL on a node", MPIRING_STALL_TIMEOUT_S="100")
    assert ended.status and "has failed: remote process exited: in a test" in ended.output


@pytest.mark.any_mpi
def test_after_a_stall_the_program_can_use_its_gpu():
    ended = trained("stalls", "NCCL on a node", MPIRING_STALL_TIMEOUT_S="4")
    assert ended.status and "the GPU is free" in ended.output, ended.output
    assert "StallError" in ended.output


@pytest.mark.any_mpi
@pytest.mark.parametrize("way", ON_GPUS)
def test_ranks_that_agree_end_well(way):
    ended = trained("agrees", way)
    assert ended.status == 0 and ended.output.count("all is well") == 2, ended.output
