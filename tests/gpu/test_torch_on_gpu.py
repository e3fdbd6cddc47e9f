"""Runs PyTorch on NVIDIA's GPUs, several ranks on one if need be; skips where there is none.

The programs are those that the other tests run on the CPU and on a simulated GPU.
"""

import re

import pytest
from launching import PROGRAMS, launch, needed

pytestmark = [pytest.mark.gpu, pytest.mark.launch, pytest.mark.any_mpi]


@pytest.fixture(autouse=True)
def _cuda():
    if not needed("torch").cuda.is_available():
        pytest.skip(reason="PyTorch finds no GPU")
    needed("cupy")


@pytest.mark.parametrize(("program", "ranks", "words"), [
    ("torch_collectives", 2, "cases agree with Gloo"),
    ("torch_collectives", 4, "cases agree with Gloo"),
    ("torch_training", 2, "ways of training agree with Gloo"),
    ("torch_async", 3, "all is well"),
])
def test_the_back_end(program, ranks, words):
    ended = launch(ranks, PROGRAMS / f"{program}.py", "cuda", timeout_s=280)
    assert ended.status == 0, ended.output
    assert ended.output.count(words) == ranks


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_abilities(ranks):
    ended = launch(ranks, PROGRAMS / "torch_abilities.py", "cuda", timeout_s=280)
    assert ended.status == 0, ended.output
    assert len(re.findall(r"can: (\w+)", ended.output)) > 30


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_losses_and_weights_are_those_of_pytorch(ranks, tmp_path):
    ended = launch(ranks, PROGRAMS / "torch_equal.py", tmp_path / "store", 100, "cuda",
                   timeout_s=280)
    assert ended.status == 0, ended.output
    assert len(re.findall(r"equal: (\w+)", ended.output)) == 7


def test_reducers():
    ended = launch(2, PROGRAMS / "torch_reducers.py", "cuda", timeout_s=280)
    assert ended.status == 0, ended.output
    assert len(re.findall(r"holds: (\w+)", ended.output)) == 5
