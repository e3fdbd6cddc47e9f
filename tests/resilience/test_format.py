"""Tests that a checkpoint of version 0.1 can be read, and that its files are written bit by bit."""

import collections
import json
import shutil
import sys
from pathlib import Path

import ml_dtypes  # noqa: F401
import numpy as np
import pytest
import xxhash
from threads import on_ranks

from mpiring import CheckpointError, MissingDependencyError
from mpiring.numpy import Checkpoints
from mpiring.resilience import Sliced, plan, whole

SAVED = Path(__file__).parent / "saved_by_0_1"
DTYPES = ("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "int64", "int8",
          "bool", "uint16")


def replicated():
    arrays = {name: (np.arange(6) % 2 if name == "bool" else np.arange(6)).astype(name)
              .reshape(2, 3) for name in DTYPES}
    return {"arrays": arrays, "none": None, 7: [True, -3, 0.5, float("inf"), "text"],
            "tuple": (np.array(2.5), np.float32(3), np.empty((0, 4))),
            "ordered": collections.OrderedDict(b=1, a=2)}


def own(rank):
    return {"rank": rank, "x": np.full(3, rank)}


def sharded(rank, size):
    w = np.arange(10, dtype=np.float32)
    start, stop = 10 * rank // size, 10 * (rank + 1) // size
    return {"w": Sliced((5, 2), {(start, stop): w[start:stop].copy()}, np.dtype(np.float32)),
            "step": np.array(12), "lr": 1e-3}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_checkpoint_of_0_1_is_read(tmp_path, size):
    shutil.copytree(SAVED, tmp_path / "run")

    def run(comm):
        with Checkpoints(tmp_path / "run", comm, seed=3) as checkpoints:
            saved = checkpoints.load()
        assert (saved.name, saved.step, saved.size) == ("000001-step-12", 12, 2)
        np.testing.assert_equal(saved.replicated, replicated())
        for name, x in saved.replicated["arrays"].items():
            assert x.dtype == np.dtype(name)
        assert [type(x) for x in saved.replicated["tuple"]] == [np.ndarray, np.float32, np.ndarray]
        assert type(saved.replicated["ordered"]) is collections.OrderedDict
        np.testing.assert_equal(saved.own, own(comm.rank) if size == 2 else None)
        np.testing.assert_equal(whole(saved.sharded), {
            "w": np.arange(10, dtype=np.float32).reshape(5, 2), "step": np.array(12), "lr": 1e-3})
    on_ranks(size, run)


def saved_again(folder):
    """Return the folder of a checkpoint of the same state, and its manifest."""
    def run(comm):
        with Checkpoints(folder, comm, seed=3) as checkpoints:
            checkpoints.save(12, replicated=replicated(), own=own(comm.rank),
                             sharded=sharded(comm.rank, comm.size))
    on_ranks(2, run)
    written = folder / "000001-step-12"
    return written, json.loads((written / "manifest.json").read_text())


@pytest.mark.parametrize("lacking", [2, 1])
def test_the_same_state_is_written_to_the_same_files(tmp_path, monkeypatch, lacking):
    """Hashes of their contents are parts of their names; by SHA-256 if a rank lacks xxhash."""
    answers = iter([False] * lacking + [True] * (2 - lacking))
    monkeypatch.setattr(plan, "has_xxh3", lambda: next(answers))
    new, facts = saved_again(tmp_path / "run")
    old = SAVED / "000001-step-12"
    assert {path.name for path in new.iterdir()} == {path.name for path in old.iterdir()}
    known = json.loads((old / "manifest.json").read_text())
    for text in ("written", "versions", "sha256"):
        del facts[text], known[text]
    assert facts == known


def test_with_xxhash_files_are_hashed_by_xxh3(tmp_path, monkeypatch):
    """Without it, they are not read, and none of them is given up."""
    folder, facts = saved_again(tmp_path / "run")
    assert facts["version"] == 3 and all(".xxh3-" in file for file in facts["files"])
    content = xxhash.xxh3_128((folder / min(facts["files"])).read_bytes()).hexdigest()
    assert min(facts["files"]) == f"rank-00000.xxh3-{content}.safetensors"

    def run(comm):
        with Checkpoints(tmp_path / "run", comm, seed=3) as checkpoints:
            assert checkpoints.load().step == 12
            monkeypatch.setitem(sys.modules, "xxhash", None)
            with pytest.raises(MissingDependencyError, match="pip install xxhash"):
                checkpoints.load()
            checkpoints.save(13)
            checkpoints.wait()
            assert checkpoints.load().step == 13
    on_ranks(2, run)
    assert folder.exists()


def test_damage_is_found_by_xxh3(tmp_path):
    folder, facts = saved_again(tmp_path / "run")
    file = folder / max(facts["files"])
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)

    def run(comm):
        with Checkpoints(tmp_path / "run", comm) as checkpoints, pytest.raises(
                CheckpointError, match="slices-00001.* does not have the content that was written"):
            checkpoints.load()
    on_ranks(1, run)
