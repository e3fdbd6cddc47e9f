"""Tests what a rank remembers of its operations, and what it writes to a trace, without MPI."""

import gc
import io
import json
import logging
import os
import pickle
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor, wait
from unittest.mock import Mock

import numpy as np
import pytest

from mpiring import Config
from mpiring.record import trace_file as chrome
from mpiring.record.trace_file import OPERATIONS, PROGRAM, STEPS, TraceFile
from mpiring.operations.agreement import Call
from mpiring.engine.engine import Engine
from mpiring.engine.stalls import print_at_once
from mpiring.record.counter import OperationCounter
from mpiring.record.flight import Flight
from mpiring.record.recorder import CAPACITY, Recorder
from mpiring.engine.handle import Handle
from mpiring.transport.base import Task
from mpiring.transport.layout import GATE_CLOSED

pytestmark = pytest.mark.usefixtures("own_engines")


class Alone:
    """An MPI communicator of one rank."""

    rank, size = 0, 1

    def Dup(self):
        return self

    def Free(self):
        pass

    def bcast(self, value):
        return value

    def allgather(self, value):
        return [value]


def returns(x):
    yield ()
    return x


def flown(sequence, call=Call("reduce", "a mean", "bucket 3 (w, b)", 4096), **times):
    flight = Flight(call, sequence, algorithm="ring")
    for name, value in times.items():
        setattr(flight, name, value)
    return flight


@pytest.fixture
def trace(tmp_path):
    opened = TraceFile(Alone(), str(tmp_path / "new" / "folder"), 0)
    yield opened
    opened.close(together=True)


def dumped(recorder, *how):
    Engine(Config(), threaded=False, end_job=None, recorder=recorder).dump(*how)


def events_of(folder):
    (path,) = folder.rglob("trace-*.json")
    return json.loads(path.read_text())


def test_the_record_is_bounded_and_the_newest_come_last():
    recorder = Recorder(7)
    for sequence in range(3 * CAPACITY):
        recorder.add(flown(sequence))
    lines = recorder.lines()
    assert len(lines) == CAPACITY and f"#{3 * CAPACITY - 1} reduce" in lines[-1]
    head, *lines = recorder.report(2).splitlines()
    assert head == "the last operations of rank 7, by its clock:" and len(lines) == 2
    assert Recorder().report(2) == "", "there is nothing to tell"


def test_a_line_tells_how_far_an_operation_came():
    now = time.monotonic()
    states = [flown(1, called_s=now - 7), flown(2, called_s=now - 9, started_s=now - 8),
              flown(3, called_s=now - 9, started_s=now - 8.99, ended_s=now - 8.5, exposed_s=0.25)]
    clock_s = time.time() - now
    queued, stuck, done = (flight.line(now, clock_s) for flight in states)
    assert "#1 reduce a mean bucket 3 (w, b), 4,096 bytes, ring: queued for 7.0 s" in queued
    assert "NOT COMPLETE after 8.0 s" in stuck
    assert done.endswith("queued 10.0, took 490.0, waited for 250.0 ms")
    assert done[:12] == time.strftime("%H:%M:%S", time.localtime(clock_s + now - 9)) + done[8:12]
    many = flown(4, Call("reduce", "x" * 5000))
    assert len(many.line(now, 0.0)) < 250


def test_what_is_remembered_keeps_no_array():
    engine = Engine(Config(), threaded=False, end_job=print)
    lane, x = engine.join(Mock()), np.ones(3)
    flight = Flight(Call("test"), 0)
    engine.recorder.add(flight)
    handle = engine.submit(Handle(lane, flight, Task(returns(x))))
    assert handle.wait() is x and flight.ended_s >= flight.started_s >= flight.called_s > 0
    alive = weakref.ref(x)
    del handle, x
    gc.collect()
    assert alive() is None and "#0 test" in engine.recorder.lines()[0]


def test_communicators_have_names_of_their_own():
    recorder = Recorder()
    assert recorder.name(range(8)) == "", "the first one"
    assert recorder.name([0, 1, 2, 5, 7]) == "ranks 0-2,5,7"
    assert recorder.name([0, 1, 2, 5, 7]) == "ranks 0-2,5,7 (2)"
    long = {recorder.name([*range(0, 500, 2), last]) for last in (501, 503)}
    assert len(long) == 2 and all(len(name) < 60 for name in long)


def test_a_dump_is_one_write_and_names_its_file(tmp_path, trace):
    recorder, file = Recorder(), io.StringIO()
    dumped(recorder, 4, file, None)
    assert file.getvalue() == "mpiring: there were no operations yet\n"
    now = time.monotonic()
    recorder.trace = trace
    recorder.add(flown(0, started_s=now))
    dumped(recorder, 4, file, None)
    (path,) = tmp_path.rglob("flight-*-rank00000")
    assert f"(more in {path}):\n  " in file.getvalue()
    assert pickle.loads(path.read_bytes())["entries"] == [], "the group has no counter"
    trace.close(together=True)
    (stuck,) = [event for event in events_of(tmp_path) if event.get("cat") == "operation"]
    assert stuck["name"] == "bucket 3 (not complete)" and stuck["args"]["complete"] is False


def test_threads_that_save_at_once_all_name_the_file(trace):
    recorder = Recorder()
    recorder.trace = trace
    with ThreadPoolExecutor(2) as pool:
        with trace._lock:     # as if the disk were slow
            saved = [pool.submit(recorder.save) for _ in range(2)]
            wait(saved, timeout=0.2)
        assert {each.result() for each in saved} == {f" (more in {trace.flight_path})"}


