"""Tests the torch.distributed back end: the same programs over it and over Gloo."""

import pytest
from launching import PROGRAMS, launch, needed

pytestmark = pytest.mark.launch


@pytest.fixture(autouse=True)
def _torch():
    needed("torch")


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_collective_does_what_gloo_does(ranks):
    ended = launch(ranks, PROGRAMS / "torch_collectives.py")
    assert ended.status == 0, ended.output
    assert ended.output.count("cases agree with Gloo") == ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_training_does_what_it_does_over_gloo(ranks):
    ended = launch(ranks, PROGRAMS / "torch_training.py")
    assert ended.status == 0, ended.output
    assert ended.output.count("ways of training agree with Gloo") == ranks


@pytest.mark.parametrize("ranks", [1, 4])
def test_groups_sharding_and_starting_again(ranks, tmp_path):
    ended = launch(ranks, PROGRAMS / "torch_groups.py", tmp_path)
    assert ended.status == 0, ended.output
    assert ended.output.count("all is well") == ranks
