"""Tests what the command `checkpoint` lists, shows and verifies, without the job."""

import json

import numpy as np
import pytest
from checkpointing import flip
from threads import on_ranks

from mpiring.__main__ import main
from mpiring.numpy import Checkpoints
from mpiring.resilience import Sliced


@pytest.fixture
def folder(tmp_path):
    """Two checkpoints of two ranks: without slices, and with."""
    def run(comm):
        half = Sliced((4, 2), {(4 * comm.rank, 4 * comm.rank + 4): np.ones(4, "f4")}, "f4")
        with Checkpoints(tmp_path / "run", comm) as checkpoints:
            checkpoints.save(5, replicated={"w": np.ones((3, 2)), "lr": 0.1})
            checkpoints.save(10, replicated={"w": np.ones((3, 2))}, own=[np.int16(comm.rank)],
                             sharded={"m": {"w": half}, "z": np.zeros(2, complex)})
    on_ranks(2, run)
    return tmp_path / "run"


def shown(capsys, *words):
    status = main(["checkpoint", *map(str, words)])
    return status, [line.split() for line in capsys.readouterr().out.splitlines()]


def test_what_is_in_a_folder(folder, capsys):
    (folder / ".writing-1-2").mkdir()
    status, lines = shown(capsys, "list", folder)
    assert status == 0 and lines[0] == ["checkpoint", "step", "written", "ranks", "MB", "state"]
    assert lines[1][0] == ".writing-1-2" and lines[1][-1] == "incomplete"
    assert [(words[0], words[1], words[5], words[7:]) for words in lines[2:]] == [
        ("000001-step-5", "5", "2", ["complete"]),
        ("000002-step-10", "10", "2", ["complete,", "newest"])]
    (folder / "latest").write_text("000001-step-5\n")
    assert shown(capsys, "list", folder)[1][-1][-1] == "incomplete"


def test_the_list_as_json(folder, capsys):
    (folder / "000001-step-5" / "manifest.json").unlink()
    assert main(["checkpoint", "list", str(folder), "--json", "-"]) == 0
    content, table = capsys.readouterr()
    content = json.loads(content)
    assert content["benchmark"] == "checkpoints" and "000002-step-10" in table
    assert content["environment"]["folder"] == str(folder)
    damaged, newest = content["rows"]
    assert newest.items() >= {"name": "000002-step-10", "step": 10, "ranks": 2,
                              "state": "complete, newest"}.items() and newest["bytes"] > 0
    assert damaged["state"].startswith("damaged: manifest.json") and damaged["bytes"] is None
    assert main(["checkpoint", "list", str(folder), "--json", str(folder)]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_folder_without_checkpoints_says_so(folder, capsys, tmp_path):
    (tmp_path / "other").mkdir()
    for command, named, text in [
            ("list", tmp_path / "other", f"no checkpoints in {tmp_path / 'other'}\n"),
            ("show", tmp_path, f"no checkpoints in {tmp_path}; there are some in {folder}\n"),
            ("verify", folder / "000002-step-10", f"name the folder that contains it, {folder}\n")]:
        assert main(["checkpoint", command, str(named)]) == 2
        said = capsys.readouterr()
        assert said.err.endswith(text) and not said.out, said


def test_what_is_in_a_checkpoint_and_in_a_file(folder, capsys):
    status, lines = shown(capsys, "show", folder)
    assert status == 0 and lines[0][:6] == ["000002-step-10:", "step", "10,", "saved", "by", "2"]
    arrays = ["array", "dtype", "shape", "bytes"]
    assert lines[3:8] == [
        ["state", *arrays], ["replicated", "w", "float64", "3", "x", "2", "48"],
        ["sharded", "m/w", "float32", "4", "x", "2", "32"],
        ["sharded", "z", "complex128", "2", "32"], ["own", "0", "int16", "scalar", "2"]]
    assert shown(capsys, "show", folder, "--step", 5)[1][-3][1:3] != lines[4][1:3]
    out = folder / "all.safetensors"
    shown(capsys, "consolidate", folder, out)
    assert shown(capsys, "show", out) == (0, [
        arrays, ["replicated/w", "float64", "3", "x", "2", "48"],
        ["sharded/m/w", "float32", "4", "x", "2", "32"], ["sharded/z", "complex128", "2", "32"]])


@pytest.mark.parametrize("file", ["replicated", "slices-00001", "rank-00000", "manifest"])
def test_damage_is_named(folder, capsys, file):
    assert shown(capsys, "verify", folder)[0] == 0
    (damaged,) = (folder / "000002-step-10").glob(f"{file}*")
    flip(damaged)
    status, lines = shown(capsys, "verify", folder)
    assert status == 1 and lines[0][0] == "000001-step-5:" and "right;" in lines[0]
    assert lines[1][:3] == ["000002-step-10:", "DAMAGED:", damaged.name] and len(lines) == 2
    assert shown(capsys, "verify", folder, "--step", 5)[0] == 0
    damaged.unlink()
    assert shown(capsys, "verify", folder)[0] == 1
    assert shown(capsys, "list", folder)[1][-1] == [
        "mpiring", "checkpoint", "verify", str(folder), "names", "what", "is", "damaged"]


def test_a_torn_file_and_a_folder_without_checkpoints(folder, capsys):
    out = folder / "all.safetensors"
    shown(capsys, "consolidate", folder, out)
    assert shown(capsys, "verify", out)[0] == 0
    out.write_bytes(out.read_bytes()[:-1])
    status, (line,) = shown(capsys, "verify", out)
    assert status == 1 and line[:2] == [f"{out}:", "DAMAGED:"]
    for words in (["verify", folder, "--step", 6], ["show", folder.parent], ["list", out]):
        assert shown(capsys, *words) == (2, [])
