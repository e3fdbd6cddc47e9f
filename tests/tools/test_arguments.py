"""Tests what is said of a wrong command line, once per job, and what the help texts look like."""

import re
from types import SimpleNamespace

import pytest
from launching import ROOT, launch, status_of

from mpiring.__main__ import main
from mpiring.tools import arguments

# Wrong on every rank in the same way: the words, and a part of what one rank says.
WRONG = {
    ("--wrong",): "error: unrecognized arguments: --wrong",
    ("bench", "--wrong"): "error: the following arguments are required: {allreduce,",
    ("bench", "allreduce", "--sizs", "8"): "--sizs 8; did you mean --sizes?",
    ("bench", "steps", "--device", "cuda"): "mpiring: --device cuda, --optimizer adamw",
    ("simulate", "--json", "-", "--csv", "-"): "mpiring: --json - and --csv -"}
HELP = {("--help",): "commands:", ("bench", "--help"): "positional", ("--version",): "mpiring "}


def said(capsys, words):
    return status_of(main, words), "".join(capsys.readouterr())


@pytest.mark.parametrize("variables", [
    {}, {"PALS_RANKID": "0"}, {"PALS_RANKID": "1"}, {"PMI_SIZE": "2", "PMI_RANK": "1"}])
def test_one_rank_of_a_job_says_what_is_wrong(capsys, monkeypatch, variables):
    """Some launchers tell a process only its rank."""
    is_first, slept = "1" not in variables.values(), []
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(arguments, "time", SimpleNamespace(sleep=slept.append))
    for words, part in WRONG.items():
        status, text = said(capsys, words)
        assert status == 2 and (part in text if is_first else not text), text
    assert len(slept) == (0 if is_first else len(WRONG)), "launchers end a job at the first failure"
    for words, part in HELP.items():
        status, text = said(capsys, words)
        assert status == 0 and (part in text if is_first else not text), text


@pytest.mark.launch
@pytest.mark.any_mpi
def test_a_job_says_once_what_is_wrong():
    ended = launch(2, "-m", "mpiring", "bench", "--wrong")
    assert ended.status == 2 and ended.output.count("usage: python -m mpiring bench ") == 1
    assert ended.output.count("error: ") == 1, ended.output


@pytest.mark.parametrize(("words", "meant"), [
    ("benhc", "bench"), ("check list run1", "checkpoint"), ("benchmark", "bench"),
    ("--verson", "--version"), ("bench alreduce", "allreduce"), ("doctor --jsn", "--json"),
    ("simulate step --trace x --comparee", "--compare"), ("checkpoint lst run1", "list"),
    ("bench steps --framework tor", "torch"),
    ("zzz", None), ("bench allreduce --device gpu", None), ("doctor --wrong", None)])
def test_similar_names_are_suggested(capsys, words, meant):
    status, text = said(capsys, words.split())
    suggested = re.search(r"; did you mean (\S+)\?$", text, re.MULTILINE)
    assert status == 2 and (suggested and suggested[1]) == meant, text
    command = words.split()[0]
    if command in ("doctor", "checkpoint"):
        assert f"usage: python -m mpiring {command}" in text, "usage of what was given the option"


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_help_fits_the_terminal(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    for words in ([], ["simulate"], ["simulate", "step"], ["checkpoint"], ["bench"], ["lab"]):
        _, text = said(capsys, [*words, "--help"])
        prose = [line for line in text.splitlines() if not line.startswith("    ")]
        assert max(map(len, prose)) <= max(min(columns, 100), 76), text


def test_commands_are_in_the_order_of_their_reference(capsys):
    _, text = said(capsys, ["--help"])
    listed = re.findall(r"^    (\w+)", text.partition("COMMAND\n")[2], re.MULTILINE)
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    assert listed == re.findall(r"^## (\w+):", page, re.MULTILINE) and listed[0] == "doctor"
