"""Stops trainings in many ways, lets them go on, and compares with those that never stopped."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from data_campaign import one_training
from jobs import run
from launching import (
    PROGRAMS, ROOT, environment, finish, launch, missing, mpiexec, needed, start)

from mpiring.numpy import DataParallel, LossScaler, MasterWeights, TrainState
from mpiring.optim import AdamW
from mpiring.reducers import Int8, OneBit, PowerSGD, TopK

pytestmark = [pytest.mark.launch, pytest.mark.any_mpi]

EACH_RANK_A_NODE = {"MPIRING_SHARED_MEMORY": "0"}
SHAPES = {"a": (40, 30), "b": (500,), "c": (30, 20), "d": (700,), "e": ()}
NUMPY, TORCH = ROOT / "examples" / "train_numpy.py", ROOT / "examples" / "train_torch.py"


class Run:
    """A training in 16 bits, from its beginning or from a checkpoint."""

    def __init__(self, comm, folder, make):
        self.params = {name: np.ones(shape, np.float16) for name, shape in SHAPES.items()}
        # Short buckets, so that their order matters to the bits.
        self.dp = DataParallel(self.params, comm, bucket_bytes=1000, reducer=make())
        self.random = np.random.default_rng(comm.rank)
        np.random.seed(comm.rank)
        self.sums = {"of": [np.zeros(3)], "steps": 0}
        self.state = TrainState(comm, seed=1, random=self.random, sums=self.sums, **self.parts())
        self.step = self.state.restore(folder)

    def parts(self):
        self.masters, self.scaler = MasterWeights(self.dp), LossScaler(self.dp)
        return {"model": self.masters, "scaler": self.scaler}

    def train(self, steps):
        for _ in range(steps):
            self.step += 1
            # In an order that is not that of the first buckets.
            for name in "dbeca":
                dice = np.random if name in "db" else self.random
                grad = dice.standard_normal(SHAPES[name]) * self.scaler.scale / 2**16
                self.dp.grads[name][...] = grad
                self.dp.ready(name)
            self.update()
            self.sums["of"][0] += self.params["b"][:3]
            self.sums["steps"] += 1

    def update(self):
        self.dp.wait()
        if self.scaler.step():
            for name, master in self.masters.items():
                master -= 0.1 * self.scaler.unscaled(name)
            self.masters.round_off()

    def bits(self):
        return ({name: x.tobytes() for name, x in self.masters.items()},
                self.sums["of"][0].tobytes(), self.sums["steps"])


class InSlices(Run):
    """The same with an optimizer of which each rank has a slice."""

    def parts(self):
        self.scaler, self.optimizer = LossScaler(self.dp), AdamW(self.dp, lr=0.1, sharded=True)
        return {"optimizer": self.optimizer, "scaler": self.scaler, "model": self.dp}

    def update(self):
        self.optimizer.step(self.scaler)

    @property
    def masters(self):
        tensors = self.optimizer.state_dict()["tensors"]
        return {f"{name} {vector}": x for name, its in tensors.items() for vector, x in its.items()}


MAKERS = {
    "mean": (Run, lambda: None),
    "topk": (Run, lambda: TopK(0.05, momentum=0.9, warmup_steps=5)),
    "mixed": (Run, lambda: {"a": PowerSGD(1, start_step=0), "b": Int8(64),
                            "[cd]": OneBit(64, warmup_steps=2)}),
    "slices": (InSlices, lambda: None),
}


def goes_on_bit_by_bit(comm, name, folder):
    kind, make = MAKERS[name]
    uninterrupted = kind(comm, None, make)
    uninterrupted.train(9)
    for steps in (1, 5):
        stopped = kind(comm, folder, make)
        stopped.train(steps)
        stopped.state.save(folder, stopped.step)
        stopped.state.close()
    resumed = kind(comm, folder, make)
    assert resumed.step == 6
    resumed.train(3)
    resumed.state.close()
    return resumed.bits() == uninterrupted.bits()


@pytest.mark.parametrize("name", MAKERS)
def test_training_goes_on_bit_by_bit(name, tmp_path, ranks):
    """Every Reducer's state: tests/reducers/test_all_reducers.py."""
    # To compile would take longer than all that follows; the bits are the same.
    assert all(ranks(3, goes_on_bit_by_bit, name, tmp_path, MPIRING_MACHINE_CODE="0",
                     MPIRING_ALGORITHM="ring", **EACH_RANK_A_NODE))


def test_pytorch_trainings_resume_bit_by_bit_on_fewer_ranks_and_without_slices(tmp_path):
    needed("torch")
    ended = run(3, PROGRAMS / "torch_train_state.py", tmp_path)
    assert ended.status == 0 and "goes on without slices" in ended.output, ended.output
    assert ended.output.count("resumes bit by bit") == 3, ended.output


