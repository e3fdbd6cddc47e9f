"""Tests what the benchmarks refuse before they measure, in this process where that is possible."""

import re
import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest
from jobs import run
from launching import PROGRAMS, needed, status_of

from mpiring.__main__ import main
from mpiring.tools.bench.benchmark import BenchmarkJob as Job, plan
from mpiring.tools.bench.contenders import settle_contenders
from mpiring.tools.bench.world import World
from mpiring.errors import ConfigError, MissingDependencyError

UNWRITABLE = {
    "--json": ("missing/out.json", "missing/out.json: cannot be written: No such file"),
    "--csv": (".", ": cannot be written: Is a directory"),
    "--plot": ("out.nonsense", "out.nonsense: expected a name that ends in")}


def shown_by(capsys, monkeypatch, *words):
    """Return the exit status and what is printed where there is no MPI library."""
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    return status_of(main, ["bench", *words]), "".join(capsys.readouterr())


@pytest.mark.parametrize("command", [
    (), ("allreduce",), ("overlap",), ("steps",), ("reducers",), ("latency",), ("plot",)])
def test_help_needs_no_mpi(capsys, monkeypatch, command):
    status, text = shown_by(capsys, monkeypatch, *command, "--help")
    assert status == 0 and "usage: " in text


@pytest.mark.parametrize(("words", "message"), [
    ("allreduce --sizes many", "argument --sizes: size 'many': expected a number of bytes"),
    ("allreduce --sizes 8,0", "argument --sizes: size '0': expected 1 byte or more"),
    ("allreduce --json missing/out.json", "missing/out.json: cannot be written: No such file"),
    ("allreduce --algorithms auto,best", "'best': expected some of auto"),
    ("allreduce --ranks 0", "argument --ranks: '0': expected 1 or more"),
    ("allreduce --budget -1", "argument --budget: '-1': expected a number above 0"),
    ("allreduce --contenders nccl",
     "nccl: here, with --device cpu, expected some of mpiring, mpi, gloo, horovod"),
    ("allreduce --device cuda --contenders mpi,gloo",
     "gloo: here, with --device cuda, expected some of mpiring, mpi, nccl"),
    ("steps --device cuda", "--device cuda, --optimizer adamw and --sharded need --framework"),
    ("steps --framework torch --sharded zero,1",
     "'1': expected some of slices, overlap, node, zero, fsdp"),
    ("steps --framework torch --sharded --device cuda", "--sharded needs --device cpu"),
    ("reducers --reducers dense,fp8", "'fp8': expected some of alone, dense"),
    ("local --steps 2", "studies of methods are in the folder benchmarks of mpiring's sources: "),
    ("reducers --steps 2", "--steps 2 is too few: the first 2 are not measured"),
])
def test_bad_options(capsys, monkeypatch, words, message):
    status, text = shown_by(capsys, monkeypatch, *words.split())
    assert status == 2 and message in text, text


def test_a_job_that_is_there_starts_no_others(capsys, monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "4")
    status, text = shown_by(capsys, monkeypatch, "allreduce", "--ranks", "2")
    assert status == 2 and "--ranks 2: this is a job of 4 ranks already, as PMI_SIZE=4" in text


@pytest.mark.launch
@pytest.mark.any_mpi
def test_files_that_rank_0_cannot_write_are_refused_on_all(tmp_path):
    needed("matplotlib")
    words = [word for option, (name, _) in UNWRITABLE.items()
             for word in ("allreduce", option, tmp_path / name, ",")]
    ended = run(2, PROGRAMS / "bench_in_turn.py", *words)
    assert ended.output.count("allreduce ended with status 2") == 6, ended.output
    for _, message in UNWRITABLE.values():
        assert len(re.findall(f"^mpiring: rank 0: .*{re.escape(message)}", ended.output,
                              re.MULTILINE)) == 2
    assert "MPI_Allreduce" not in ended.output, "nothing is measured in vain"
    assert not list(tmp_path.iterdir())


def test_jobs_alternate_between_the_levels():
    levels = ["multiple", "serialized"]
    assert plan(levels, 5) == [
        Job("multiple", 3, True), Job("serialized", 3, False), Job("serialized", 3, False),
        Job("multiple", 3, True)]
    assert plan(levels[:1], 5) == [Job("multiple", 5, True)]
    assert plan(levels[:1], None) == [Job("multiple", None, True)]


@pytest.mark.parametrize(("asked", "chosen"), [
    (None, ["mpiring"]), (["gloo"], []), (["hvd", "horovod"], ["hvd"])])
def test_a_job_without_peers_has_no_contender_that_the_first_job_lacks(asked, chosen):
    options = Namespace(contenders=asked, without_peers=True)
    settle_contenders(options, {"cpu": ("mpiring", "hvd", "gloo", "horovod")})
    assert options.contenders == chosen


def test_what_one_rank_cannot_do_ends_all():
    world = World.__new__(World)
    errors = [None, MissingDependencyError("there is no CuPy"), None]
    world.raw = SimpleNamespace(allgather=lambda own_error: [own_error, *errors])
    with pytest.raises(MissingDependencyError, match="^rank 2: there is no CuPy$"):
        world.call_on_all(lambda: None)
    errors.clear()
    world.call_on_all(lambda: None)
    with pytest.raises(ConfigError, match="^rank 0: mine$"):
        world.call_on_all(lambda: (_ for _ in ()).throw(ConfigError("mine")))
