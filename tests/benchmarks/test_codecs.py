"""Tests the benchmark of codecs on a simulated GPU."""

import json
from argparse import Namespace

import simulated_gpu

from benchmarks import codecs


def test_what_is_measured(monkeypatch, tmp_path, capsys):
    simulated_gpu.installed(monkeypatch)
    path = tmp_path / "codecs.json"
    assert codecs.run(Namespace(device="cuda", elements=300, json=str(path))) == 0
    shown = capsys.readouterr().out
    for row in json.loads(path.read_text())["rows"]:
        assert row.pop("codec") in shown
        assert len(row) == 4 and all(share > 0 for share in row.values())
