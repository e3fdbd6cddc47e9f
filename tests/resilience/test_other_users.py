"""Tests that links, pipes and forged files harm no other file, and cost a job one checkpoint."""

import hashlib
import json
import os
import re
import threading

import numpy as np
import pytest
from threads import on_ranks, state

from mpiring.errors import CheckpointError
from mpiring.numpy import Checkpoints
from mpiring.resilience import Sliced, checkpoint_file, folder, load_file
from mpiring.resilience.checkpoint_file import write_plain
from mpiring.resilience.manifest import sealed
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


def saved_by(comm, checkpoints, step):
    half = np.arange(50.0) + 50 * comm.rank
    checkpoints.save(step, replicated=state(step), own=state(step, comm.rank), sharded={
        "m": Sliced((100,), {(50 * comm.rank, 50 * comm.rank + 50): half})})


def save(run, *steps):
    def on_rank(comm):
        with Checkpoints(run, comm) as checkpoints:
            for step in steps:
                saved_by(comm, checkpoints, step)
    on_ranks(2, on_rank)


def load(run):
    """Return the steps that the ranks load."""
    def on_rank(comm):
        with Checkpoints(run, comm) as checkpoints:
            return checkpoints.load().step
    return on_ranks(2, on_rank)


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


def test_marks_are_no_links(run, victim, monkeypatch):
    monkeypatch.setattr(folder.secrets, "token_hex", lambda n: "token")
    rivals = folder._refuse_other_folders

    def planted(path, comm, token):
        (path / f"{folder.MARK}{token}-1").symlink_to(victim.with_name("new"))
        rivals(path, comm, token)
    monkeypatch.setattr(folder, "_refuse_other_folders", lambda path, comm, token: (
        planted if comm.rank == 1 else rivals)(path, comm, token))
    with pytest.raises(CheckpointError, match="rank 1 on .* cannot write into .*File exists"):
        save(run, 1)


def test_pointers_are_no_links(run, victim):
    for name in ("latest", ".latest"):
        (run / name).symlink_to(victim)
    save(run, 1)
    assert load(run) == [1, 1] and not (run / "latest").is_symlink()


@pytest.mark.parametrize("harm, problem", [
    (lambda path: os.mkfifo(path), "not a regular file"),
    (lambda path: path.write_bytes(bytes(1 << 20)), "more than 4096 bytes")])
def test_a_pointer_that_is_none_is_told(run, caplog, harm, problem):
    save(run, 1)
    (run / "latest").unlink()
    harm(run / "latest")
    assert load(run) == [1, 1]
    assert "latest cannot be read ([Errno" in caplog.text and problem in caplog.text


def test_a_checkpoint_is_not_written_through_a_link(run, victim):
    def on_rank(comm):
        checkpoints = Checkpoints(run, comm)
        checkpoints.save(1, replicated=state(1))
        checkpoints.wait()
        (run / f".writing-{checkpoints._token}-2").symlink_to(victim.parent)
        checkpoints.save(2, replicated=state(2))
        with pytest.raises(CheckpointError, match="step 2 was not written: rank 0 on .*Not a dir"):
            checkpoints.close()
    on_ranks(1, on_rank)
    assert load(run) == [1, 1]


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


def forged(change):
    """Return a harm: change a manifest, and seal it again."""
    def harm(path):
        manifest = json.loads(path.read_text())
        change(manifest)
        path.write_text(sealed(manifest))
    return harm


def without(key):
    return forged(lambda manifest: manifest.pop(key))


def with_value(key, value):
    return forged(lambda manifest: manifest.update({key: value}))


def with_slices(**entry):
    return forged(lambda manifest: manifest["slices"]["m"].update(entry))


def elsewhere(manifest):
    (name,) = (name for name in manifest["files"] if name.startswith("replicated"))
    manifest["files"]["../" + name] = manifest["files"].pop(name)


def without_state(manifest):
    manifest["files"] = {name: nbytes for name, nbytes in manifest["files"].items()
                         if not name.startswith("replicated")}


def as_pipe(path):
    path.unlink()
    os.mkfifo(path)


def as_hole(path):
    os.truncate(path, 1 << 40)


def deep(path):
    path.write_text('{"format": ' + "[" * 10**6)


def as_device(path):
    path.unlink()
    path.symlink_to("/dev/zero")


NOT_OURS = "manifest.json is not as mpiring writes it: "


@pytest.mark.parametrize("harm, reason", [
    (deep, "manifest.json is torn: it is not JSON of at most 5 levels"),
    (as_pipe, "manifest.json cannot be read: it is not a regular file"),
    (as_device, "manifest.json cannot be read: it is not a regular file"),
    (as_hole, r"manifest.json cannot be read: it has more than \d+ bytes"),
    (without("step"), f"{NOT_OURS}step or size is no number"),
    (with_value("size", "2"), f"{NOT_OURS}step or size is no number"),
    (with_value("size", 0), f"{NOT_OURS}step or size is no number"),
    (with_value("seed", [1]), f"{NOT_OURS}seed is no number"),
    (without("files"), f"{NOT_OURS}files are not names and lengths"),
    (with_value("files", [3]), f"{NOT_OURS}files are not names and lengths"),
    (with_value("files", {"replicated": 3}), f"{NOT_OURS}files are not names and lengths"),
    (forged(elsewhere), f"{NOT_OURS}files are not names and lengths"),
    (forged(without_state), f"{NOT_OURS}it has no replicated state"),
    (with_value("slices", [3]), f"{NOT_OURS}slices are no object"),
    (with_value("slices", {"m": 3}), f"{NOT_OURS}'m' in slices has no shape and ranks"),
    (with_slices(shape=["100"]), f"{NOT_OURS}'m' in slices has no shape and ranks"),
    (with_slices(ranks={"a:b": 0}), f"{NOT_OURS}'m' in slices has no shape and ranks"),
    (with_slices(ranks={"0:100": 2}), f"{NOT_OURS}'m' in slices has no shape and ranks"),
    (with_slices(shape=[2**40, 2**40]), "elements 100 to .* of m in sharded are saved by no rank"),
    (lambda path: path.write_text("[3]"), "manifest.json is not one of mpiring's"),
])
def test_a_forged_manifest_is_refused_and_the_checkpoint_before_taken(run, caplog, harm, reason):
    save(run, 5, 10)
    harm(run / "000002-step-10" / "manifest.json")
    assert load(run) == [5, 5]
    (record,) = caplog.records
    assert re.search(f"000002-step-10 is refused: .*{reason}", record.message), record.message


