"""Runs what PyTorch users do, on real ranks, and beside PyTorch's own DistributedDataParallel."""

import re

import pytest
from jobs import run
from launching import PROGRAMS, installed

pytestmark = [pytest.mark.launch, pytest.mark.any_mpi]

ABILITIES = re.findall(r"@ability\ndef (\w+)", (PROGRAMS / "torch_abilities.py").read_text())


@pytest.fixture(autouse=True)
def torch():
    installed("torch")


@pytest.mark.parametrize(("ranks", "steps", "where"), [(2, 20, "cpu"), (1, 5, "accelerator")])
def test_losses_and_weights_are_those_of_pytorch(ranks, steps, where, tmp_path):
    """Step by step in the first ones; replicas are bit-equal after all."""
    ended = run(ranks, PROGRAMS / "torch_equal.py", tmp_path / "store", steps, where)
    assert ended.status == 0, ended.output
    assert re.findall(r"equal: (\w+)", ended.output) == [
        "mlp", "conv", "channels_last", "transformer", "embedding", "sparse", "control"]


@pytest.mark.parametrize(("ranks", "where"), [
    (1, "cpu"), (3, "cpu"), (2, "simulated"), (2, "accelerator")])
def test_abilities(ranks, where):
    ended = run(ranks, PROGRAMS / "torch_abilities.py", where)
    assert ended.status == 0, ended.output
    left_out = ["a_compiled_module_can_be_wrapped"] * (ranks < 3)
    shown = re.findall(r"can: (\w+)", ended.output)
    assert sorted(shown + left_out) == sorted(ABILITIES) and len(ABILITIES) > 20


def test_reducers():
    ended = run(2, PROGRAMS / "torch_reducers.py")
    assert ended.status == 0, ended.output
    assert re.findall(r"holds: (\w+)", ended.output) == [
        "replicas_learn_and_skip_a_nan_of_one_rank",
        "a_nan_in_a_sparse_gradient_is_skipped_too", "a_run_goes_on_bit_by_bit",
        "frozen_layers_come_back", "tokens_are_weighed_before_they_are_compressed"]


def test_misuse_is_loud_and_lifetimes_end():
    ended = run(2, PROGRAMS / "torch_lifetimes.py")
    assert ended.status == 0, ended.output
    assert ended.output.count("all is well") == 2
