"""Tests the files that results are written to."""

import csv
import json
import os
from types import SimpleNamespace

import pytest

from mpiring import ConfigError
from mpiring.tools import output, results

ABOUT = {"ranks": 4, "cpu": "A CPU", "cores": [0, 1]}
NAN = float("nan")
FIELDS = {"allreduce": ({}, {})}
ROWS = [{"contender": "a", "median_us": 1000.0}, {"contender": "b", "median_us": NAN},
        {"contender": "c", "curve_bits": [8.0, NAN]}]


def test_json_comes_back_as_it_went(tmp_path):
    path = tmp_path / "result.json"
    results.write_json(path, "allreduce", ABOUT, ROWS)
    _, second, third = json.loads(path.read_text())["rows"]
    assert second["median_us"] is None and third["curve_bits"] == [8.0, None]
    benchmark, about, again = results.read_json(path, FIELDS)
    assert (benchmark, about, str(again)) == ("allreduce", ABOUT, str(ROWS))


def test_files_that_cannot_be_read_or_written(tmp_path):
    missing = str(tmp_path / "missing" / "out.json")
    with pytest.raises(ConfigError, match="out.json: cannot be read: No such file"):
        results.read_json(missing, FIELDS)
    for write in (lambda: results.write_json(missing, "allreduce", ABOUT, []),
                  lambda: results.write_csv(missing, ABOUT, []),
                  lambda: output.refuse_unwritable(missing)):
        with pytest.raises(ConfigError, match="out.json: cannot be written: No such file"):
            write()
    output.refuse_unwritable(str(tmp_path / "new.json"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": 3}'])
def test_bad_json(tmp_path, text):
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="result.json: no file that --json has written"):
        results.read_json(path, FIELDS)


def test_csv(tmp_path):
    path = tmp_path / "result.csv"
    results.write_csv(path, ABOUT, ROWS[:2])
    lines = path.read_text().splitlines()
    above = [line for line in lines if line.startswith("#")]
    assert "# cpu: A CPU" in above and len(above) == len(ABOUT)
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert [row["contender"] for row in rows] == ["a", "b"]
    assert float(rows[0]["median_us"]) == 1000 and rows[1]["median_us"] == ""


def test_a_record_says_with_which_priority_and_in_which_lab(monkeypatch):
    assert "lab" not in results.machine()
    monkeypatch.setenv("LAB_OPTIONS", "--hosts 2")
    monkeypatch.setattr(os, "sched_getscheduler", lambda _: 2, raising=False)
    monkeypatch.setattr(os, "sched_getparam", lambda _: SimpleNamespace(sched_priority=10),
                        raising=False)
    about = results.machine()
    assert (about["lab"], about["scheduling"]) == ("--hosts 2", "SCHED_RR 10")
    monkeypatch.setattr(os, "sched_getscheduler", lambda _: 0)
    monkeypatch.setattr(os, "sched_getparam", lambda _: SimpleNamespace(sched_priority=0))
    assert results.machine()["scheduling"] == f"SCHED_OTHER, nice {os.nice(0)}"
