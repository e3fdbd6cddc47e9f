"""Tests the torch.distributed back end: the same programs over it and over Gloo."""

import pytest
from jobs import run
from launching import PROGRAMS, SOON_S, installed, launch

pytestmark = [pytest.mark.launch, pytest.mark.any_mpi]


@pytest.fixture(autouse=True)
def _torch():
    installed("torch")


@pytest.mark.parametrize(("ranks", "program", "words", "said"), [
    (3, "collectives", ["cpu"], "cases agree with Gloo"),
    (2, "collectives", ["accelerator"], "cases agree with Gloo"),
    (3, "training", [], "ways of training agree with Gloo"),
    (3, "async", ["thread"], "all is well"), (3, "async", ["inline"], "all is well"),
    # These make groups, shard models and start again.
    (1, "groups", [], "all is well"), (3, "groups", [], "all is well")])
def test_a_program(ranks, program, words, said, tmp_path):
    ended = run(ranks, PROGRAMS / f"torch_{program}.py", *words or [tmp_path])
    assert ended.status == 0, ended.output
    assert ended.output.count(said) == ranks


def test_data_loaders_with_forked_workers():
    ended = launch(2, PROGRAMS / "torch_forks.py")
    assert ended.status == 0, ended.output
    assert ended.output.count("all is well") == 2


FAULTS = {
    "message": ["receiving 16 bytes from rank 1: it sent 12"],
    "missing call": ["StallError: rank 0: Timed out after 2 s in #2 all_reduce",
                     "rank 1 has NOT CALLED it; its last call was #1 all_reduce",
                     "TransportError: an earlier operation failed"],
    "missing bucket": ["StallError", "all_reduce ['sum'] of float32 (110,)", "rank 1 has NOT"],
    "exception": ["rank 1 of 2", "ValueError: a bug in the user's code"],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_job_ends_with_the_reason(fault):
    ended = launch(2, PROGRAMS / "torch_fault.py", fault)
    assert ended.status != 0 and ended.seconds < SOON_S
    for text in FAULTS[fault]:
        assert text in ended.output, ended.output
