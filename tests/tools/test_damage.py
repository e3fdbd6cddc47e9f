"""Tests that edited, damaged and foreign files end in one line that names the file."""

import argparse
import copy
import gzip
import importlib
import json
import os
from pathlib import Path

import pytest
from checkpointing import as_pipe
from hypothesis import HealthCheck, given, settings, strategies
from launching import needed, python, status_of
from traces import metadata, piece, written

from mpiring.__main__ import _COMMANDS, main

VALUES = (None, True, -1, 0, 0.5, 10**13, 10**400, -10**16, float("nan"), float("inf"), 1e-320, "",
          "7", "$a^", "\ud800", "\x1b[1m", [], [0], [[[]]], {}, {"a": 1})
TENSORS = [["first", [100, 5], "float32"], ["last", [5], "float32"]]
# A trace with each kind of line.
LINES = [
    metadata(0, "model", tensors=TENSORS, overlap=True, reducers=["Mean()"], nodes=1),
    *(event for number in range(3) for event in (
        piece("phase", 1e5 * number, 1e5 * number + 10, name="optimizer"),
        piece("data", 1e5 * number + 20, 1e5 * number + 30),
        piece("phase", 1e5 * number + 100, 1e5 * number + 200, name="forward"),
        piece("operation", 1e5 * number + 500, 1e5 * number + 900, tid=100, sequence=number),
        piece("wait", 1e5 * number + 700, 1e5 * number + 900, sequence=number),
        piece("ready", 1e5 * number + 300, 1e5 * number + 400, at_us=[100, 0]),
        piece("step", 1e5 * number, 1e5 * number + 1e3, step=number, tokens=5)))]


