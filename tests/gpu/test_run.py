"""Tests `run.py` and its programs without a GPU, and runs a simulated GPU that takes only time."""

import json
import re
import runpy
import time
from pathlib import Path

import cupy_or_host
import pytest
from launching import HANG_S, ROOT, launch, needed, python

RUN, STEPS = (Path(__file__).with_name(name) for name in ("run.py", "training_steps.py"))
# Runs programs with one option more than they know, and prints their exit statuses.
PROGRAMS = """
import json, runpy, sys
for words in json.loads(sys.argv[1]):
    run = runpy.run_module if words[0] == "-m" and words.pop(0) else runpy.run_path
    sys.argv = [*words, "--last"]
    try: run(words[0], run_name="__main__")
    except SystemExit as end: print(end.code)
"""


@pytest.fixture(scope="module")
def run():
    return runpy.run_path(str(RUN), run_name="run")


@pytest.fixture(scope="module")
def steps(run):
    return run["chosen"]([], Path("out"))


def test_every_program_and_test_file_exists(steps):
    named = [word for step in steps for word in step.command
             if word.startswith(("tests/", "examples/"))]
    assert len(named) > 20 and not [word for word in named if not (ROOT / word).exists()]


def test_every_benchmark_knows_its_options(steps):
    needed("torch")
    commands = {step.command[:4]: step.command for step in steps
                if step.command[:2] in (("-m", "mpiring"), ("-m", "benchmarks.prefetch"),
                                        ("-m", "benchmarks.codecs"))
                or step.command[0].startswith("tests/gpu/")}
    assert len(commands) >= 9
    # In one process, because most of them load PyTorch.
    ended = python("-c", PROGRAMS, json.dumps([*commands.values()]))
    # argparse names all options that it does not know.
    errors = re.findall("error: (.*)", ended.stderr)
    assert set(errors) == {"unrecognized arguments: --last"}, ended.stderr
    assert ended.stdout.split() == len(errors) * ["2"] == len(commands) * ["2"]


@pytest.mark.launch
@pytest.mark.any_mpi
def test_the_overhead_of_staged_copies_is_estimated():
    ended = launch(2, ROOT / "tests/helpers/timed_gpu.py", "--mib", "4")
    assert re.search(r"4 MiB on 2 ranks: [\d.]+ ms; copies alone 0\.17 ms", ended.output)


@pytest.mark.launch
@pytest.mark.any_mpi
def test_barriers_are_measured(monkeypatch):
    cupy_or_host.installed(monkeypatch)
    ended = launch(2, ROOT / "tests/gpu/barriers.py")
    assert ended.status == 0 and ended.output.count("gpu_us") == 2, ended.output


def test_steps_are_chosen_by_name(run):
    names = [step.name for step in run["chosen"](["barriers", "look", "steps-bf16"], Path("out"))]
    assert names == ["doctor", "nvidia-smi", "mps-start", "steps-bf16", "mps-stop", "barriers"]
    with pytest.raises(ValueError, match="nothing: expected some of allreduce, "):
        run["chosen"](["nothing"], Path("out"))


def test_a_step_that_fails_stops_only_what_needs_it(run, tmp_path):
    step = run["Step"]
    steps = [step("bad", ("-c", "raise SystemExit(3)")), step("good", ("-c", "print(1)")),
             step("start", ("-c", "raise SystemExit(4)"), alone=True),
             step("under", ("-c", ""), alone=True, after="start"),
             step("without", (run["MPS"] + "-2",), needs=run["MPS"] + "-2", alone=True),
             step("last", ("-c", ""), alone=True)]
    assert not run["run_all"](steps, tmp_path, time.monotonic() + HANG_S)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {name: result["ended"] for name, result in summary.items()} == {
        "bad": "failed: status 3", "good": "passed", "start": "failed: status 4",
        "under": "left out: start did not succeed",
        "without": f"left out: no {run['MPS']}-2", "last": "passed"}
    assert run["run_all"](steps[1:2], tmp_path, time.monotonic())
    assert "no time" in json.loads((tmp_path / "summary.json").read_text())["good"]["ended"]


def test_figures_stand_beside_their_targets(run, tmp_path):
    method = {"precision": "bf16", "method": "DataParallel", "median_ms": 23.0,
              "over_compute": 1.15, "host_waits": {"cudaEventQuery": 2}}
    ddp = {"precision": "bf16", "method": "DDP over the back end", "median_ms": 20.0,
           "over_compute": 1.0}
    (tmp_path / "steps-bf16.json").write_text(json.dumps({"rows": [method, ddp]}))
    (tmp_path / "allreduce-2.json").write_text(json.dumps({"rows": [{}]}))
    lines = [" ".join(str(figure).split()) for figure in run["figures"](tmp_path)]
    assert lines == [
        "steps-bf16, DataParallel: median ms 23.000",
        "steps-bf16, DataParallel / compute only 1.150 <= 1.15 met",
        "steps-bf16, DataParallel: host waits, first gradient to optimizer 2 <= 0 MISSED",
        "cudaEventQuery 2", "steps-bf16, DDP over the back end: median ms 20.000",
        "steps-bf16, DDP over the back end / compute only 1.000",
        "steps-bf16, DataParallel / DDP over the back end 1.150 <= 1 MISSED",
        "allreduce_figures not readable: KeyError('contender')"]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_waits_of_the_host_are_counted():
    needed("torch")
    count = runpy.run_path(str(STEPS))["host_waits"]

    def event(name, ts, cat="cuda_runtime", dur=1):
        return {"ph": "X", "name": name, "ts": ts, "cat": cat, "dur": dur}

    calls = [event("cudaEventQuery", 1), event("cudaEventQuery", 6), event("cudaLaunchKernel", 7),
             event("cuStreamSynchronize", 14, "cuda_driver"), event("cudaDeviceSynchronize", 16)]
    rest = [event("torch::autograd::AccumulateGrad", ts, "cpu_op") for ts in (5, 8)]
    rest += [event("Optimizer.step#AdamW.step", 10, "user_annotation", 5), {"ph": "M"}]
    assert count({"traceEvents": calls + rest}) == {"cudaEventQuery": 1, "cuStreamSynchronize": 1}
    assert count({"traceEvents": rest}) is None


@pytest.mark.launch
@pytest.mark.any_mpi
def test_training_steps_are_measured(tmp_path, monkeypatch):
    needed("torch")
    # Compiling takes longer than all that follows.
    monkeypatch.setenv("MPIRING_MACHINE_CODE", "0")
    small = ("--device", "cpu", "--parameters", 100_000, "--batch", 1, "--json",
             tmp_path / "steps.json")
    ended = launch(2, STEPS, *small, "--bf16", "--trace", tmp_path / "trace.json.gz",
                   "--connections", 32)
    assert ended.status == 0, ended.output
    rows = json.loads((tmp_path / "steps.json").read_text())["rows"]
    assert [row["method"] for row in rows] == [
        "compute only", "DataParallel", "DDP over the back end"]
    assert all(row["median_ms"] > 0 and row["connections"] == "32" for row in rows)
    assert rows[1]["host_waits"] is None and (tmp_path / "trace.json.gz").exists()
