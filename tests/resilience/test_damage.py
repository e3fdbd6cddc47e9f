"""Tests that what is damaged or forged is refused, and the checkpoint before it taken."""

import json
import logging
import os
import re
from pathlib import Path

import pytest
import xxhash
from checkpointing import as_pipe, changed, cut, flip, load, save

from mpiring.errors import CheckpointError
from mpiring.resilience import checkpoint_file
from mpiring.resilience.manifest import sealed


def replaced(old, new):
    return lambda path: path.write_text(path.read_text().replace(old, new))


def written(text):
    return lambda path: path.write_text(text)


def as_folder(path):
    path.unlink()
    path.mkdir()


def as_device(path):
    path.unlink()
    path.symlink_to("/dev/zero")


def without(key):
    return changed(lambda manifest: manifest.pop(key))


def with_value(key, value):
    return changed(lambda manifest: manifest.update({key: value}))


def with_slices(**entry):
    return changed(lambda manifest: manifest["slices"]["m"].update(entry))


def without_file(start):
    return changed(lambda manifest: manifest.update(files={
        name: nbytes for name, nbytes in manifest["files"].items() if not name.startswith(start)}))


def elsewhere(manifest):
    (name,) = (name for name in manifest["files"] if name.startswith("replicated"))
    manifest["files"]["../" + name] = manifest["files"].pop(name)


def huge(manifest):
    manifest["files"] = dict.fromkeys(manifest["files"], 10**400)


CONTENT = "does not have the content that was written"
NOT_OURS = "manifest.json is not as mpiring writes it: "
NO_FILES, NO_SLICES = "files are not names and lengths", "'m' in slices has no shape and ranks"
MANIFESTS = [
    (Path.unlink, "manifest.json is missing"),
    (cut, "manifest.json is torn"),
    (written('{"format": ' + "[" * 10**6), "manifest.json is torn: it is not JSON of at most 5"),
    (written('{"format": "pt"}'), "manifest.json is not one of mpiring's"),
    (written("[3]"), "manifest.json is not one of mpiring's"),
    (as_pipe, "manifest.json cannot be read: it is not a regular file"),
    (as_device, "manifest.json cannot be read: it is not a regular file"),
    (lambda path: os.truncate(path, 1 << 40), r"json cannot be read: it has more than \d+ bytes"),
    (replaced('"version": 3', '"version": 4'), "4, but this mpiring reads versions 1 to 3"),
    (replaced('"step": 10', '"step": 11'), f"manifest.json {CONTENT}"),
    (without("step"), f"{NOT_OURS}step or size is no number"),
    (with_value("size", "2"), f"{NOT_OURS}step or size is no number"),
    (with_value("size", 0), f"{NOT_OURS}step or size is no number"),
    (without("written"), f"{NOT_OURS}it does not say when"),
    (with_value("versions", 3), f"{NOT_OURS}it does not say when"),
    (with_value("size", True), f"{NOT_OURS}step or size is no number"),
    (changed(huge), NOT_OURS + NO_FILES),
    (with_value("seed", [1]), f"{NOT_OURS}seed is no number"),
    (without("files"), NOT_OURS + NO_FILES),
    (with_value("files", [3]), NOT_OURS + NO_FILES),
    (with_value("files", {"replicated": 3}), NOT_OURS + NO_FILES),
    (changed(elsewhere), NOT_OURS + NO_FILES),
    (without_file("replicated"), f"{NOT_OURS}it has no replicated state"),
    (without_file("slices-00001"), "incomplete: it names no file of rank 1"),
    (with_value("slices", [3]), f"{NOT_OURS}slices are no object"),
    (with_value("slices", {"m": 3}), NOT_OURS + NO_SLICES),
    (with_slices(shape=["100"]), NOT_OURS + NO_SLICES),
    (with_slices(ranks={"a:b": 0}), NOT_OURS + NO_SLICES),
    (with_slices(ranks={"0:100": 2}), NOT_OURS + NO_SLICES),
    (with_slices(shape=[2**40, 2**40]), "elements 100 to .* of m in sharded are saved by no rank"),
    (with_slices(ranks={"0:50": 0}), "incomplete: elements 50 to 99 of m in sharded are saved by "
     "no rank"),
    (with_slices(ranks={"0:50": 0, "50:100": 1, "60:70": 0}), "elements 60 to 69 of m in sharded "
     "are saved by rank 1 and by rank 0"),
    (with_slices(ranks={"0:50": 1, "50:100": 1}), "rank 1 does not have the elements 0:50 of m"),
]
FILES = [
    ("replicated", flip, f"rank 0: replicated.* {CONTENT}"),
    ("replicated", cut, "rank 0: replicated.* bytes instead of"),
    ("replicated", as_pipe, "rank 0: replicated.* cannot be read: it is not a regular file"),
    ("rank-00001", flip, f"rank 1: rank-00001.* {CONTENT}"),
    ("rank-00001", Path.unlink, "rank 1: rank-00001.* is missing"),
    ("rank-00001", as_pipe, "rank 1: rank-00001.* cannot be read: it is not a regular file"),
    ("rank-00000", as_folder, "rank 0: rank-00000.* cannot be read"),
    ("sharded", flip, f"rank 0: sharded.* {CONTENT}"),
    ("sharded", Path.unlink, "rank 0: sharded.* is missing"),
    ("sharded", as_pipe, "rank 0: sharded.* cannot be read: it is not a regular file"),
    ("slices-00001", flip, f"rank 1: slices-00001.* {CONTENT}"),
    ("slices-00001", cut, r"rank 0: slices-00001.* has \d+ bytes instead of \d+"),
    ("slices-00001", lambda path: os.truncate(path, 0), r"slices-00001.* has 0 bytes instead of"),
    ("slices-00001", Path.unlink, "rank 0: slices-00001.* is missing"),
    ("slices-00001", as_pipe, "rank 0: slices-00001.* cannot be read: it is not a regular file"),
]


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
        digest = f"xxh3-{xxhash.xxh3_128(content).hexdigest()}"
        name = ".".join([path.name.partition(".")[0], digest, "safetensors"])
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
FORGED = [
    ("replicated", rewritten(b"[" * 10**6), CONTENT),
    ("rank-00001", rewritten(b"[3]"), CONTENT),
    ("replicated", with_tree(3), CONTENT),
    ("rank-00001", with_offsets(0.0, 800.0), CONTENT),
    ("replicated", with_offsets(0, 800, 9), CONTENT),
    *((("replicated", "rank-00001")[number % 2], harm, TREE) for number, harm in enumerate([
        with_tree(""), with_tree("[" * 10**4 + "]" * 10**4), with_tree("{}"),
        with_tree('{"dict": 3}'), with_tree('{"dict": [[[], 3]]}'), with_tree('{"float": []}'),
        with_tree('{"evil": "x"}'), with_tree('{"tuple": [{}]}'),
        with_tree('{"array": "y", "dtype": "float64", "shape": [100]}'),
        with_tree('{"array": [], "dtype": "float64", "shape": [100]}'),
        with_leaf(shape=[99]), with_leaf(shape=[-1, -100]), with_leaf(shape="x"),
        with_leaf(dtype="object"), with_leaf(dtype=[])])),
    ("sharded", with_tree('{"dict": [["m", {"sliced": "m", "dtype": "float32", "shape": [100]}]]}'),
     TREE)]


