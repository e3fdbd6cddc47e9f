"""Tests Gloo that `init_method="mpi://"` starts, and NCCL where it is missing."""

import pytest
from launching import PROGRAMS, SOON_S, installed, launch, python

pytestmark = [pytest.mark.launch, pytest.mark.any_mpi]

START = "import torch, torch.distributed as dist, mpiring.torch\n"


@pytest.fixture(autouse=True)
def _torch():
    installed("torch")


def test_gloo_started_by_mpi_trains_as_gloo_started_by_torchrun():
    """Bitwise, and without the warning that a group is not of mpiring."""
    ranks = 3
    by_torchrun = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks,
                         PROGRAMS / "torch_gloo.py", "env://")
    by_mpi = launch(ranks, PROGRAMS / "torch_gloo.py", "mpi://")
    assert by_torchrun.returncode == by_mpi.status == 0, by_torchrun.stderr + by_mpi.output
    want, got = (sorted(line for line in text.splitlines() if line.startswith("weights "))
                 for text in (by_torchrun.stdout, by_mpi.output))
    assert got == want and len(got) == ranks, by_torchrun.stdout + by_mpi.output
    assert "not of mpiring" not in by_mpi.output, by_mpi.output


def test_a_back_end_that_is_missing_is_an_error_on_every_rank():
    ended = launch(2, "-c", START + "try: dist.init_process_group('nccl', init_method='mpi://')\n"
                   "except Exception as error: print('refused:', error)", CUDA_VISIBLE_DEVICES="")
    assert ended.status == 0 and ended.output.count("refused: ") == 2, ended.output


def test_a_rank_that_fails_ends_a_job_over_gloo():
    ended = launch(2, "-c", START + "dist.init_process_group('gloo', init_method='mpi://')\n"
                   "if dist.get_rank() == 1: raise ValueError('a bug')\ndist.barrier()")
    assert ended.status != 0 and ended.seconds < SOON_S
    assert "rank 1 of 2" in ended.output and "ValueError: a bug" in ended.output


@pytest.mark.parametrize("first", [
    "dist.init_process_group('mpiring', init_method='mpi://'); dist.destroy_process_group()",
    "mpiring.torch.export_environment()"])
def test_a_back_end_that_nobody_chose_is_named(first):
    """A program that asks `mpi://` for Gloo has chosen it: see torch_gloo.py."""
    ended = launch(2, "-c", f"{START}{first}; dist.init_process_group('gloo')\n"
                   "dist.barrier(); dist.destroy_process_group()")
    assert ended.status == 0, ended.output
    assert ended.output.count("gloo, not of mpiring: for mpiring, call") == 1, ended.output
