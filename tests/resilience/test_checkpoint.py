"""Tests that the newest whole checkpoint is taken, by all ranks, whatever became of the others."""

import json
import os
import resource
import shutil
import threading
import time

import numpy as np
import pytest
from checkpointing import cut, load, names, parts, save, state
from launching import SOON_S
from threads import on_ranks

from mpiring.errors import CheckpointError, ConfigError
from mpiring.numpy import Checkpoints
from mpiring.resilience import checkpoint_file, folder
from mpiring.resilience.folder import open_folder


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_go_on_from_the_newest(tmp_path, size, caplog):
    assert load(tmp_path / "run", size) == [None] * size
    save(tmp_path / "run", 5, 10, 10, 15, size=size, keep=3, seed=7)
    for saved in load(tmp_path / "run", size, seed=7):
        assert (saved.step, saved.size, saved.own is None) == (15, size, False)
    assert names(tmp_path / "run") == [
        "000002-step-10", "000003-step-10", "000004-step-15", "latest", "lock"]
    manifest = json.loads((tmp_path / "run" / "000004-step-15" / "manifest.json").read_text())
    assert (manifest["step"], manifest["size"], manifest["seed"]) == (15, size, 7)
    assert len(manifest["files"]) == 2 * size + 2 and "numpy" in manifest["versions"]
    assert not caplog.records
    with pytest.raises(CheckpointError, match="it is of seed 7, not 2"):
        load(tmp_path / "run", size, seed=2)


def test_another_number_of_ranks_gets_what_is_replicated(tmp_path, caplog):
    save(tmp_path, 5)
    for saved in load(tmp_path, size=3):
        assert (saved.step, saved.size, saved.own) == (5, 2, None)
        assert saved.sharded is not None
    (record,) = caplog.records
    assert "own state of 2 ranks" in record.message and "not fit 3 ranks" in record.message


def test_ranks_without_anything_of_their_own(tmp_path):
    def run(comm):
        with Checkpoints(tmp_path, comm) as checkpoints:
            own = {"rank": comm.rank} if comm.rank == 1 else None
            checkpoints.save(1, replicated=None, own=own)
        with Checkpoints(tmp_path, comm) as checkpoints:
            saved = checkpoints.load()
            return saved.replicated, saved.own
    assert on_ranks(3, run) == [(None, None), (None, {"rank": 1}), (None, None)]


def test_what_is_refused_does_not_count_among_those_that_are_kept(tmp_path):
    save(tmp_path, 5, 10)
    cut(tmp_path / "000002-step-10" / "manifest.json")

    def run(comm):
        with Checkpoints(tmp_path, comm, keep=2) as checkpoints:
            assert checkpoints.load().step == 5
            for step in (10, 15):
                checkpoints.save(step, **parts(step, comm))
                checkpoints.wait()
                listings.append(names(tmp_path))
    listings = []
    on_ranks(1, run)
    assert listings == [["000001-step-5", "000002-step-10", "000003-step-10", "latest", "lock"],
                        ["000003-step-10", "000004-step-15", "latest", "lock"]]


def test_what_is_newer_than_the_pointer_was_not_finished(tmp_path):
    save(tmp_path, 5, 10)
    (tmp_path / "latest").write_text("000001-step-5\n")
    assert load(tmp_path)[0].step == 5
    save(tmp_path, 15)
    assert load(tmp_path)[0].step == 15
    assert "000003-step-15" in names(tmp_path)


def test_other_files_in_the_folder_are_left_alone(tmp_path):
    others = ["000009-step-x", "12-step-3", "data.bin", "manifest.json"]
    for name in others:
        (tmp_path / name).write_text("mine")
    (tmp_path / ".writing-abc-1").mkdir()
    (tmp_path / ".deleting-000001-step-5").mkdir()
    (tmp_path / ".mark-abc-1").touch()
    save(tmp_path, 1, 2, 3, keep=1)
    assert load(tmp_path)[0].step == 3
    assert names(tmp_path) == sorted([*others, "000003-step-3", "latest", "lock"])


def test_what_cannot_be_saved_is_told_on_all_ranks_and_the_next_one_can(tmp_path):
    def run(comm):
        with Checkpoints(tmp_path, comm) as checkpoints:
            checkpoints.save(1, **parts(1, comm))
            with pytest.raises(ConfigError, match=r"rank 1 on .*: own\['x'\] is a builtins.set"):
                checkpoints.save(2, replicated=state(2), own={"x": {1} if comm.rank == 1 else 1})
            with pytest.raises(ConfigError, match="rank 1 saves step 4, but rank 0 saves step 3"):
                checkpoints.save(3 + comm.rank)
            for none in (-1, "a", np.arange(3), lambda: 3):
                with pytest.raises(ConfigError, match="step=.*: expected a whole number"):
                    checkpoints.save(none)
            checkpoints.save(np.int64(5), **parts(5, comm))
    on_ranks(2, run)
    assert names(tmp_path) == ["000001-step-1", "000002-step-5", "latest", "lock"]