@pytest.mark.parametrize("name, harm, reason", [
    *(("manifest", *row) for row in MANIFESTS), *FILES, *FORGED])
def test_what_is_damaged_is_refused_and_the_one_before_taken(tmp_path, caplog, name, harm, reason):
    save(tmp_path, 5, 10)
    (path,) = (tmp_path / "000002-step-10").glob(f"{name}.*")
    harm(path)
    assert [saved.step for saved in load(tmp_path)] == [5, 5]
    (record,) = caplog.records      # once, on rank 0
    assert record.levelno == logging.WARNING
    assert re.search(f"checkpoint 000002-step-10 is refused: .*{reason}", record.message), (
        record.message)


def test_a_file_that_is_longer_than_memory_is_refused(tmp_path, caplog, monkeypatch):
    def content(source):
        if "000002" in str(source._path):
            raise MemoryError("Unable to allocate 1.00 PiB")
        return read_content(source)
    save(tmp_path, 5, 10)
    read_content = checkpoint_file._Source.content
    monkeypatch.setattr(checkpoint_file._Source, "content", content)
    assert load(tmp_path)[0].step == 5
    assert "cannot be read: Unable to allocate 1.00 PiB" in caplog.text


def test_a_manifest_of_before_there_were_slices_is_read(tmp_path):
    save(tmp_path, 5)
    for change in (without("slices"), with_value("version", 1)):
        change(tmp_path / "000001-step-5" / "manifest.json")
    assert [(saved.step, saved.sharded) for saved in load(tmp_path)] == [(5, None)] * 2


def test_where_none_can_be_used_nothing_begins_anew(tmp_path):
    save(tmp_path, 5, 10)
    for path in tmp_path.glob("*/rank-00001.*"):
        cut(path)
    with pytest.raises(CheckpointError, match="no checkpoint in .* can be used: checkpoint 000002"
                       ".*rank 1: .*; checkpoint 000001.*To start again, use another folder"):
        load(tmp_path)
    assert len(list(tmp_path.glob("*-step-*"))) == 2


@pytest.mark.parametrize("harm, problem", [
    (Path.unlink, "there is no file latest"),
    (written(""), "latest names '', which is not there"),
    (written("000009-step-9"), "latest names '000009-step-9', which is not there"),
    (lambda path: path.write_bytes(b"\xff"), "latest cannot be read"),
    (as_pipe, r"latest cannot be read \(\[Errno.*not a regular file"),
    (lambda path: path.write_bytes(bytes(1 << 20)), "latest cannot be .*more than 4096 bytes"),
])
def test_without_a_pointer_the_newest_is_looked_for(tmp_path, caplog, harm, problem):
    save(tmp_path, 5, 10)
    harm(tmp_path / "latest")
    assert [saved.step for saved in load(tmp_path)] == [10, 10]
    (record,) = caplog.records
    assert re.search(problem, record.message)