def test_a_stopped_numpy_training_ends_as_if_it_had_never_stopped(tmp_path):
    """USR1 to mpiexec, which passes it on; a reducer with residuals between nodes."""
    options = [NUMPY, "--epochs", 6, "--reducer", "topk", "--metrics"]
    uninterrupted = run(2, *options, tmp_path / "whole.jsonl", "--save", tmp_path / "whole",
                        **EACH_RANK_A_NODE)
    assert uninterrupted.status == 0, uninterrupted.output
    stopping = [*options, tmp_path / "m.jsonl", "--checkpoint", tmp_path / "run",
                "--save", tmp_path / "stopped"]
    # It would last for half a minute.
    job = start(2, PROGRAMS / "slow_attempt.py", 0.2, *stopping, **EACH_RANK_A_NODE)
    assert job.stdout.readline().startswith("epoch   1"), job.stdout.read()
    job.send_signal(signal.SIGUSR1)
    ended = finish(job)
    assert ended.status == 0, ended.output
    (step,) = re.findall(r"^stopped at step (\d+): SIGUSR1 on rank 0$", ended.output, re.MULTILINE)
    assert int(step) < 90 and not (tmp_path / "stopped0.npz").exists()
    ended = run(2, *stopping, **EACH_RANK_A_NODE)
    assert ended.status == 0, ended.output
    for rank in range(2):
        weights = [np.load(tmp_path / f"{run}{rank}.npz") for run in ("whole", "stopped")]
        for name, x in weights[0].items():
            assert x.tobytes() == weights[1][name].tobytes(), f"{name} differs, stopped at {step}"
    told = [[(line["step"], round(line["loss"], 9), line["accuracy"])
             for line in map(json.loads, (tmp_path / name).read_text().splitlines())]
            for name in ("whole.jsonl", "m.jsonl")]
    assert told[0] == told[1] and len(told[0]) == 6


def test_a_pytorch_training_that_ran_out_of_time_ends_as_if_it_had_not(tmp_path):
    """Batches that were fetched, but not trained on, are drawn again."""
    torch = needed("torch")
    options = [TORCH, "--width", 32, "--layers", 1, "--context", 32, "--batch", 6, "--steps", 32,
               "--report", 15, "--reducer", "powersgd", "--save"]
    ended = run(2, *options, tmp_path / "whole.pt", **EACH_RANK_A_NODE)
    assert ended.status == 0, ended.output
    slow = [PROGRAMS / "slow_attempt.py", 0.2]
    for before, limit in ((slow, ["--time-limit", "0.6"]), ([], [])):
        ended = run(2, *before, *options, tmp_path / "stopped.pt", "--checkpoint",
                    tmp_path / "run", *limit, **EACH_RANK_A_NODE)
        assert ended.status == 0, ended.output
        assert ("stopped at step" in ended.output) == bool(limit), ended.output
        assert (tmp_path / "stopped.pt").exists() != bool(limit)
    uninterrupted, stopped = (torch.load(tmp_path / f"{name}.pt") for name in ("whole", "stopped"))
    assert list(uninterrupted) == list(stopped)
    assert all(torch.equal(x, stopped[name]) for name, x in uninterrupted.items())


def test_killed_at_any_moment_other_ranks_train_on_each_sample_once(tmp_path):
    """With batches drawn ahead, and then by another budget; data_campaign.py does more of it."""
    needed("torch")
    jobs = [(2, "prefetch", 4000, 4), (1, "workers, prefetch", 9000, 2), (2, "prefetch", 4000, 9)]
    kills, ended = one_training(tmp_path, jobs, random.Random(0))
    assert kills == 2 and ended.status == 0 and "each of 6000 once" in ended.output, ended.output


def test_a_rank_killed_while_it_writes_costs_that_checkpoint_only(tmp_path):
    ended = launch(2, PROGRAMS / "saving.py", "killed", tmp_path)
    assert ended.status != 0
    ended = run(2, PROGRAMS / "saving.py", "check,signaled", tmp_path)
    assert ended.status == 0, ended.output
    assert "left is step 1 ['000001-step-1', 'latest', 'lock']" in ended.output
    assert ended.output.count("stopped at step 5") == 2


def test_a_full_disk_costs_no_checkpoint_that_was_there(tmp_path):
    if os.geteuid() or not shutil.which("unshare"):
        missing("mounting a small disk needs root and util-linux")
    job = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=4m none "$0" && exec "$@"',
         tmp_path, mpiexec(), "-n", "2", sys.executable, PROGRAMS / "saving.py",
         "full,check", tmp_path],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment(),
        start_new_session=True)
    ended = finish(job)
    assert ended.status == 0, ended.output
    assert "the disk was full for rank 1" in ended.output and "left is step 3" in ended.output
