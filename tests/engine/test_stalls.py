"""Tests what a rank says when an operation stalls, with messages passed by hand."""

import threading
import time
from types import SimpleNamespace

import pytest

from mpiring import Config, StallError
from mpiring.operations.agreement import Call
from mpiring.engine.engine import Engine
from mpiring.record.counter import OperationCounter
from mpiring.record.flight import Flight
from mpiring.record.recorder import Recorder
from mpiring.engine.handle import Handle
from mpiring.transport.base import Task
from mpiring.engine.stalls import MessageWatch, StallWatch

pytestmark = pytest.mark.usefixtures("own_engines")


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Let time pass only while ranks look."""
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock.monotonic)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return clock


class Clock:
    """The time of the thread that runs the test; threads of other tests keep the real one."""

    def __init__(self):
        self._thread, self._now_s = threading.get_ident(), 1000.0
        self._real = time.monotonic, time.sleep

    def monotonic(self):
        return self._now_s if threading.get_ident() == self._thread else self._real[0]()

    def sleep(self, seconds):
        if threading.get_ident() == self._thread:
            self._now_s += seconds
        else:
            self._real[1](seconds)


class Never:
    def test(self):
        return False


def stuck():
    yield (Never(),)


class Ranks:
    """Some ranks whose watches share a letter box."""

    def __init__(self, size, **settings):
        self.size = size
        self.letters = {rank: [] for rank in range(size)}
        self.reports = {rank: [] for rank in range(size)}
        config = Config(**settings)
        self.engine = Engine(config, threaded=False, end_job=print)
        self.recorders = [Recorder(rank) for rank in range(size)]
        self.watches = [
            StallWatch(rank, size, Post(self, rank), config, self.recorders[rank].report,
                       OperationCounter(), self.reports[rank].append) for rank in range(size)]

    def call(self, rank, sequence, kind="allreduce", *, done=False, patient=False, threaded=False):
        flight = Flight(Call(kind), sequence, called_s=time.monotonic())
        self.recorders[rank].add(flight)
        lane = SimpleNamespace(engine=SimpleNamespace(threaded=threaded))
        handle = Handle(lane, flight, Task(stuck()), patient=patient)
        handle.complete, flight.started_s = done, time.monotonic()
        self.watches[rank].last = flight
        self.watches[rank].enter(handle)
        return handle

    def look(self, seconds, ranks=None):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for rank in range(self.size) if ranks is None else ranks:
                self.watches[rank].check()
            time.sleep(0.01)


class Post:
    def __init__(self, ranks, rank):
        self.ranks, self.rank = ranks, rank

    def post(self, dest, message):
        self.ranks.letters[dest].append((self.rank, message))

    def poll(self):
        letters, self.ranks.letters[self.rank] = self.ranks.letters[self.rank], []
        return letters


def test_the_lowest_waiting_rank_reports_once_where_all_stand():
    ranks = Ranks(5, stall_warning_s=0.1, stall_timeout_s=0)
    for rank in range(5):
        ranks.call(rank, 0, "broadcast", done=True)
    ranks.call(1, 1)
    ranks.call(2, 1)
    ranks.call(3, 1, done=True)
    ranks.look(0.4, ranks=(0, 1, 2, 3))
    assert ranks.reports[1] == [], "rank 4 has not answered yet"
    ranks.look(1.0, ranks=(0, 1, 2, 3))
    (report,) = ranks.reports[1]
    for line in ("rank 1 has waited 1 s in #1 allreduce",
                 "rank 0 has NOT CALLED it; its last call was #0 broadcast",
                 "rank 2 waits in it too",
                 "rank 3 has finished it",
                 "rank 4 does not answer"):
        assert line in report
    assert not any(ranks.reports[rank] for rank in (0, 2, 3, 4))


@pytest.mark.parametrize("missing", [0, 50, 99])
def test_of_many_ranks_one_asks_all_and_each_other_asks_a_few(missing):
    ranks = Ranks(100, stall_warning_s=0.1, stall_timeout_s=5)
    for rank in range(100):
        if rank != missing:
            ranks.call(rank, 0)
    sent, first = [0] * 100, int(missing == 0)
    post = Post.post

    def counted(self, dest, message):
        sent[self.rank] += 1
        post(self, dest, message)

    for watch in ranks.watches:
        watch._mailbox.post = counted.__get__(watch._mailbox)
    ranks.look(1.0)
    (report,) = ranks.reports[first]
    assert f"\n  rank {missing} has not called it" in report
    assert "98 of the 99 other ranks wait in it too" in report and report.count("\n") < 80
    assert not any(ranks.reports[rank] for rank in range(100) if rank != first)
    # Each asks rank 0, which answers, and where that does not wait also the next three.
    assert sum(sent) < 15 * 100 < 100 ** 2
    with pytest.raises(StallError, match=f"rank {missing} has not called it"):
        ranks.look(10, ranks=[first, *(rank for rank in range(100) if rank != first)])


def test_the_timeout_raises_with_fresh_answers():
    ranks = Ranks(3, stall_warning_s=0.1, stall_timeout_s=0.4)
    ranks.call(0, 0)
    ranks.look(0.25)
    assert "rank 1 has not called it, nor anything else" in ranks.reports[0][0]
    ranks.call(1, 0)
    with pytest.raises(StallError, match="rank 1 waits in it too") as caught:
        ranks.look(2)
    assert "rank 2 has not called it" in str(caught.value)
    assert str(caught.value).startswith("rank 0: Timed out after 0 s in #0 allreduce")


def test_a_rank_that_waits_in_an_earlier_operation_says_so():
    ranks = Ranks(2, stall_warning_s=0.1, stall_timeout_s=0)
    ranks.call(0, 5)
    ranks.call(1, 4, "reduce")
    ranks.call(1, 5).flight.started_s = 0.0
    ranks.look(0.3)
    assert "rank 1 has it queued behind #4 reduce" in ranks.reports[0][0]


@pytest.mark.parametrize("warning_s", [0, 2])
def test_a_patient_operation_ends_the_job_where_a_rank_is_silent(warning_s):
    ranks = Ranks(3, stall_warning_s=warning_s, stall_timeout_s=5)
    ranks.call(0, 0, "close", patient=1000.0, threaded=True)
    # They answer, and so are at work.
    ranks.look(100)
    assert len(ranks.reports[0]) == bool(warning_s)
    for report in ranks.reports[0]:
        assert "in #0 close" in report and "stall_timeout_s=5 " in report
        assert "but 1000 s while all ranks answer" in report
    # One is stopped. It was heard up to half the timeout ago.
    ranks.look(2.4, ranks=(0, 1))
    with pytest.raises(StallError, match="rank 2 does not answer") as caught:
        ranks.look(4.5, ranks=(0, 1))
    assert str(caught.value).startswith("rank 0: Timed out")


@pytest.mark.parametrize(("threaded", "answering"), [(True, (0, 1)), (False, (0,))])
def test_patience_ends(threaded, answering):
    """Without threads ranks that compute do not answer: they have as long."""
    ranks = Ranks(2, stall_warning_s=0, stall_timeout_s=5)
    ranks.call(0, 0, "close", patient=60.0, threaded=threaded)
    ranks.look(59, ranks=answering)
    with pytest.raises(StallError, match="Timed out after 6[012] s in #0 close"):
        ranks.look(4, ranks=answering)


def test_patience_is_no_shorter_than_the_timeout_and_zero_is_for_ever():
    ranks = Ranks(2, stall_warning_s=1, stall_timeout_s=0)
    ranks.call(0, 0, "close", patient=20.0, threaded=True)
    ranks.look(100, ranks=(0,))
    assert "it waits without a limit" in ranks.reports[0][0]
    ranks = Ranks(2, stall_warning_s=0, stall_timeout_s=50)
    ranks.call(0, 0, "close", patient=20.0, threaded=True)
    ranks.look(49)
    with pytest.raises(StallError):
        ranks.look(3)


def test_a_moving_operation_does_not_stall():
    ranks = Ranks(2, stall_warning_s=0.1, stall_timeout_s=0.2)
    moving = ranks.call(1, 0)
    for _ in range(10):
        moving._moved_s = time.monotonic()
        ranks.look(0.05)
    assert not any(ranks.reports.values())


def test_zero_waits_for_ever_without_a_word():
    ranks = Ranks(2, stall_warning_s=0, stall_timeout_s=0)
    ranks.call(0, 0)
    ranks.look(0.2)
    assert not any(ranks.reports.values()) and not any(ranks.letters.values())


def test_whoever_waits_for_a_message_learns_what_the_other_end_does():
    ranks = Ranks(3, stall_warning_s=2, stall_timeout_s=0)
    config = Config(stall_warning_s=2)
    ranks.watches = [MessageWatch(rank, 3, Post(ranks, rank), config, ranks.recorders[rank].report,
                                  ranks.reports[rank].append) for rank in range(3)]

    def message(rank, kind):
        flight = Flight(Call(kind), 0, called_s=time.monotonic())
        ranks.recorders[rank].add(flight)
        flight.started_s = time.monotonic()
        return Handle(ranks.engine.join(None), flight, Task(stuck()))

    with ranks.watches[0].waiting(message(0, "recv of 0 from 1"), 1, 0.0):
        ranks.look(1)
        with ranks.watches[1].waiting(message(1, "recv of 1 from any"), None, 4.0) as report:
            ranks.look(1.5)
            (text,) = ranks.reports[0]
            for line in ("rank 0 has waited 2 s in #0 recv of 0 from 1\n",
                         "\n  rank 1 waits for #0 recv of 1 from any, since 1 s\n",
                         "\n  the last operations of rank 1", "recv of 0 from 1: NOT COMPLETE"):
                assert line in text
            assert "rank 2" not in text and not ranks.reports[1]
            assert "rank 2 has not answered yet" in "\n".join(report())
            ranks.look(1)
            assert len(ranks.reports[0]) == 1
            (text,) = ranks.reports[1]
            assert "rank 0 waits for #0 recv of 0" in text and "rank 2 waits for no me" in text
