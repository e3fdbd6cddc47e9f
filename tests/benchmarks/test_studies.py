"""Runs the studies on real MPI, with tiny sizes."""

import importlib
import json
import sys
from argparse import Namespace

import pytest
import simulated_gpu
from jobs import run
from launching import PROGRAMS, installed, needed, status_of

from benchmarks import codecs, local, main, muon, plot, updates
from mpiring.tools.bench.benchmark import Measurement
from mpiring.tools.bench.reducers import METHODS

LOCAL = ("benchmarks.local", "--parameters", "60K", "--batch", "1", "--steps", "4", "--every", "2",
         "--fragments", "2", "--delay", "1", "--validate-every", "2", "--validation-texts", "3",
         "--straggler", "1ms,0.5", "--learning-rates", "1e-3,3e-3", "--seeds", "1,2")
REDUCERS = ("benchmarks.reducers", "--parameters", "60K", "--batch", "1", "--steps", "4",
            "--warmup-steps", "2", "--validate-every", "1", "--validation-texts", "3")
BATCHES = ("benchmarks.batches", "--functions", "200", "--parameters", "60K", "--samples", "4",
           "--longest", "256", "--rounds", "2", "--calls", "2")


@pytest.mark.launch
@pytest.mark.any_mpi
def test_studies_of_training(tmp_path):
    """Each rank is a node, so that ways to talk less have somebody to talk to."""
    installed("matplotlib"), installed("torch")
    ended = run(2, PROGRAMS / "bench_in_turn.py", *(word for words in (
        ("benchmarks.prefetch", "--models", "mlp,transformer", "--parameters", "60K", "--batch",
         "2", "--calls", "2", "--rounds", "3", "--json", tmp_path / "prefetch.json", "--plot",
         tmp_path / "prefetch.png"),
        ("benchmarks.prefetch", "--models", "mlp", "--parameters", "60K", "--calls", "2",
         "--rounds", "1", "--loader", "2", "--work", "sleep,zlib,numpy,python", "--json",
         tmp_path / "loaders.json", "--plot", tmp_path / "loaders.png"),
        ("benchmarks.muon", "--parameters", "60K", "--calls", "2", "--rounds", "2", "--json",
         tmp_path / "muon.json", "--plot", tmp_path / "muon.png"),
        (*BATCHES, "--json", tmp_path / "batches.json", "--plot", tmp_path / "batches.png"),
        (*LOCAL, "--json", tmp_path / "local.json", "--plot", tmp_path / "local.png"),
        (*REDUCERS, "--json", tmp_path / "reducers.json", "--plot", tmp_path / "reducers.png"),
        (*REDUCERS, "--reducers", "alone,dense", "--time-limit", "1e-9"),
    ) for word in (*words, ",")), MPIRING_SHARED_MEMORY="0")
    assert ended.output.count("ended with status 0") == 14, ended.output
    rows = {path.stem: json.loads(path.read_text())["rows"] for path in tmp_path.glob("*.json")}
    assert rows.keys() == {"prefetch", "loaders", "batches", "local", "muon", "reducers"}
    for name in rows:
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    check_prefetching(rows["prefetch"], rows["loaders"])
    check_batches(rows["batches"])
    assert [row["contender"] for row in rows["muon"]] == [muon.REDUNDANT, muon.OWNERS]
    assert all(row["steps"] == 4 and row["over_redundant"] > 0 for row in rows["muon"])
    check_local(rows["local"])
    check_reducers(rows["reducers"])
    for name in "alone", "dense":
        assert f"{name}, seed 1: stopped after 1 of 4 steps by --time-limit" in ended.output
    assert main("plot", plot.declare, [str(tmp_path / "local.json"), str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").stat().st_size > 10_000


def check_prefetching(rows, loaders):
    assert [row["contender"] for row in rows] == 2 * [
        "data on the device", "mpiring.data.prefetch", "copied in the step"]
    assert [row["batch_bytes"] for row in rows[::3]] == [2 * 64 * 4 + 2 * 8, 2 * 2 * 64 * 8]
    assert all(row["steps"] == 6 and row["median_ms"] > 0 for row in rows)
    assert [row["loader"] for row in loaders[::3]] == ["sleep", "zlib", "numpy", "python"]
    assert all(row["steps"] == 2 and row["loader_ms"] > 0 for row in loaders)


def check_batches(rows):
    by_contender = {row["contender"]: row for row in rows}
    assert list(by_contender) == ["equal lengths", "DistributedSampler", "buckets of a rank",
                                  "buckets of all ranks", "TokenBatches"]
    equal, padded, *_, ours = by_contender.values()
    assert equal["padding_percent"] == equal["idle_beyond_equal"] == 0
    assert padded["over_distributed"] == 1 and padded["padding_percent"] > 5
    for name in "buckets of a rank", "buckets of all ranks", "TokenBatches":
        assert by_contender[name]["padding_percent"] < padded["padding_percent"]
    for row in rows:
        assert row["steps"] == 4 and row["tokens_per_s"] > 0 and 0 < row["idle_percent"] < 100
        assert row["samples_per_step"] == 8 or row is ours


def check_local(rows):
    by_method = {row["method"]: row for row in rows}
    assert list(by_method) == list(local.NAMES)
    assert by_method.pop("alone")["bits_per_byte"] is None
    assert by_method["dense"]["bits_over_dense"] == 0
    for name, row in by_method.items():
        assert row["steps"] == 4 and row["seeds"] == 2 and row["samples_per_s"] > 0
        assert row["grid_rates"] == [1e-3, 3e-3, row["learning_rate"]], "the others at the best one"
        assert min(row["grid_bits"][:2]) == row["grid_bits"][row["learning_rate"] == 3e-3]
        assert row["curve_steps"] == [2, 4] and row["curve_s"] == sorted(row["curve_s"])
        assert 0 < row["curve_bytes"][0] < row["curve_bytes"][1] and row["bits_per_byte"] < 8.6
        assert row["exposed_ms"] > 0 and row["straggler"] == [0.001, 0.5]
    # Every other step; as eight bits instead of 32.
    assert 7 < by_method["diloco"]["fewer_bytes"] < 9 < 2 + by_method["localsgd"]["fewer_bytes"]


def check_reducers(rows):
    assert [row["reducer"] for row in rows] == ["alone", *METHODS]
    alone, dense, *compressed = rows
    assert alone["bits_per_byte"] is None and alone["over_alone"] == dense["over_dense"] == 1
    for row in rows:
        assert row["steps"] == 4 and row["seeds"] == 1 and row["median_ms"] > 0
        if row is not alone:
            assert row["curve_steps"] == [1, 2, 3, 4] and row["bits_per_byte"] < 8.6
            assert 0 <= row["target_bits"] - dense["curve_bits"][3] < 0.01
    assert min(row["compression_ratio"] for row in compressed) > 1.9
    assert min(row["decode_ms"] for row in compressed) > 0
    assert abs(rows[2]["bits_over_dense"]) < 0.01, "what is cast differs little"


def test_updates(tmp_path):
    path = tmp_path / "out.json"
    assert main("updates", updates.declare, ["--elements", "20K", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["optimizer"], row["bytes"]) for row in rows] == [
        ("sgd", 12), ("momentum", 20), ("adamw", 28), ("lars", 20), ("lamb", 36)]
    assert all(row["GBps"] > 0 and row["of_a_copy"] > 0 for row in rows)


def test_codecs(capsys, tmp_path):
    needed("numba")
    path = tmp_path / "out.json"
    assert main("codecs", codecs.declare, ["--elements", "20K", "--json", str(path)]) == 0
    content = json.loads(path.read_text())
    assert {"cpu", "numpy", "elements"} <= content["environment"].keys()
    title, _, *rows = capsys.readouterr().out.splitlines()
    assert "20,000 float32" in title and "by numba" in title
    rates = {row.split()[0]: [float(cell) for cell in row.split()[1:] if cell[0].isdigit()]
             for row in rows}
    assert list(rates) == ["float16", "bfloat16", "int8", "sign", "largest"]
    assert all(rate > 0 for each in rates.values() for rate in each)
    assert [row["codec"].split()[0] for row in content["rows"]] == list(rates)


def test_codecs_on_a_simulated_gpu(monkeypatch, tmp_path):
    simulated_gpu.installed(monkeypatch)
    path = tmp_path / "codecs.json"
    assert codecs.run(Namespace(device="cuda", elements=300, json=str(path))) == 0
    for row in json.loads(path.read_text())["rows"]:
        assert row.pop("codec") and len(row) == 4 and all(share > 0 for share in row.values())


ABOUT, REDUCING = {"ranks": 4}, Namespace(settled=2, target_loss=None)
NAN = float("nan")


def of_local(method, step, bits=(), rate=0.1, seed=1, **costs):
    labels = {"method": method, "parameters": 13_000_000, "optimizer": "adamw", "seed": seed,
              "batch": 2, "learning_rate": rate}
    cost = {"sent_bytes": 80, "host_bytes": 100, "exposed_s": 0.25} | costs
    return Measurement(labels, {
        "step": [9 * step, step, 3 * step], "bits": list(bits), "validated": [1, 3][:len(bits)],
        "sent": [1e6, 3e6][:len(bits)],
        **({key: [value] for key, value in cost.items()} if bits else {})})


LOCALLY = [of_local("alone", 0.5), of_local("dense", 1.0, [7.0, 4.5]),
           of_local("diloco", 0.75, [8.0, NAN]), of_local("dense", 1.0, [6.0, 4.0], 0.2),
           of_local("diloco", 0.5, [8.0, 4.0], 0.2, sent_bytes=4, host_bytes=10),
           of_local("dense", 1.0, [6.0, 5.0], 0.2, 2),
           of_local("diloco", 1.0, [8.0, 4.5], 0.2, 2, sent_bytes=4, host_bytes=10)]


def test_rows_of_local_training():
    alone, dense, diloco = local.rows(LOCALLY, ABOUT, REDUCING)
    assert [row["seeds"] for row in (alone, dense, diloco)] == [1, 2, 2]
    assert dense["learning_rate"] == diloco["learning_rate"] == 0.2
    # The mean of settled steps: some of them talk, others do not.
    assert alone["step_ms"] == 1500 and dense["step_ms"] == 3000 and diloco["step_ms"] == 2250
    assert diloco["speedup"] == pytest.approx(4 / 3) and diloco["over_alone"] == 1.5
    assert dense["samples_per_s"] == pytest.approx(4 * 2 / 3)
    assert diloco["exposed_ms"] == 250 and diloco["exposed_percent"] == pytest.approx(100 / 9)
    assert dense["fewer_bytes"] == dense["wire_ratio"] == 1
    assert diloco["fewer_bytes"] == 20 and diloco["wire_ratio"] == 10
    assert dense["target_bits"] == 4.5 and diloco["times_faster"] == pytest.approx(4 / 3)
    assert diloco["grid_rates"] == [0.1, 0.2, 0.2] and diloco["grid_seeds"] == [1, 1, 2]
    assert diloco["grid_bits"][1:] == [4.0, 4.5] and alone["grid_bits"] == []
    assert alone["exposed_ms"] != alone["exposed_ms"]


@pytest.mark.parametrize("name", [
    "batches", "clusters", "codecs", "local", "muon", "plot", "prefetch", "reducers", "updates"])
def test_help_needs_no_mpi(capsys, monkeypatch, name):
    status, text = shown_by(capsys, monkeypatch, name, "--help")
    assert status == 0 and "usage: " in text


def shown_by(capsys, monkeypatch, name, *words):
    """Return the exit status and what is printed where there is no MPI library."""
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    status = status_of(main, name, importlib.import_module(f"benchmarks.{name}").declare, words)
    return status, "".join(capsys.readouterr())


@pytest.mark.parametrize(("words", "message"), [
    ("prefetch --contenders gloo", "unrecognized arguments: --contenders"),
    ("prefetch --work zlib", "--work needs --loader SHARE"),
    ("prefetch --loader 1 --work disk", "'disk': expected some of sleep, zlib, numpy, python"),
    ("reducers --seeds 1,-2", "argument --seeds: '-2': expected 0 or more"),
    ("reducers --steps 5 --warmup-steps 5",
     "--steps 5 is too few: the first 5 are not measured, with --warmup-steps 5"),
    ("local --methods dense,gossip", "'gossip': expected some of alone, dense"),
    ("local --staleness some", "argument --staleness: 'some': expected 0 or more"),
    ("local --straggler 30ms", "'30ms': expected a time and a share of the steps, as 30ms,0.25"),
    ("local --straggler soon,0.25", "argument --straggler: time 'soon': expected a number"),
    ("local --every 4 --delay 4", "expected at most --every 4 fragments, and a shorter delay"),
])
def test_bad_options(capsys, monkeypatch, words, message):
    status, text = shown_by(capsys, monkeypatch, *words.split())
    assert status == 2 and message in text, text


def test_settings_of_other_methods_do_not_matter():
    from benchmarks import local, parse
    options = parse("local", local.declare, "--methods dense,diloco --every 3".split())
    assert local.complete(options).every == 3 < options.fragments