def test_a_trace_has_steps_waits_and_a_lane_for_each_operation_under_way(tmp_path, trace):
    recorder, t = Recorder(), time.monotonic()
    recorder.trace = trace
    for sequence, (began, ended) in enumerate([(0, 3), (1, 4), (3.5, 5)]):
        flight = flown(sequence, called_s=t + began - 0.5, started_s=t + began)
        recorder.ended(flight, t + ended)
    recorder.waited_for_data(t + 5, t + 5.5)
    recorder.waited(flight, t + 4, t + 5)
    recorder.end_step()
    recorder.end_step(time.monotonic(), 640)
    recorder.end_step()
    trace.close(together=True)
    events = [event for event in events_of(tmp_path) if event["ph"] == "X"]
    (data,) = [event for event in events if event["cat"] == "data"]
    assert data["tid"] == PROGRAM and data["dur"] == pytest.approx(5e5, abs=1)
    operations = [event for event in events if event["cat"] == "operation"]
    assert [event["tid"] - OPERATIONS for event in operations] == [0, 1, 0]
    assert [event["dur"] for event in operations] == pytest.approx([3e6, 3e6, 1.5e6], abs=1)
    assert operations[0]["args"] == {
        "call": "reduce a mean bucket 3 (w, b)", "sequence": 0, "group": "", "bytes": 4096,
        "algorithm": "ring", "complete": True, "queued_us": pytest.approx(5e5, abs=1)}
    (wait,) = [event for event in events if event["cat"] == "wait"]
    assert wait["tid"] == PROGRAM and wait["name"] == "wait for bucket 3"
    step, other = [event for event in events if event["cat"] == "step"]
    assert step["tid"] == STEPS and step["name"] == "step 1", "the first one has no beginning"
    assert step["args"] == {"step": 1, "tokens": 640} and other["args"] == {"step": 2}


def test_memory_is_bounded(tmp_path, trace, monkeypatch):
    monkeypatch.setattr(chrome, "_MAX_EVENTS", 10)
    with trace._lock:     # as if the disk were slow
        for number in range(30):
            trace.step(number, 0, (), 0, 1, None)
        assert len(trace._events) <= 10
    trace.close(together=True)
    (left_out,) = [event for event in events_of(tmp_path) if event["name"] == "left out"]
    assert left_out["args"]["events"] == 20


@pytest.mark.parametrize("problem", ["full", "long"])
def test_a_trace_that_cannot_go_on_says_so_once(tmp_path, trace, monkeypatch, caplog, problem):
    def full(file, data):
        raise OSError(28, "No space left on device")

    if problem == "full":
        monkeypatch.setattr(os, "write", full)
    else:
        monkeypatch.setattr(chrome, "MAX_BYTES", 1000)
    for number in range(20):
        trace.step(number, 0, (), 0, 1, None)
        trace.flush()
    monkeypatch.undo()
    (record,) = caplog.records
    assert "the trace ends here; training continues" in record.getMessage()
    assert ("No space left" if problem == "full" else "MB") in record.getMessage()
    recorder = Recorder()
    recorder.trace = trace
    assert "more in" in recorder.save(), "the last operations are still saved"


def test_a_full_disk_does_not_end_a_program_that_dumps(monkeypatch):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        dumped(Recorder(), 1, Full(), None)
    monkeypatch.setattr(sys, "stderr", Full())
    dumped(Recorder(), 1, None, None)
    print_at_once("rank 0 has waited")


def test_a_folder_that_cannot_be_made_is_told_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        opened = TraceFile(Alone(), str(tmp_path / "file"), 0)
    assert "1 of 1 ranks cannot write a trace to" in caplog.text and "rank 0" in caplog.text
    opened.step(1, 0, (), 0, 1, None)
    recorder = Recorder()
    recorder.trace = opened
    assert "not saved in" in recorder.save()
    opened.close(together=True)


def test_a_dump_is_not_written_through_a_link(tmp_path):
    (tmp_path / "victim").write_text("precious")
    dump = tmp_path / "flight-rank00000"
    dump.symlink_to(tmp_path / "victim")
    dumped(Recorder(), 1, io.StringIO(), tmp_path)
    assert (tmp_path / "victim").read_text() == "precious"
    assert not dump.is_symlink() and pickle.loads(dump.read_bytes())["version"] == "2.10"


def test_a_dump_has_the_open_groups_and_numbers_their_operations(tmp_path):
    """Numbers of ranks that hold different parts of the record fit together."""
    recorder, counters = Recorder(), [OperationCounter() for _ in range(3)]
    for counter, group, ranks, calls in zip(
            counters, ["", "ranks 0,2", "ranks 0-1"], [range(3), [0, 2], [0, 1]], [50, 3, 9]):
        counter.group, counter.ranks, counter.sequence = group, ranks, calls
        recorder.counters.add(counter)
    counters[2].close(GATE_CLOSED)
    now = time.monotonic() - 10
    for sequence, group in [(48, ""), (8, "ranks 0-1"), (2, "ranks 0,2"), (49, "")]:
        recorder.add(flown(sequence, group=group, called_s=(now := now + 1), started_s=now))
    recorder.add(flown(7, group="messages of rank 0"))
    dumped(recorder, 1, io.StringIO(), tmp_path)
    dump = pickle.loads((tmp_path / "flight-rank00000").read_bytes())
    assert [(entry["record_id"], *entry["process_group"]) for entry in dump["entries"]] == [
        (50, "0", "default_pg"), (51, "ranks 0,2", "undefined"), (52, "0", "default_pg")]
    assert dump["pg_config"] == {
        "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"},
        "ranks 0,2": {"name": "ranks 0,2", "desc": "undefined", "ranks": "[0, 2]"}}
    assert dump["pg_status"]["0"] == {
        "last_enqueued_collective": 49, "last_started_collective": 49,
        "last_completed_collective": -1}
