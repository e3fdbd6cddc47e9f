"""Runs what PyTorch users do, on real ranks, and beside PyTorch's own DistributedDataParallel."""

import re

import pytest
from launching import PROGRAMS, launch, needed

pytestmark = pytest.mark.launch

ABILITIES = re.findall(r"@ability\ndef (\w+)", (PROGRAMS / "torch_abilities.py").read_text())


@pytest.fixture(autouse=True)
def torch():
    return needed("torch")


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_losses_and_weights_are_those_of_pytorch(ranks, tmp_path):
    ended = launch(ranks, PROGRAMS / "torch_equal.py", tmp_path / "store")
    assert ended.status == 0, ended.output
    assert re.findall(r"equal: (\w+)", ended.output) == [
        "mlp", "conv", "channels_last", "transformer", "embedding", "sparse", "control"]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_abilities(ranks):
    ended = launch(ranks, PROGRAMS / "torch_abilities.py")
    assert ended.status == 0, ended.output
    assert re.findall(r"can: (\w+)", ended.output) == ABILITIES and len(ABILITIES) > 20