def rewritten(header):
    """Return a harm: replace the header of a file by bytes or by what a function makes of it.

    All hashes and lengths fit.
    """
    def harm(path):
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        text, rest = header, b""
        if callable(header):
            told = json.loads(content[8:8 + length])
            header(told)
            text, rest = json.dumps(told).encode(), content[8 + length:]
        content = len(text).to_bytes(8, "little") + text + rest
        path.unlink()
        name = ".".join([path.name.partition(".")[0],
                         hashlib.sha256(content).hexdigest()[:32], "safetensors"])
        path.with_name(name).write_bytes(content)
        manifest = json.loads(path.with_name("manifest.json").read_text())
        del manifest["files"][path.name]
        manifest["files"][name] = len(content)
        path.with_name("manifest.json").write_text(sealed(manifest))
    return harm


def with_tree(text):
    return rewritten(lambda header: header["__metadata__"].update(mpiring=text))


def with_leaf(**changes):
    """Return a harm: change the leaf x in the tree."""
    def change(header):
        tree = json.loads(header["__metadata__"]["mpiring"])
        for key, node in tree["dict"]:
            if key == "x":
                node.update(changes)
        header["__metadata__"]["mpiring"] = json.dumps(tree)
    return rewritten(change)


def with_offsets(*offsets):
    return rewritten(lambda header: header["x"].update(data_offsets=offsets))


TREE = "its tree is not as mpiring writes it: "


@pytest.mark.parametrize("name", ["replicated", "rank-00001"])
@pytest.mark.parametrize("harm, reason", [
    (rewritten(b"[" * 10**6), "does not have the content that was written"),
    (rewritten(b"[3]"), "does not have the content that was written"),
    (with_tree(3), "does not have the content that was written"),
    (with_offsets(0.0, 800.0), "does not have the content that was written"),
    (with_offsets(0, 800, 9), "does not have the content that was written"),
    (with_tree(""), TREE),
    (with_tree("[" * 10**5 + "]" * 10**5), TREE),
    (with_tree("{}"), TREE),
    (with_tree('{"dict": 3}'), TREE),
    (with_tree('{"dict": [[[], 3]]}'), TREE),
    (with_tree('{"float": []}'), TREE),
    (with_tree('{"evil": "x"}'), TREE),
    (with_tree('{"array": "y", "dtype": "float64", "shape": [100]}'), TREE),
    (with_tree('{"array": [], "dtype": "float64", "shape": [100]}'), TREE),
    (with_leaf(shape=[99]), TREE),
    (with_leaf(shape=[-1, -100]), TREE),
    (with_leaf(shape="x"), TREE),
    (with_leaf(dtype="object"), TREE),
    (with_leaf(dtype=[]), TREE),
])
def test_a_forged_file_is_refused_and_the_checkpoint_before_taken(run, caplog, name, harm, reason):
    save(run, 5, 10)
    (path,) = (run / "000002-step-10").glob(f"{name}.*")
    harm(path)
    assert load(run) == [5, 5]
    (record,) = caplog.records
    assert "000002-step-10 is refused: " in record.message and reason in record.message


def test_a_file_that_is_longer_than_memory_is_refused(run, caplog, monkeypatch):
    def content(source):
        if "000002" in str(source._path):
            raise MemoryError("Unable to allocate 1.00 PiB")
        return read_content(source)
    save(run, 5, 10)
    read_content = checkpoint_file._Source.content
    monkeypatch.setattr(checkpoint_file._Source, "content", content)
    assert load(run) == [5, 5] and "cannot be read: Unable to allocate 1.00 PiB" in caplog.text


@pytest.mark.parametrize("name", ["replicated", "rank-00001", "sharded", "slices-00001"])
def test_a_pipe_is_not_waited_for(run, caplog, name):
    save(run, 5, 10)
    (path,) = (run / "000002-step-10").glob(f"{name}.*")
    as_pipe(path)
    assert load(run) == [5, 5]
    assert re.search(f"{name}.* cannot be read: it is not a regular file", caplog.text)


def test_forged_slices_are_refused(run, caplog):
    save(run, 5, 10)
    (path,) = (run / "000002-step-10").glob("sharded.*")
    with_tree('{"dict": [["m", {"sliced": "m", "dtype": "float32", "shape": [100]}]]}')(path)
    assert load(run) == [5, 5] and TREE in caplog.text


def test_the_checkpoints_of_a_colleague_are_read(run, monkeypatch):
    save(run, 5)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    for path in run.rglob("*"):
        path.chmod(0o777 if path.is_dir() else 0o666)
    assert load(run) == [5, 5]