def paths_in(value, path=()):
    """Yield the path of each field and item."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield (*path, key)
        if isinstance(value[key], dict | list):
            yield from paths_in(value[key], (*path, key))


def edited(entry, path, value):
    """Return a copy in which a field has another value; without the field for KeyError."""
    entry = copy.deepcopy(entry)
    *above, last = path
    place = entry
    for key in above:
        place = place[key]
    if value is KeyError:
        del place[last]
    else:
        place[last] = value
    return entry


SIZES = {"contender": "mpiring auto", "thread_level": "multiple", "bytes": 1 << 20,
         "buffer": "empty", "median_us": 10.0}
# A row of each benchmark that is drawn.
ROWS = {
    "allreduce": {**SIZES, "dtype": "float32", "limit_us": 5.0, "this_over_limit": 2.0,
                  "busbw_GBps": 1.0},
    "latency": {**SIZES, "test": "allreduce", "native_over_this": 2.0},
    "overlap": {"contender": "mpiring", "compute": "numpy", "compute_ms": 1.0, "total_ms": 2.0,
                "communication_ms": 1.5, "overlap_percent": 50.0},
    "steps": {"contender": "mpiring", "model": "mlp", "parameters": 1000, "median_ms": 2.0,
              "efficiency_percent": 80.0, "hidden_percent": 20.0},
    "reducers": {"reducer": "int8", "median_ms": 2.0, "over_alone": 1.5},
    "simulate": {"nodes": 2, "algorithm": "ring", "selected": True, "ms": 2.0, "limit_ms": 1.0,
                 "efficiency_percent": 50.0}}
ABOUT = {"cluster": "a cluster", "ranks": 4, "nodes": 2, "cores": 2, "cpu": "A CPU",
         "mpi_library": "MPICH", "placement": [{"host": "a"}]}


def results(benchmark):
    rows = [ROWS[benchmark], {**ROWS[benchmark], "bytes": 8, "nodes": 4}]
    return {"benchmark": benchmark, "environment": ABOUT, "rows": rows}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


def ends_well(capsys, path, *words):
    """Run a command on a file that may be damaged; an error must name the file."""
    status = main([*map(str, words)])
    said = capsys.readouterr().err
    assert status == 0 or status == 2 and said.startswith("mpiring: ") and str(path) in said, said
    assert "Traceback" not in said
    return status, said


def commands_on(folder):
    return [("trace", "report", folder), ("trace", "merge", folder),
            ("simulate", "step", "--nodes", "2", "--ranks-per-node", "1", "--trace", folder)]


CASES = strategies.tuples(strategies.sampled_from((KeyError, *VALUES)), strategies.data())
LIMITED = settings(max_examples=60, deadline=None, derandomize=True,
                   suppress_health_check=[HealthCheck.function_scoped_fixture])


@LIMITED
@given(CASES)
def test_an_edited_trace_is_no_traceback(folder, capsys, case):
    value, data = case
    events = [json.loads(line.strip(",")) for line in written(
        folder, *LINES, size=2, drift=3.0).read_text().splitlines()[1:-1]]
    number = data.draw(strategies.integers(0, len(events) - 1))
    path = data.draw(strategies.sampled_from([*paths_in(events[number])]))
    events[number] = edited(events[number], path, value)
    written(folder, *LINES, rank=1, size=2, node=1, drift=3.0)
    file = folder / "trace-20260101-000000-aaaa-rank00000.json"
    file.write_text("[\n" + ",\n".join(map(json.dumps, events)) + "\n]\n")
    for words in commands_on(folder):
        ends_well(capsys, folder, *words)


@LIMITED
@given(strategies.sampled_from([*ROWS]), CASES)
def test_edited_results_are_no_traceback(folder, capsys, benchmark, case):
    value, data = case
    content, file = results(benchmark), folder / "results.json"
    path = data.draw(strategies.sampled_from([*paths_in(content)]))
    file.write_text(json.dumps(edited(content, path, value)))
    needed("matplotlib")
    # Drawing takes most of the time; what it needs is checked before.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: None)
        ends_well(capsys, file, "bench", "plot", file, folder / "x.svg")
    if benchmark == "allreduce":
        ends_well(capsys, file, "simulate", "--against", file)


def as_sparse(path):
    os.truncate(path, 20 << 30)


def as_folder(path):
    path.unlink()
    path.mkdir()


def as_link_to_nothing(path):
    path.unlink()
    path.symlink_to("nowhere")


def as_link_to_itself(path):
    path.unlink()
    path.symlink_to(path.name)


def with_content(content):
    return lambda path: path.write_bytes(content)


TORCH = b'{\n  "schemaVersion": 1,\n  "traceEvents": [\n{"ph": "X", "name": "aten::add"}]}\n'
HOROVOD = (b'[\n{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "t"}},\n'
           b'{"ph": "B", "name": "ALLREDUCE", "ts": 5, "pid": 0},\n')
FOREIGN = {
    "empty": with_content(b""), "binary": with_content(bytes(range(256)) * 40),
    "zeros": with_content(bytes(10**6)), "gzip": with_content(gzip.compress(TORCH)),
    "nested": with_content(b"[" * 10**5), "PyTorch's": with_content(TORCH),
    "Horovod's": with_content(HOROVOD), "a list": with_content(b"[1, 2]\n"),
    "a string": with_content(b'"x"\n'), "UTF-16": with_content("[]\n{}".encode("utf-16")),
    "sparse": as_sparse, "a folder": as_folder, "a pipe": as_pipe,
    "a dangling link": as_link_to_nothing, "a link to itself": as_link_to_itself}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_files_are_named(tmp_path, capsys, kind):
    path = written(tmp_path, *LINES, drift=3.0)
    FOREIGN[kind](path)
    for words in commands_on(tmp_path):
        assert ends_well(capsys, path, *words)[0] == 2
    for words in (("bench", "plot", path, tmp_path / "x.svg"), ("simulate", "--against", path)):
        assert ends_well(capsys, path, *words)[0] == 2
    for name in ("list", "show", "verify", "consolidate"):
        words = [tmp_path / "out"] * (name == "consolidate")
        status = main(["checkpoint", name, str(path), *map(str, words)])
        said = capsys.readouterr()
        assert status in (1, 2) and str(path) in said.out + said.err or kind == "a folder"


def test_a_trace_is_refused_where_it_is_damaged(tmp_path, capsys):
    """Lines at the end may be cut, others may not; an earlier file stays."""
    path = written(tmp_path, *LINES, drift=3.0)
    merged = tmp_path / "merged-20260101-000000-aaaa.json"
    merged.write_text("earlier")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:9], lines[9][:20] + "\n", *lines[10:]]))
    status, said = ends_well(capsys, path, "trace", "merge", tmp_path)
    assert status == 2 and f"{path}, line 10: it is not JSON" in said
    assert merged.read_text() == "earlier"
    path.write_text("".join([*lines[:9], lines[9][:20]]))
    assert main(["trace", "merge", str(tmp_path)]) == 0 and "have no end" in capsys.readouterr().err


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 3), (2, 2), (1, 10**9)])
def test_ranks_of_other_jobs_are_not_mixed(tmp_path, capsys, rank, size):
    written(tmp_path, *LINES, size=2, drift=0)
    path = written(tmp_path, *LINES, rank=rank, size=size, drift=0)
    other = path.rename(tmp_path / "trace-copy-rank00009.json")
    written(tmp_path, *LINES, size=2, drift=0)
    for words in commands_on(tmp_path):
        _, said = ends_well(capsys, other, *words)
        assert ("one job cannot have written both" if rank < size else "is left out") in said


def actions(parser):
    """Yield the words of each command, and its arguments."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                for words, arguments in actions(command):
                    yield [name, *words], arguments
        elif action.type not in (None, Path) and action.help != argparse.SUPPRESS:
            yield [], action


