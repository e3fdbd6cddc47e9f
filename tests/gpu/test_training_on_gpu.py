"""Trains the examples on a real GPU, and compares with the host."""

import re

import numpy as np
import pytest
from launching import ROOT, launch, needed

pytestmark = [pytest.mark.gpu, pytest.mark.launch]
EXAMPLES = ROOT / "examples"


@pytest.fixture(autouse=True, scope="module")
def packages():
    for name in ("sklearn", "threadpoolctl", "ml_dtypes"):
        needed(name)


def digits(program, ranks, where, *options):
    ended = launch(ranks, EXAMPLES / program, "--epochs", "3", "--save", where, *options)
    assert ended.status == 0, ended.output
    return [dict(np.load(f"{where}{rank}.npz")) for rank in range(ranks)]


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """Return the weights that one rank learns on the host."""
    weights, = digits("train_numpy.py", 1, tmp_path_factory.mktemp("host") / "host")
    return weights


@pytest.mark.parametrize("ranks", [
    pytest.param(1, marks=pytest.mark.any_mpi), 2, pytest.param(4, marks=pytest.mark.any_mpi)])
def test_cupy_learns_what_numpy_does(host, tmp_path, ranks):
    replicas = digits("train_cupy.py", ranks, tmp_path / "gpu")
    for name, weights in host.items():
        assert len({replica[name].tobytes() for replica in replicas}) == 1, name
        np.testing.assert_allclose(replicas[0][name], weights, rtol=1e-3, atol=1e-4)


@pytest.mark.any_mpi
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits_and_a_checkpoint(tmp_path, dtype):
    options = "--dtype", dtype, "--checkpoint", tmp_path / "checkpoint"
    digits("train_cupy.py", 2, tmp_path / "first", *options, "--epochs", "1")
    first, second = digits("train_cupy.py", 2, tmp_path / "second", *options, "--epochs", "12")
    assert all(np.array_equal(first[name], second[name]) for name in first)
    ended = launch(1, EXAMPLES / "train_cupy.py", *options, "--epochs", "13")
    assert float(re.findall(r"test accuracy ([\d.]+)%", ended.output)[-1]) > 95, ended.output