def test_arguments_that_differ_or_cannot_work(tmp_path):
    with pytest.raises(ConfigError, match="keep=0: expected a whole number of at least 1"):
        on_ranks(1, lambda comm: Checkpoints(tmp_path, comm, keep=0))
    with pytest.raises(ConfigError, match="rank .: Checkpoints has .*, but on rank 0 it is"):
        on_ranks(2, lambda comm: Checkpoints(tmp_path, comm, seed=comm.rank))
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="rank 0 on .*exists"):
        on_ranks(2, lambda comm: Checkpoints(tmp_path / "file", comm))


# In numbers of float64.
TOO_LONG = 5_000_000


@pytest.fixture
def limited():
    """Let files of this process have 32 MiB at most: to write more fails as on a full disk.

    So has the tests' own output, where that goes to a file.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (32 << 20, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_disk_that_is_full_for_one_rank_is_told_on_all(tmp_path, limited, culprit):
    limited()

    def run(comm):
        with Checkpoints(tmp_path, comm) as checkpoints:
            checkpoints.save(1, **parts(1, comm))
            large = np.zeros(TOO_LONG if comm.rank == culprit else 1)
            checkpoints.save(2, replicated=state(2), own=large)
            with pytest.raises(CheckpointError) as error:
                checkpoints.save(3)
            errors.append(str(error.value))
            checkpoints.wait()
            assert checkpoints.load().step == 1
            checkpoints.save(4, **parts(4, comm))
        return names(tmp_path)
    errors = []
    assert on_ranks(3, run)[0] == ["000001-step-1", "000002-step-4", "latest", "lock"]
    assert len(set(errors)) == 1 and len(errors) == 3
    assert f"step 2 was not written: rank {culprit} on " in errors[0]
    assert "File too large" in errors[0]


def test_a_folder_that_disappears_is_told(tmp_path):
    def run(comm):
        checkpoints = Checkpoints(tmp_path / "run", comm)
        comm.allgather_object(0)
        if comm.rank == 0:
            shutil.rmtree(tmp_path / "run")
        comm.allgather_object(0)
        checkpoints.save(1, **parts(1, comm))
        with pytest.raises(CheckpointError, match="No such file or directory"):
            checkpoints.wait()
        checkpoints.close()
    on_ranks(2, run)


def test_a_rank_whose_file_never_comes_is_not_waited_for_for_ever(tmp_path):
    names, given_up = ["replicated", "rank-00001"], threading.Event()
    with pytest.raises(CheckpointError, match="no file of rank-00001, replicated appeared"):
        folder.await_files(tmp_path, names, 0.05, given_up)
    given_up.set()
    with pytest.raises(CheckpointError, match="given up"):
        folder.await_files(tmp_path, names, 0, given_up)


def test_a_second_job_is_refused_while_the_first_one_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "PATIENCE_S", 0.2)

    def run(comm):
        with Checkpoints(tmp_path, comm) as first:
            first.save(1, replicated=state(1))
            with pytest.raises(CheckpointError, match=rf"in use: process {os.getpid()} on .*"):
                Checkpoints(tmp_path, comm)
        Checkpoints(tmp_path, comm).close()
    on_ranks(2, run)


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(38, "Function not implemented")
    monkeypatch.setattr(folder.fcntl, "flock", refuse)
    (tmp_path / ".writing-other-1").mkdir()
    save(tmp_path, 1)
    (record,) = caplog.records
    assert "without locks (Function not implemented)" in record.message
    assert ".writing-other-1" in names(tmp_path), "it may be a living job's"


def test_folders_that_are_not_shared_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.setattr("mpiring.resilience.folder.PATIENCE_S", 0.2)

    def run(comm):
        # On rank 2's node, the same name leads elsewhere.
        open_folder(tmp_path / f"node{comm.rank // 2}", comm)

    (tmp_path / "node1").mkdir()
    with pytest.raises(CheckpointError, match="rank 2 on .* has another folder .* than rank 0"
                       ".*a file system that all nodes share"):
        on_ranks(3, run)
    (tmp_path / "node1").rmdir()
    with pytest.raises(CheckpointError, match="rank 2 on .* cannot write into .*No such file"):
        on_ranks(3, run)
    assert names(tmp_path / "node0") == ["lock"], "no mark is left"


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """What is changed after `save` has returned is not in the checkpoint."""
    original, changed, met = checkpoint_file._write_all, threading.Event(), threading.Barrier(2)

    def slowly(descriptor, data):
        changed.wait(SOON_S)
        time.sleep(0.1)
        original(descriptor, data)
    monkeypatch.setattr(checkpoint_file, "_write_all", slowly)

    def run(comm):
        with Checkpoints(tmp_path, comm) as checkpoints:
            state = parts(1, comm)
            checkpoints.save(1, **state)
            assert checkpoints.save_s == 0 and not list(tmp_path.glob("*-step-*"))
            for x in (state["replicated"]["x"], state["own"]["x"],
                      *state["sharded"]["m"].pieces.values()):
                x[...] = -1
            met.wait(SOON_S)
            changed.set()
            end = time.monotonic() + SOON_S
            while not (tmp_path / "latest").exists():
                assert time.monotonic() < end, "nobody has to call anything"
                time.sleep(0.01)
            checkpoints.wait()
            assert checkpoints.save_s > 0.1
    on_ranks(2, run)
    assert load(tmp_path)[0].step == 1
