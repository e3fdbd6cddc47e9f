"""Tests that results can have standard output alone, and what happens where that is lost."""

import configparser
import io
import json
import os
import sys
from importlib.metadata import EntryPoint

import pytest
from launching import ROOT, launch, needed, python, shell

from mpiring.__main__ import main
from mpiring.tools import results

SIMULATE = ("simulate", "--nodes", "2", "--size", "1MB")
TINY = "--sizes 8 --algorithms auto --contenders mpiring --rounds 1 --budget 0.001"
FULL = "mpiring: standard output: No space left on device\n"


@pytest.mark.parametrize("words", [SIMULATE, (*SIMULATE, "--json", "-"), ("--version",)])
def test_a_full_disk_is_a_line_and_a_closed_pipe_is_quiet(words):
    with open("/dev/full", "w") as full:
        ended = python("-m", "mpiring", *words, stdout=full)
    table = "--json" in words
    assert ended.returncode == 1 and ended.stderr.endswith(FULL), ended.stderr
    assert ended.stderr.count("\n") == 1 or table, ended.stderr
    reading, writing = os.pipe()
    os.close(reading)
    ended = python("-m", "mpiring", *words, stdout=writing)
    os.close(writing)
    assert ended.returncode == 1 and (table or not ended.stderr), ended.stderr
    assert "Error" not in ended.stderr and "Exception" not in ended.stderr


@pytest.mark.launch
@pytest.mark.any_mpi
def test_a_rank_whose_output_is_lost_ends_the_job():
    program = ("import os, sys; os.dup2(os.open('/dev/full', os.O_WRONLY), 1);"
               "from mpiring.__main__ import main;"
               f"sys.exit(main(['bench', 'allreduce', *'{TINY}'.split()]))")
    ended = launch(2, "-c", program)
    assert ended.status != 0 and ended.output.count(FULL) == 1, ended.output
    assert "Traceback" not in ended.output


@pytest.mark.launch
@pytest.mark.any_mpi
def test_json_of_a_launchers_job_is_all_that_is_printed():
    ended = shell(f"mpiexec -n 2 python -m mpiring bench allreduce {TINY} --json - 2>/dev/null")
    assert ended.status == 0, ended.output
    content = json.loads(ended.output)
    assert content["environment"]["ranks"] == 2
    assert "mpiring auto" in [row["contender"] for row in content["rows"]]


def test_results_have_standard_output_alone(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*SIMULATE, "--json", "-"]) == 0
    shown = capsys.readouterr()
    rows = json.loads(shown.out)["rows"]
    assert rows and "efficiency %" in shown.err
    assert main([*SIMULATE, "--csv", "-"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("# date: ") and "efficiency %" in shown.err
    assert len([line for line in shown.out.splitlines() if line[0] != "#"]) == 1 + len(rows)
    assert not list(tmp_path.iterdir())


def test_a_picture_of_what_comes_through_a_pipe(capsys, tmp_path, monkeypatch):
    needed("matplotlib")
    assert main([*SIMULATE, "--json", "-"]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO(capsys.readouterr().out))
    assert main(["bench", "plot", "-", str(tmp_path / "out.png")]) == 0
    assert (tmp_path / "out.png").stat().st_size > 10_000


def test_one_place_cannot_take_two_results(capsys, tmp_path):
    assert main([*SIMULATE, "--json", "-", "--csv", "-"]) == 2
    assert "--json - and --csv -: standard output takes one" in capsys.readouterr().err
    same = str(tmp_path / "same")
    assert main([*SIMULATE, "--json", same, "--csv", same]) == 2
    assert "one file cannot take both" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_standard_output(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    assert main(list(SIMULATE)) == 0
    assert main([*SIMULATE, "--json", "-"]) == 2
    assert "--json -: standard output is closed" in capsys.readouterr().err


def test_the_script_mpiring_goes_by_its_own_name(capsys, monkeypatch):
    """A benchmark that it starts again runs `python -m mpiring`, which needs no script."""
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    name, _, value = config["options.entry_points"]["console_scripts"].strip().partition(" = ")
    assert EntryPoint(name, value, "console_scripts").load() is main
    for first, usage, command in [
            ("/x/bin/mpiring", "usage: mpiring bench ", "mpiring bench --help"),
            ("/x/__main__.py", "usage: python -m mpiring bench ",
             "python /x/__main__.py bench --help")]:
        monkeypatch.setattr(sys, "argv", [first, "bench", "--help"])
        monkeypatch.setattr(sys, "orig_argv", ["python3", *sys.argv])
        with pytest.raises(SystemExit):
            main()
        assert capsys.readouterr().out.startswith(usage) and results.command() == command
