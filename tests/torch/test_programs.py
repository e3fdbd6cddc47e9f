"""Runs PyTorch over the back end, and DataParallel, on real ranks: programs, and broken jobs."""

import pytest
from jobs import run
from launching import PROGRAMS, SOON_S, installed, launch

pytestmark = [pytest.mark.launch, pytest.mark.any_mpi]


@pytest.fixture(autouse=True)
def _torch():
    installed("torch")


@pytest.mark.parametrize(("ranks", "command"), [
    (3, "collectives cpu"), (2, "collectives accelerator"), (3, "training"),
    (3, "async thread"), (3, "async inline"), (1, "groups FOLDER"), (3, "groups FOLDER"),
    (2, "equal FOLDER/store 20 cpu"), (1, "equal FOLDER/store 5 accelerator"),
    (1, "abilities cpu"), (3, "abilities cpu"), (2, "abilities simulated"),
    (2, "abilities accelerator"), (2, "reducers"), (2, "lifetimes"),
    (2, "defaults FOLDER"), (2, "profiled FOLDER")])
def test_a_program(ranks, command, tmp_path):
    program, *words = command.split()
    run(ranks, PROGRAMS / f"torch_{program}.py",
        *(word.replace("FOLDER", str(tmp_path)) for word in words)).assert_well(ranks)


@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives_with_nothing_in_them(ranks, tmp_path):
    run(ranks, PROGRAMS / "nothing.py", tmp_path, MPIRING_TUNING_FOLDER="").assert_well(ranks)


@pytest.mark.parametrize("program", ["torch_forks.py", "torch_recorder.py"])
def test_a_program_in_processes_of_its_own(program):
    """Data loaders with forked workers; and the flight recorder of PyTorch."""
    launch(2, PROGRAMS / program).assert_well(2)


FAULTS = {
    "shape": ["all_reduce ['sum'] of float32 (999,)", "all_reduce ['sum'] of float32 (1000,)"],
    "message": ["receiving 16 bytes from rank 1: it sent 12"],
    "missing call": ["StallError: rank 0: Timed out after 2 s in #3 all_reduce",
                     "rank 1 has NOT CALLED it; its last call was #2 all_reduce",
                     "TransportError: an earlier operation failed"],
    "missing bucket": ["StallError", "all_reduce ['sum'] of float32 (110,)", "rank 1 has NOT"],
    "missing member": ["StallError: rank 0: Timed out after 2 s in new_group: 1 of the ranks "
                       "[0, 1] have called it"],
    "buffer": ["BufferMismatchError", "the buffers cache torch.float32 (",
               "the same shapes on every rank"],
    "exception": ["rank 1 of 2", "ValueError: a bug in the user's code"],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_job_ends_with_the_reason(fault):
    ended = launch(2, PROGRAMS / "torch_fault.py", fault)
    assert ended.status != 0 and ended.seconds < SOON_S
    for text in FAULTS[fault]:
        assert text in ended.output, ended.output
