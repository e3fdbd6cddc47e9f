"""Runs the examples, and checks that the number of ranks does not change what is learnt."""

import re
import subprocess
import sys

import numpy as np
import pytest
from jobs import run
from launching import HANG_S, PROGRAMS, ROOT, environment, installed, launch

pytestmark = [pytest.mark.launch, pytest.mark.any_mpi]

EXAMPLES = ROOT / "examples"
TRAIN = EXAMPLES / "train_numpy.py"


def output_of(ranks, *command, start=run, **variables):
    """Return what a program prints that ends well."""
    ended = start(ranks, *command, **variables)
    assert ended.status == 0, ended.output
    return ended.output


def accuracy(output):
    return float(re.findall(r"test accuracy ([\d.]+)%", output)[-1])


def weights(prefix, ranks=2):
    """Return the weights that all ranks have saved, which are equal."""
    replicas = [np.load(f"{prefix}{rank}.npz") for rank in range(ranks)]
    for name, x in replicas[0].items():
        assert x.dtype == np.float32
        assert all(np.array_equal(x, replica[name]) for replica in replicas), name
    return replicas[0]


def scores(output, of):
    """Return bits per byte at each report."""
    return list(map(float, re.findall(rf"{of} (\S+) bits per byte", output)))


def test_allreduce_is_short_and_adds():
    source = EXAMPLES / "allreduce.py"
    assert len(source.read_text().splitlines()) <= 12
    assert output_of(3, source).count("the ranks add up to 3;") == 3


def test_without_a_launcher_and_on_any_number_of_ranks_the_same_is_learnt(tmp_path):
    options = ["--epochs", "1", "--batch", "97", "--bucket-bytes", "5000", "--save"]
    ended = subprocess.run(
        [sys.executable, TRAIN, *options, tmp_path / "alone"], cwd=ROOT, env=environment(),
        text=True, capture_output=True, timeout=HANG_S)
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"epoch   1  loss \d\.\d{4}  test accuracy \d\d\.\d\d%  [\d,]+ images/s  "
                     r"0% of communication hidden", ended.stdout)
    alone = weights(tmp_path / "alone", 1)
    for ranks in (2, 3):
        output_of(ranks, TRAIN, *options, tmp_path / f"{ranks}-")
        for name, x in weights(tmp_path / f"{ranks}-", ranks).items():
            np.testing.assert_allclose(x, alone[name], rtol=1e-4, atol=2e-6)


def test_ranks_that_wait_for_nobody_learn_as_well():
    def learnt(*options):
        return accuracy(output_of(2, EXAMPLES / "train_async.py", "--epochs", "3", *options))

    together = learnt("--way", "synchronous")
    assert learnt("--staleness", "0") == together > 90
    assert learnt("--way", "pairs", "--straggler", "2,0.25") > 90


def test_on_a_gpu_it_learns_the_same(tmp_path):
    """The GPU is simulated: what is queued there happens late."""
    cupy = PROGRAMS / "on_simulated_gpu.py", EXAMPLES / "train_cupy.py"

    def train(program, epochs, where, checkpoint=()):
        output = output_of(2, *program, "--epochs", epochs, "--batch", 288, "--dtype", "float16",
                           "--save", tmp_path / where, *checkpoint,
                           start=launch if program == cupy else run)
        assert output.count("2 ranks share GPU") == (program == cupy)
        return weights(tmp_path / where)

    host = train([TRAIN], 2, "host")
    checkpoint = "--checkpoint", tmp_path / "checkpoint"
    train(cupy, 1, "first", checkpoint)
    for name, x in train(cupy, 2, "gpu", checkpoint).items():
        np.testing.assert_allclose(x, host[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("options", "variables"), [
    (["--dtype", "float16"], {}), (["--dtype", "bfloat16"], {"MPIRING_MACHINE_CODE": "0"}),
    (["--reducer", "topk"], {"MPIRING_SHARED_MEMORY": "0"}),
    (["--reducer", "powersgd"], {"MPIRING_SHARED_MEMORY": "0"})])
def test_of_fewer_bits_as_much_is_learnt(tmp_path, options, variables):
    output = output_of(2, TRAIN, "--epochs", "12", *options, "--save", tmp_path / "w", **variables)
    assert accuracy(output) > 95, output
    weights(tmp_path / "w")


@pytest.mark.parametrize(("example", "ranks", "option"), [
    ("train_torch.py", 2, "--layers"),
    # Pairs of ranks share each layer, two of them the batch.
    ("train_hybrid.py", 4, "--tensor")])
def test_a_transformer_learns_the_same_on_any_number_of_ranks(example, ranks, option):
    installed("torch")

    def train(ranks, value):
        return scores(output_of(ranks, EXAMPLES / example, option, value, "--steps", 9, "--report",
                                3, "--width", 32, "--context", 32, "--batch", 6), "validation")

    alone = train(1, 1)
    assert len(alone) == 3 and alone[-1] + 0.5 < alone[0] < 8
    assert train(ranks, 2 if option == "--tensor" else 1) == pytest.approx(alone, abs=0.002)


@pytest.mark.parametrize(("framework", "ranks"), [("numpy", (3, 1, 2)), ("torch", (1, 2, 1))])
def test_of_unequal_lengths_any_number_of_ranks_learns_the_same(tmp_path, framework, ranks):
    """Also where a rank has none of a batch, after a stop with batches drawn ahead."""
    installed(framework)
    small = ("--framework", framework, "--modules", 12, "--tokens", 1024, "--longest", 512,
             "--width", 32, "--report", 4)

    def train(ranks, steps, *options):
        return scores(output_of(ranks, EXAMPLES / "train_lengths.py", "--steps", steps, *small,
                                *options), "held out")

    losses = train(ranks[0], 12)
    assert len(losses) == 3 and losses[-1] + 0.3 < losses[0] < 8
    checkpoint = "--checkpoint", tmp_path / "run"
    assert train(ranks[1], 8, *checkpoint) == pytest.approx(losses[:2], abs=0.002)
    assert train(ranks[2], 12, *checkpoint) == pytest.approx(losses[2:], abs=0.002)


def test_optimizers_are_compared_alike_on_any_number_of_ranks(tmp_path):
    installed("torch")
    file = tmp_path / "runs.csv"

    def compare(ranks, *options):
        output = output_of(ranks, EXAMPLES / "compare_optimizers.py", "--quick", "--runs", file,
                           *options)
        assert output.count("\n| digits |") == 8, output
        runs = (line.rsplit(",", 1) for line in file.read_text().splitlines())
        return {run: float(score) for run, score in runs}

    together = compare(2)
    assert len(together) == 32
    # Runs that are in the file are not repeated; the others are as they were.
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if line.startswith("bytes")))
    assert compare(1, "--task", "digits") == pytest.approx(together, abs=0.01)


def test_the_ddp_script_learns():
    installed("torch")
    assert accuracy(output_of(2, EXAMPLES / "train_ddp_backend.py", "--epochs", "3")) > 95
