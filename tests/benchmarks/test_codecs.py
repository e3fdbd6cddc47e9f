"""Tests the benchmark of codecs on a simulated GPU."""

import json
from argparse import Namespace

import host_kernels
import simulated_gpu

from benchmarks import codecs
from mpiring.reducers.codecs import kernels


def test_what_is_measured(monkeypatch, tmp_path, capsys):
    simulated_gpu.installed(monkeypatch)
    host_kernels.compile_together([
        make(codec, flag) for _, codec in codecs._CODECS
        for make in (kernels.encoder, kernels.decoder) for flag in (False, True)])
    path = tmp_path / "codecs.json"
    assert codecs.run(Namespace(device="cuda", elements=300, json=str(path))) == 0
    shown = capsys.readouterr().out
    for row in json.loads(path.read_text())["rows"]:
        assert row.pop("codec") in shown
        assert len(row) == 4 and all(share > 0 for share in row.values())
