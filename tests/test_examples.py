"""Runs the examples, and checks that the number of ranks does not change what is learnt."""

import re
import subprocess
import sys

import numpy as np
import pytest
from jobs import run
from launching import HANG_S, PROGRAMS, ROOT, environment, installed, launch

pytestmark = [pytest.mark.launch, pytest.mark.any_mpi]

TRAIN = ROOT / "examples" / "train_numpy.py"
COMPARE = ROOT / "examples" / "compare_optimizers.py"
TRAIN_ASYNC = ROOT / "examples" / "train_async.py"
TRAIN_LENGTHS = ROOT / "examples" / "train_lengths.py"
TRAIN_TORCH = ROOT / "examples" / "train_torch.py"


def test_allreduce_is_short_and_adds():
    source = ROOT / "examples" / "allreduce.py"
    assert len(source.read_text().splitlines()) <= 12
    ended = run(3, source)
    assert ended.status == 0 and ended.output.count("the ranks add up to 3;") == 3, ended.output


def test_training_alone_needs_no_launcher():
    ended = subprocess.run(
        [sys.executable, TRAIN, "--epochs", "2"], cwd=ROOT, env=environment(),
        text=True, capture_output=True, timeout=HANG_S)
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"epoch   2  loss 0\.\d{4}  test accuracy \d\d\.\d\d%  [\d,]+ images/s  "
                     r"0% of communication hidden", ended.stdout)


def test_any_number_of_ranks_learns_the_same_weights(tmp_path):
    weights, uneven = {}, ["--batch", "97", "--bucket-bytes", "5000"]
    for ranks in (1, 2, 3):
        prefix = tmp_path / f"{ranks}-"
        ended = run(ranks, TRAIN, "--epochs", "1", "--save", prefix, *uneven)
        assert ended.status == 0, ended.output
        found = [np.load(f"{prefix}{rank}.npz") for rank in range(ranks)]
        for name in found[0]:
            bits = {replica[name].tobytes() for replica in found}
            assert len(bits) == 1, f"{name} differs between ranks"
        weights[ranks] = found[0]
    for ranks in (2, 3):
        for name, alone in weights[1].items():
            np.testing.assert_allclose(weights[ranks][name], alone, rtol=1e-4, atol=2e-6)


def test_ranks_that_wait_for_nobody_learn_as_well():
    def accuracy(*options):
        ended = run(2, TRAIN_ASYNC, "--epochs", "4", *options)
        assert ended.status == 0, ended.output
        return float(re.search(r"test accuracy (\S+)%", ended.output)[1])

    together = accuracy("--way", "synchronous")
    assert accuracy("--staleness", "0") == together > 90
    assert accuracy("--way", "pairs", "--straggler", "2,0.25") > 90


