"""Tests what is measured, saved and believed; on a fake cluster whose clock is the test's."""

import json

import numpy as np
import pytest

from mpiring import Config, ConfigError
from mpiring.engine import tuning
from mpiring.engine.tuning import Tuner
from mpiring.launch.cache import folder_of

LATENCY_S = {"native": 1e-5, "ring": 1e-4}
BANDWIDTH = {"native": 1e8, "ring": 1e9}


class Cluster:
    """One rank of a cluster in which every call takes the time that its algorithm should."""

    def __init__(self, monkeypatch, slower=1.0):
        self.now = 0.0
        self.calls = []
        self.slower = slower
        monkeypatch.setattr(tuning.time, "perf_counter", lambda: self.now)

    def tuner(self, folder, cluster="4 nodes", rank=0, others=""):
        collectives = Collectives(self, others.encode())
        return Tuner(lambda step, build: build(collectives), rank=rank, cluster=cluster,
                     candidates=("native", "ring"), folder=str(folder or ""))


class Collectives:
    """What the tuner calls, done at once; rank 0 broadcasts `text` to others."""

    def __init__(self, cluster, text):
        self._cluster, self._text = cluster, text

    def empty(self, shape, dtype):
        return np.empty(shape, dtype)

    def allreduce(self, x, *, op="sum", algorithm):
        if op == "sum":
            cluster = self._cluster
            cluster.calls.append((algorithm, x.nbytes))
            cluster.now += cluster.slower * (
                LATENCY_S[algorithm] + x.nbytes / BANDWIDTH[algorithm])

    def broadcast_bytes(self, x, root):
        return x if x.size else self._text


@pytest.fixture
def cluster(monkeypatch):
    return Cluster(monkeypatch)


def test_a_probe_finds_the_times_and_the_crossing(cluster):
    model = cluster.tuner(None).probe()
    assert [name for name, _ in model.curves] == ["native", "ring"]
    for name, curve in model.curves:
        assert curve.points[0] == (64, pytest.approx(LATENCY_S[name], rel=0.1))
    assert model.best(64, ["native", "ring"]) == "native"
    assert model.best(1 << 20, ["native", "ring"]) == "ring"
    assert cluster.now < 0.5, "half a second is promised"


def test_a_slow_network_is_probed_with_small_arrays_only(monkeypatch):
    cluster = Cluster(monkeypatch, slower=100)
    model = cluster.tuner(None).probe()
    assert max(size for _, curve in model.curves for size, _ in curve.points) < 1 << 20


def test_what_was_found_is_saved_and_checked_by_few_calls(cluster, tmp_path):
    folder = tmp_path / "new" / "folder"
    first = cluster.tuner(folder).find()
    (file,) = folder.iterdir()
    assert json.loads(file.read_text())["about"].endswith(" 4 nodes")
    cluster.calls.clear()
    assert cluster.tuner(folder).find() == first
    assert set(cluster.calls) == {("native", 512 << 10)}
    assert cluster.tuner(folder).find(fresh=True) is not first
    assert len(cluster.calls) > 20
    cluster.tuner(folder, cluster="8 nodes").find()
    assert len(list(folder.iterdir())) == 2


def test_a_saved_model_that_is_wrong_by_now_is_replaced(cluster, tmp_path):
    first = cluster.tuner(tmp_path).find()
    cluster.slower = 3.0
    second = cluster.tuner(tmp_path).find()
    assert second != first
    assert cluster.tuner(tmp_path).find() == second


@pytest.fixture
def saved(cluster, tmp_path):
    """Return the file of a model; no other one may be left."""
    cluster.tuner(tmp_path).find()
    cluster.calls.clear()
    (file,) = tmp_path.iterdir()
    yield file
    assert list(tmp_path.iterdir()) == [file]
    assert len(cluster.calls) > 20, "it is measured again"
    assert "ring" in json.loads(file.read_text())["model"]


@pytest.mark.parametrize("content", [
    "", "{}", "[1]", '{"about": "another"}', '{"about": ' + "[" * 10**5, "1" * (2 << 20),
    *({"model": model} for model in (
        "no", 3, None, "[" * 10**5, '{"native": [[Infinity, 1]]}', '{"native": [["a", "b"]]}',
        '{"native": []}', '{"native": {"1": 2}}', "[]"))])
def test_a_spoilt_file_is_no_reason_to_fail(cluster, tmp_path, saved, content, caplog):
    """In full, or a model in it; nor is one that another user may have written."""
    caplog.set_level("INFO", "mpiring")
    is_text = isinstance(content, str)
    saved.write_text(
        content if is_text else json.dumps({**json.loads(saved.read_text()), **content}))
    cluster.tuner(tmp_path).find()
    assert not is_text or f"{saved} is not used: " in caplog.text
    saved.chmod(0o622)
    cluster.calls.clear()
    cluster.tuner(tmp_path).find()


def test_a_folder_that_cannot_be_written_to_is_reported_and_no_reason_to_fail(
        cluster, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert cluster.tuner(tmp_path / "file").find().curves
    (message,) = caplog.messages
    assert f"cannot be saved in {tmp_path / 'file'} (File exists)" in message
    assert "set MPIRING_TUNING_FOLDER" in message


def test_only_rank_0_reads_and_writes(cluster, tmp_path):
    model = cluster.tuner(tmp_path, rank=1).find()
    assert not list(tmp_path.iterdir())
    assert cluster.tuner(tmp_path, rank=1, others=model.to_json()).find() == model


def test_folders():
    assert folder_of("") is None
    assert folder_of("~/x").is_absolute()
    assert folder_of("~nobody-of-this-name/x") is None
    with pytest.raises(ConfigError, match="expected an absolute path"):
        Config(tuning_folder="x/y")
