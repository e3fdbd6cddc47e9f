"""Tests that links and pipes which another user has prepared harm no other file."""

import fcntl
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from checkpointing import load, save, state
from threads import on_ranks

from mpiring.errors import CheckpointError, ClosedError
from mpiring.numpy import Checkpoints
from mpiring.resilience import folder, load_file
from mpiring.resilience.checkpoint_file import write_plain
from mpiring.resilience.tree import Arrays, outline


@pytest.fixture
def victim(tmp_path):
    """Return a file that no other file leads to."""
    path = tmp_path / "home" / "manifest.json"
    path.parent.mkdir()
    path.write_text("precious")
    yield path
    assert path.read_text() == "precious" and list(path.parent.iterdir()) == [path]


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    return path


def test_a_lock_that_is_a_link_or_a_pipe_is_refused(run, victim):
    (run / "lock").symlink_to(victim)
    with pytest.raises(CheckpointError, match="rank 0 on .*symbolic link, which is not followed; "
                       "delete it.*lock"):
        save(run, 1)
    (run / "lock").unlink()
    os.mkfifo(run / "lock")
    with pytest.raises(CheckpointError, match="rank 0 on .*not a regular file.*lock"):
        save(run, 1)


def test_a_lock_with_a_second_name_is_not_emptied(run, victim):
    (run / "lock").hardlink_to(victim)
    save(run, 1)


def test_pointers_are_no_links(run, victim):
    for name in ("latest", ".latest"):
        (run / name).symlink_to(victim)
    save(run, 1)
    assert load(run)[0].step == 1 and not (run / "latest").is_symlink()


def test_no_content_of_another_file_is_shown(run, victim, caplog, monkeypatch):
    monkeypatch.setattr(folder, "PATIENCE_S", 0.2)
    save(run, 1)
    for replace in (Path.symlink_to, Path.hardlink_to):
        (run / "latest").unlink()
        replace(run / "latest", victim)
        assert load(run)[0].step == 1
        os.link(victim, run / "lock.new")
        os.rename(run / "lock.new", run / "lock")
        with open(run / "lock") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            with pytest.raises(CheckpointError, match="in use: an unknown process"):
                save(run, 2)
        (run / "lock").unlink()
    assert "symbolic link" in caplog.text and "does not name a checkpoint" in caplog.text
    assert "precious" not in caplog.text


def test_a_folder_may_be_a_link(run, tmp_path):
    (tmp_path / "link").symlink_to(run)
    save(tmp_path / "link", 1)
    assert load(tmp_path / "link")[0].step == load(run)[0].step == 1


def test_a_checkpoint_is_not_written_through_a_link(run, victim):
    def on_rank(comm):
        checkpoints = Checkpoints(run, comm)
        checkpoints.save(1, replicated=state(1))
        checkpoints.wait()
        (run / f".writing-{checkpoints._token}-2").symlink_to(victim.parent)
        checkpoints.save(2, replicated=state(2))
        with pytest.raises(CheckpointError, match="step 2 was not written: rank 0 on .*Not a dir"):
            checkpoints.close()
        with pytest.raises(ClosedError, match="rank .: these checkpoints are closed"):
            checkpoints.save(3)
    on_ranks(1, on_rank)
    assert load(run)[0].step == 1


def test_notes_are_neither_links_nor_pipes(run, victim):
    (run / "rank-00001.failed").symlink_to(victim)
    folder.leave_note(run, 1, "a full disk")
    with pytest.raises(CheckpointError, match="a full disk"):
        folder.await_files(run, ["replicated"], 9, threading.Event())
    (run / "rank-00001.failed").unlink()
    os.mkfifo(run / "rank-00001.failed")
    with pytest.raises(OSError, match="not a regular file"):
        folder.await_files(run, ["replicated"], 9, threading.Event())


def test_one_file_is_not_written_through_a_link(run, victim):
    for name in ("out", ".out.unfinished"):
        (run / name).symlink_to(victim)
    write_plain(run / "out", outline({"sharded": np.ones(3)}, [Arrays()], "tree"))
    assert load_file(run / "out")["sharded"].tolist() == [1, 1, 1]


def test_the_checkpoints_of_a_colleague_are_read(run, monkeypatch):
    save(run, 5)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    for path in run.rglob("*"):
        path.chmod(0o777 if path.is_dir() else 0o666)
    assert load(run)[0].step == 5