def test_on_a_gpu_it_learns_the_same(tmp_path):
    """The GPU is simulated: what is queued there happens late."""
    cupy = PROGRAMS / "on_simulated_gpu.py", ROOT / "examples" / "train_cupy.py"

    def train(program, epochs, where, checkpoint=()):
        start = launch if program == cupy else run
        ended = start(2, *program, "--epochs", epochs, "--dtype", "float16", "--save",
                      tmp_path / where, *checkpoint)
        assert ended.status == 0, ended.output
        assert ended.output.count("2 ranks share GPU") == (program == cupy)
        return [np.load(tmp_path / f"{where}{rank}.npz") for rank in range(2)]

    host, _ = train([TRAIN], 2, "host")
    checkpoint = "--checkpoint", tmp_path / "checkpoint"
    train(cupy, 1, "first", checkpoint)
    for replica in train(cupy, 2, "gpu", checkpoint):
        for name, weights in replica.items():
            np.testing.assert_allclose(weights, host[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dtype", "machine_code"), [("float16", 1), ("bfloat16", 0)])
def test_16_bits_learn_as_well(tmp_path, dtype, machine_code):
    ended = run(2, TRAIN, "--epochs", "12", "--dtype", dtype, "--save", tmp_path / "w",
                MPIRING_MACHINE_CODE=machine_code)
    assert ended.status == 0, ended.output
    assert float(re.findall(r"test accuracy ([\d.]+)%", ended.output)[-1]) > 96, ended.output
    replicas = [np.load(tmp_path / f"w{rank}.npz") for rank in range(2)]
    for name, weights in replicas[0].items():
        assert weights.dtype == np.float32 and np.array_equal(weights, replicas[1][name])


@pytest.mark.parametrize("reducer", ["topk", "powersgd"])
def test_what_is_not_sent_is_learnt_as_well(tmp_path, reducer):
    ended = run(2, TRAIN, "--epochs", "15", "--reducer", reducer, "--save", tmp_path / "w",
                MPIRING_SHARED_MEMORY="0")
    assert ended.status == 0, ended.output
    assert float(re.findall(r"test accuracy ([\d.]+)%", ended.output)[-1]) > 95, ended.output
    first, second = (np.load(tmp_path / f"w{rank}.npz") for rank in range(2))
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_a_transformer_learns_the_same_on_any_number_of_ranks_and_after_a_stop(tmp_path):
    installed("torch")
    small = ("--width", 32, "--layers", 1, "--context", 32, "--batch", 6, "--report", 4)

    def train(ranks, steps, *options):
        ended = run(ranks, TRAIN_TORCH, "--steps", steps, *small, *options)
        assert ended.status == 0, ended.output
        return re.findall(r"validation (\d\.\d{3}) bits per byte", ended.output)

    whole = train(1, 12)
    assert len(whole) == 3 and float(whole[-1]) < float(whole[0]) < 8
    checkpoint = "--checkpoint", tmp_path / "last.pt"
    assert train(2, 8, *checkpoint) == whole[:2]
    assert train(3, 12, *checkpoint) == whole[2:]


def test_cut_into_parts_a_transformer_learns_the_same():
    """Pairs of ranks share each layer, two of them the batch; against one rank."""
    installed("torch")

    def train(ranks, tensor):
        ended = run(ranks, ROOT / "examples" / "train_hybrid.py", "--tensor", tensor, "--steps",
                    9, "--report", 3, "--width", 32, "--context", 32, "--batch", 6)
        assert ended.status == 0, ended.output
        return list(map(float, re.findall(r"validation (\S+) bits per byte", ended.output)))

    alone = train(1, 1)
    assert len(alone) == 3 and alone[-1] + 0.8 < alone[0] < 8
    assert train(4, 2) == pytest.approx(alone, abs=0.002)


@pytest.mark.parametrize(("framework", "ranks"), [("numpy", (3, 1, 2)), ("torch", (1, 2, 1))])
def test_of_unequal_lengths_any_number_of_ranks_learns_the_same(tmp_path, framework, ranks):
    """Also where a rank has none of a batch, after a stop with batches drawn ahead."""
    installed(framework)
    small = ("--framework", framework, "--modules", 12, "--tokens", 1024, "--longest", 512,
             "--width", 32, "--report", 7)

    def train(ranks, steps, *options):
        ended = run(ranks, TRAIN_LENGTHS, "--steps", steps, *small, *options)
        assert ended.status == 0, ended.output
        return list(map(float, re.findall(r"held out (\S+) bits per byte", ended.output)))

    whole = train(ranks[0], 21)
    assert len(whole) == 3 and whole[-1] + 0.8 < whole[0] < 8
    checkpoint = "--checkpoint", tmp_path / "run"
    assert train(ranks[1], 14, *checkpoint) == pytest.approx(whole[:2], abs=0.002)
    assert train(ranks[2], 21, *checkpoint) == pytest.approx(whole[2:], abs=0.002)


def test_optimizers_are_compared_alike_on_any_number_of_ranks(tmp_path):
    installed("torch")
    file = tmp_path / "runs.csv"

    def compare(ranks, *options):
        ended = run(ranks, COMPARE, "--quick", "--runs", file, *options)
        assert ended.status == 0 and ended.output.count("\n| digits |") == 8, ended.output
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
    ended = run(2, ROOT / "examples" / "train_ddp_backend.py", "--epochs", "3")
    assert ended.status == 0, ended.output
    assert float(re.findall(r"test accuracy ([\d.]+)%", ended.output)[-1]) > 95, ended.output
