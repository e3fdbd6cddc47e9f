"""Tests that traces of all ranks are joined on one clock, and where the time of a step is seen."""

import json
import math
import pickle
import re

import pytest
from jobs import run
from launching import PROGRAMS, launch, needed
from traces import metadata, piece, written

from mpiring.__main__ import main
from mpiring.tools.trace.budget import (
    Activity, LastCall, Step, TracedOperation, Wait, budgets_of, last_calls, mean, typical, union)
from mpiring.tools.traces import open_job
from mpiring.tools.trace.lateness import Lateness

TRACED = PROGRAMS / "traced.py"


def test_the_drift_of_a_clock_is_taken_out(tmp_path):
    written(tmp_path, piece("wait", 500_000, 500_100), drift=0, size=2)
    written(tmp_path, piece("wait", 500_200, 500_300), drift=400, rank=1, size=2, offset=7e9)
    job = open_job(str(tmp_path), None)
    starts = [event["ts"] for trace in job.ranks for event in trace.events() if "ts" in event]
    assert starts == pytest.approx([500_000, 500_000], abs=0.2)
    assert job.caption.endswith("2 ranks on 1 node, clocks within 5 µs") and not job.warnings


def test_what_is_missing_is_told(tmp_path, capsys):
    path = written(tmp_path, piece("step", 0, 1000, tid=0, step=1),
                   piece("step", 1000, 2000, tid=0, step=2), rank=1, size=4)
    path.write_text(path.read_text()[:-30])
    (tmp_path / "trace-20260101-000000-aaaa-rank00003.json").write_text("[\n")
    assert main(["trace", "merge", str(tmp_path)]) == 0
    said = capsys.readouterr().err
    assert "rank00003.json does not say whose trace it is" in said
    assert "3 of 4 ranks have left no trace, the first is rank 0" in said
    assert "1 traces have no end, the first is" in said and "rank00001.json" in said
    merged = json.loads((tmp_path / "merged-20260101-000000-aaaa.json").read_text())
    assert [event["ts"] for event in merged["traceEvents"] if "ts" in event] == [0], "not the cut"
    assert len(merged["otherData"]["warnings"]) == 3


def test_forged_traces_are_left_out_and_links_not_followed(tmp_path, capsys):
    (tmp_path / "victim").write_text("precious")
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "merged-20260101-000000-aaaa.json").symlink_to(tmp_path / "victim")
    written(folder, piece("step", 0, 1000, tid=0, step=1), drift=0)
    (folder / "trace-x-rank00001.json").write_text(json.dumps(
        metadata(1, "mpiring", job="x/../../victim", rank=1, size=2, node=0)))
    (folder / "trace-x-rank00002.json").write_text("[" * 10**5)
    assert main(["trace", "merge", str(folder)]) == 2
    said = capsys.readouterr().err
    assert "cannot be written: it is a symbolic link" in said
    for rank in (1, 2):
        assert f"rank0000{rank}.json does not say whose trace it is" in said
    assert (tmp_path / "victim").read_text() == "precious"