def options():
    for name in _COMMANDS:
        parser = argparse.ArgumentParser()
        importlib.import_module(f"mpiring.tools.{name}.command").declare(parser)
        for words, action in actions(parser):
            yield pytest.param(action.type, id=" ".join([name, *words, action.option_strings[0]]))


@pytest.mark.parametrize("parse", [*options()])
def test_each_number_on_the_command_line_has_limits(parse):
    """Others than argparse's errors would be tracebacks."""
    for text in ("", "x", "-1", "-1s", "nan", "inf", "-inf", "1e400", "9" * 400, "9" * 5000,
                 f"{'9' * 400}G", f"{'9' * 400}s", f"{'9' * 400}gbit", "²", "0x10", "1,,2", "\0"):
        with pytest.raises((argparse.ArgumentTypeError, ValueError, TypeError)):
            parse(text)


@pytest.mark.parametrize("words", [
    "--nodes 1000000000", "--nodes 1,2,1000000000", "--ranks-per-node 2147483647 --nodes 1",
    "--goodput 7", "--goodput 1.01", "--size 1000000G", "--size 65G", "--cores 1000000000",
    "--burst 2G", "--bandwidth 0.001kbit"])
def test_what_would_take_hours_is_refused_at_once(capsys, words):
    status = status_of(main, ["simulate", *words.split()])
    said = capsys.readouterr().err
    assert status == 2 and "expected " in said.splitlines()[-1]


@pytest.mark.parametrize("words", [
    "--latency 0us --message-overhead 0us --node-latency 0us --barrier 0us --size 1 --nodes 2",
    "--latency 1000000s --size 1 --nodes 2", "--burst 1G --size 8 --nodes 2 --ranks-per-node 1",
    "--bandwidth 0.008kbit --nodes 2", "--bandwidth 1000000GB/s --node-bandwidth 1000000GB/s "
    "--reduction-rate 1000000GB/s --barrier 1000000s --nodes 1 --ranks-per-node 2 --size 1"])
def test_the_limits_themselves_can_be_simulated(capsys, words):
    assert main(["simulate", *words.split()]) == 0 and "Traceback" not in capsys.readouterr().err


def test_text_that_the_terminal_cannot_show(tmp_path):
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    written(folder, *LINES, drift=3.0)
    ended = python("-m", "mpiring", "trace", "merge", folder, PYTHONIOENCODING="ascii")
    assert ended.returncode == 0 and "\\udcff" in ended.stdout, ended.stderr


def test_too_little_memory_is_a_line(monkeypatch, capsys):
    def exhausted(options):
        raise MemoryError("Unable to allocate 8.00 TiB")

    monkeypatch.setattr("mpiring.tools.simulate.command.cluster_of", exhausted)
    assert main(["simulate"]) == 2
    assert capsys.readouterr().err == (
        "mpiring: there is not enough memory: Unable to allocate 8.00 TiB\n")


@pytest.mark.parametrize("content", [b"", b"\xff", b"[1]", b'["x", 1, "1gbit"]', b"3"])
def test_the_record_of_a_lab_may_be_damaged(tmp_path, monkeypatch, capsys, content):
    path = tmp_path / "lab.json"
    path.write_bytes(content)
    monkeypatch.setattr("mpiring.tools.lab.lab._RECORD", path)
    assert ends_well(capsys, path, "lab", "status")[0] == 2
