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


@pytest.mark.parametrize(("program", "ranks", "where", "words"), [
    ("torch_collectives", 2, "cuda", "cases agree with Gloo"),
    ("torch_collectives", 4, "cuda", "cases agree with Gloo"),
    ("torch_collectives", 2, "alone", "cases agree with Gloo"),
    ("torch_training", 2, "cuda", "ways of training agree with Gloo"),
    ("torch_async", 3, "cuda", "all is well"),
])
def test_the_back_end(program, ranks, where, words):
    ended = launch(ranks, PROGRAMS / f"{program}.py", where, timeout_s=280)
    assert ended.status == 0, ended.output
    assert ended.output.count(words) == ranks


@pytest.mark.parametrize(("ranks", "where"), [(1, "cuda"), (2, "cuda"), (3, "cuda"), (2, "alone")])
def test_abilities(ranks, where):
    ended = launch(ranks, PROGRAMS / "torch_abilities.py", where, timeout_s=280)
    assert ended.status == 0, ended.output
    assert len(re.findall(r"can: (\w+)", ended.output)) > 30


@pytest.mark.parametrize(("ranks", "where"), [(1, "cuda"), (2, "cuda"), (4, "cuda"), (2, "alone")])
def test_losses_and_weights_are_those_of_pytorch(ranks, where, tmp_path):
    ended = launch(ranks, PROGRAMS / "torch_equal.py", tmp_path / "store", 100, where,
                   timeout_s=280)
    assert ended.status == 0, ended.output
    assert len(re.findall(r"equal: (\w+)", ended.output)) == 7


@pytest.mark.parametrize("where", ["cuda", "alone"])
def test_reducers(where):
    ended = launch(2, PROGRAMS / "torch_reducers.py", where, timeout_s=280)
    assert ended.status == 0, ended.output
    assert len(re.findall(r"holds: (\w+)", ended.output)) == 5
