"""Runs PyTorch on NVIDIA's GPUs, several ranks on one if need be; skips where there is none.

The programs are those that the other tests run on the CPU and on a simulated GPU.
"""

import re

import pytest
from launching import PROGRAMS, ROOT, launch, needed

pytestmark = [pytest.mark.gpu, pytest.mark.launch, pytest.mark.any_mpi]


@pytest.fixture(autouse=True)
def _cuda():
    if not needed("torch").cuda.is_available():
        pytest.skip(reason="PyTorch finds no GPU")
    needed("cupy")


# What each program says, and how often at least; None for once on each rank.
SAYS = {"torch_collectives": ("cases agree with Gloo", None),
        "torch_training": ("ways of training agree with Gloo", None),
        "torch_async": ("all is well", None), "torch_abilities": (r"can: (\w+)", 31),
        "torch_equal": (r"equal: (\w+)", 7), "torch_reducers": (r"holds: (\w+)", 5)}


@pytest.mark.parametrize(("program", "ranks", "where"), [
    *(("torch_collectives", *how) for how in ((2, "cuda"), (4, "cuda"), (2, "alone"))),
    ("torch_training", 2, "cuda"), ("torch_async", 3, "cuda"),
    *(("torch_abilities", *how) for how in ((1, "cuda"), (2, "cuda"), (3, "cuda"), (2, "alone"))),
    *(("torch_equal", *how) for how in ((1, "cuda"), (2, "cuda"), (4, "cuda"), (2, "alone"))),
    ("torch_reducers", 2, "cuda"), ("torch_reducers", 2, "alone")])
def test_programs(program, ranks, where, tmp_path):
    options = (tmp_path / "store", 100) if program == "torch_equal" else ()
    ended = launch(ranks, PROGRAMS / f"{program}.py", *options, where, timeout_s=280)
    assert ended.status == 0, ended.output
    words, times = SAYS[program]
    assert len(re.findall(words, ended.output)) >= (times or ranks)


def test_a_transformer_learns_the_same_on_any_number_of_ranks():
    def train(ranks, *options):
        ended = launch(ranks, ROOT / "examples/train_torch.py", "--steps", "12", "--width", "32",
                       "--layers", "1", "--context", "32", "--batch", "8", "--report", "4",
                       *options)
        assert ended.status == 0, ended.output
        return [float(text) for text in re.findall(r"validation (\d\.\d{3}) bits", ended.output)]

    host = train(1)
    assert len(host) == 3
    for ranks in (1, 2, 4):
        assert train(ranks, "--device", "cuda") == pytest.approx(host, abs=0.003)