def test_jobs_are_not_mixed(tmp_path, capsys):
    assert main(["trace", "report", str(tmp_path)]) == 2
    assert "there are no traces; set MPIRING_TRACE=" in capsys.readouterr().err
    for job in ("20260101-000000-aaaa", "20260102-000000-bbbb"):
        written(tmp_path, piece("step", 0, 1000, tid=0, step=1), job=job, drift=0)
    assert main(["trace", "report", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "aaaa (1 of 1 ranks); 20260102-000000-bbbb" in said and "--job NAME" in said
    assert main(["trace", "report", str(tmp_path), "--job", "20260102"]) == 0
    assert "# job 20260102-000000-bbbb: 1 rank on 1 node" in capsys.readouterr().out
    assert main(["trace", "merge", str(tmp_path), "--job", "20260102", "-o", "-"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["traceEvents"] and "standard output: " in shown.err
    written(tmp_path, job="20260103-000000-cccc", drift=0)
    assert main(["trace", "report", str(tmp_path), "--job", "20260103"]) == 2
    assert "it has no training steps" in capsys.readouterr().err
    assert main(["trace", "report", str(tmp_path), "--job", "20260101", "--step", "9"]) == 2
    assert "rank 0 has steps 1 to 1" in capsys.readouterr().err


def test_the_reducers_of_all_models_are_told(tmp_path, capsys):
    def model(names, reducers, **more):
        return metadata(0, "model", tensors=[[name, [3], "float32"] for name in names],
                        overlap=True, reducers=reducers, **more)

    step = piece("step", 0, 1000, tid=0, step=1)
    mixed = ["Mean()", "TopK(density=0.01)"]
    # The last event of rank 0 is of an older version. Rank 1 has trained a model alone.
    written(tmp_path, step, model("ab", ["Mean()"], nodes=1), model("cd", mixed, nodes=1),
            model("cd", mixed, nodes=2), model("efgh", mixed, nodes=2),
            metadata(0, "model", tensors=[], overlap=True), size=2, drift=0)
    written(tmp_path, step, model("cd", mixed, nodes=2), model("i", ["Cast('float16')"]),
            rank=1, size=2, drift=0)
    assert main(["trace", "report", str(tmp_path)]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line[0:1] == "#"][1:] == [
        "# Reducers of a, b: Mean()",
        "# Reducers of c, d: Mean(), TopK(density=0.01); on one node, nothing is compressed",
        "# Reducers of c, d, e, and 3 more: Mean(), TopK(density=0.01)",
        "# Reducers of i: Cast('float16')"]


def test_a_budget_adds_up():
    operations = [TracedOperation(100, 400, 0, "a", "ring", 8, ("", 1)),
                  TracedOperation(300, 900, 1, "b", "ring", 8, ("", 2))]
    waits = [Wait(600, 900, ("", 2)), Wait(1500, 1600, ("", 3))]
    steps = [Step(1, 0, 1000, 30), Step(2, 1000, 2000, 40)]
    activity = Activity(0, steps, waits, operations, data=[(950, 1050), (350, 450)])
    called = {("", 2): LastCall(700.0, 1), ("", 3): LastCall(0.0, 0)}
    first = budgets_of(activity, steps[:1], called)[1]
    assert vars(first) == pytest.approx(
        {"step": 1.0, "compute": 0.55, "data": 0.15, "exposed": 0.2, "idle": 0.1, "hidden": 0.4,
         "tokens": 30})
    assert first.hidden_percent == pytest.approx(100 * 4 / 7)
    both = budgets_of(activity, steps, {("", 2): LastCall(5000.0, 1)})
    assert list(both) == [1, 2]
    assert vars(mean(list(both.values()))) == pytest.approx(
        {"step": 1.0, "compute": 0.7, "data": 0.1, "exposed": 0.05, "idle": 0.15, "hidden": 0.2,
         "tokens": 35})


def test_the_last_rank_to_call_is_waited_for(tmp_path):
    for rank, queued in ((0, 50), (1, 10)):
        written(tmp_path, piece("operation", 100, 200, sequence=4, group="", queued_us=queued),
                rank=rank, size=2, drift=0)
    assert last_calls(open_job(str(tmp_path), None)) == {("", 4): (90.0, 1)}


def test_steps_that_hold_something_else_are_left_out():
    steps = [Step(n, 100 * n, 100 * n + length) for n, length in enumerate([90, 50, 52, 120, 54])]
    assert [step.number for step in typical(steps)] == [1, 2, 4]
    assert [step.number for step in typical(steps[:1])] == [0]
    assert union([(5, 6), (0, 2), (1, 3), (7, 7)]) == [(0, 3), (5, 6)]


def told(*ranks):
    """Return what is said of ranks, each a list of steps: (compute, data, tokens), in ms.

    In each step all wait for the last one, from 0 ms on, at the step's only operation.
    """
    lengths = [max(compute + data for compute, data, _ in step) for step in zip(*ranks)]
    began = [1e3 * sum(lengths[:number]) for number in range(len(lengths))]
    last_called = {}
    for number, step in enumerate(zip(*ranks)):
        at = [compute + data for compute, data, _ in step]
        last_called["", number] = LastCall(began[number] + 1e3 * max(at), at.index(max(at)))
    lateness = Lateness(last_called)
    for rank, steps in enumerate(ranks):
        activity = Activity(rank)
        for number, (compute, data, tokens) in enumerate(steps):
            start, end = began[number], began[number] + 1e3 * lengths[number]
            activity.steps.append(Step(number, start, end, tokens))
            activity.data.append((start, start + 1e3 * data))
            activity.waits.append(Wait(start + 1e3 * (compute + data), end, ("", number)))
        lateness.add(activity, activity.steps,
                     budgets_of(activity, activity.steps, last_called))
    return list(lateness.sentences())


def test_who_is_waited_for_is_told_and_why():
    even = [(100, 0, math.nan)] * 8
    assert told(even) == told(even, even, even) == []
    assert told(even, [(104, 0, math.nan)] * 8) == [], "too little"
    assert told(even, *[[(100 + 4 * (number % 3 == rank), 4, 50) for number in range(8)]
                        for rank in range(3)]) == []
    assert told(even, even, [(80, 45, math.nan)] * 8) == [
        "rank 2 waits for its data, 36 % of its step",
        "others wait for rank 2, 20 % of their step: it waits for its data (45.0 ms; the mean is "
        "15.0 ms)"]
    assert told([(60, 40, 5)] * 8, [(60, 40, 5)] * 8) == [
        "ranks 0-1 wait for their data, 40 % of their step, rank 0 the longest, 40 %"]
    assert told(even, [(150, 0, math.nan)] * 8) == [
        "others wait for rank 1, 33 % of their step: it computes longer (150 ms; the mean is 125 "
        "ms); model.weigh(tokens) would show whether its batches are longer"]
    of_100 = [(100, 0, 100)] * 8
    assert told(of_100, [(150, 0, 150)] * 8) == [
        "others wait for rank 1, 33 % of their step: it has longer batches (150 tokens; the mean "
        "is 125), which mpiring.data.TokenBatches would even out"]
    assert told(of_100, [(150, 0, 100)] * 8) == [
        "others wait for rank 1, 33 % of their step: it computes longer, also per token (1.20 "
        "times the mean)"]


def test_ranks_that_are_late_in_turn_are_not_named():
    for ranks in (2, 4):
        turns = [[(160 if number % ranks == rank else 100,) * 3 for number in range(8)]
                 for rank in range(ranks)]
        turns = [[(compute, 0, tokens) for compute, _, tokens in steps] for steps in turns]
        share, mean_tokens = {2: (19, 130), 4: (28, 115)}[ranks]
        assert told(*turns) == [
            f"ranks wait for one another in turn, {share} % of their step: each time for one that "
            f"has longer batches (160 tokens; the mean is {mean_tokens}), which "
            f"mpiring.data.TokenBatches would even out"]
    by_chance = [0, 1, 2, 3, 1, 1, 2, 0, 3, 1, 2, 1, 0, 1]
    (sentence,) = told(*[[(160 if rank == late else 100, 0, math.nan) for late in by_chance]
                         for rank in range(4)])
    assert sentence.startswith("ranks wait for one another in turn"), "rank 1 in 6 of 14 steps"
    turns[0] = [(250, 0, 250)] * 8
    (first,) = told(*turns)
    assert first.startswith("others wait for rank 0, 54 % of their step: it has longer batches")


@pytest.mark.launch
@pytest.mark.any_mpi
def test_a_traced_job_shows_overlap_and_who_is_waited_for(tmp_path, capsys):
    needed("matplotlib")
    # The first job that compiles may wait for that on a busy machine, which is no part of this.
    ended = run(2, TRACED, "close", MPIRING_TRACE=str(tmp_path), MPIRING_STALL_WARNING_S="0",
                MPIRING_REDUCER="bf16")
    assert ended.status == 0 and not ended.output, ended.output
    assert main(["trace", "merge", str(tmp_path), "-o", str(tmp_path / "all.json")]) == 0
    events = [event for event in json.loads((tmp_path / "all.json").read_text())["traceEvents"]
              if event["ph"] == "X"]
    for rank in (0, 1):
        of_rank = [event for event in events if event["pid"] == rank]
        buckets = [event for event in of_rank if event["name"] == "bucket 0"]
        assert len(buckets) == 12
        assert all(bucket["args"]["bytes"] > 60_000 and bucket["args"]["algorithm"] == "shared"
                   for bucket in buckets)
        assert sum(event["cat"] == "step" for event in of_rank) == 11
    capsys.readouterr()
    assert main(["trace", "report", str(tmp_path), "--plot", str(tmp_path / "a.png")]) == 0
    said = capsys.readouterr().out
    assert ("Reducers of w0, w1, w2, and 1 more: Cast('bfloat16'); on one node, nothing is "
            "compressed") in said.replace("\n#  ", "")
    rows = {row[0]: [float(cell) for cell in row[1:]] for row in map(
        str.split, said.splitlines()) if row and re.fullmatch(r"\d|mean", row[0])}
    for steps, step, compute, data, exposed, idle, *_ in rows.values():
        # Very long ones do not count; half of the ten cannot be.
        assert steps >= 5 and step == pytest.approx(compute + data + exposed + idle, rel=0.01)
    assert [rows[name][-1] for name in ("0", "1", "mean")] == [15, 20, 17.5]
    assert rows["0"][6] > 0, "buckets are reduced while the program computes"
    assert rows["1"][3] > 19 and rows["0"][5] > rows["1"][5], "rank 0 waits for the other one"
    assert re.search(r"^rank 1 waits for its data, \d+ % of its step$", said, re.MULTILINE)
    assert re.search(r"^others wait for rank 1, \d+ % of their step: it waits for its data \(",
                     said, re.MULTILINE)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.launch
@pytest.mark.any_mpi
@pytest.mark.parametrize("end", ["raises", "killed"])
def test_a_job_that_dies_leaves_what_it_did_last(tmp_path, capsys, end):
    ended = launch(2, TRACED, end, MPIRING_TRACE=str(tmp_path))
    assert ended.status != 0
    if end == "raises":
        assert "the last operations of rank 1, by its clock (more in " in ended.output
        assert re.search(r"#\d+ reduce Mean\(\) of float32 \(\d+,\) in step 11 bucket 1",
                         ended.output)
        (kept,) = tmp_path.glob("flight-*-rank00001")
        assert len(pickle.loads(kept.read_bytes())["entries"]) > 30
    assert main(["trace", "report", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "traces have no end" in captured.err
    assert re.search(r"^1 +([5-9]|10) ", captured.out, re.MULTILINE)
