"""Tests what a rank says when an operation stalls, with messages passed by hand."""

import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from mpiring import Config, ProcessFailedError, StallError
from mpiring.operations.agreement import Call
from mpiring.engine.engine import Engine
from mpiring.record.counter import OperationCounter
from mpiring.record.flight import Flight
from mpiring.record.recorder import Recorder
from mpiring.engine.handle import Handle
from mpiring.transport.base import Task
from mpiring.engine import questions
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
        queue = SimpleNamespace(engine=SimpleNamespace(threaded=threaded))
        handle = Handle(queue, flight, Task(stuck()), patient=patient)
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
        return Handle(ranks.engine.join(Mock()), flight, Task(stuck()))

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


class Turns:
    """The lock of a rank that ends the job; all others look while it acquires this lock."""

    def __init__(self, ranks, monkeypatch, silent=()):
        self._ranks, self._silent, self._looks = ranks, silent, None
        monkeypatch.setattr(questions, "_process", lambda: str(self._looks))
        for watch in ranks.watches:
            watch._counter.ranks = range(ranks.size)

    def acquire(self, timeout):
        for self._looks in range(self._ranks.size):
            if self._looks not in self._silent:
                self._ranks.watches[self._looks].check()
        return True

    def release(self):
        pass


def test_whoever_ends_the_job_tells_of_the_others(monkeypatch):
    """Ranks with the same operations share a report; a few are shown."""
    ranks = Ranks(12)
    lock = Turns(ranks, monkeypatch, silent=(0, 7, 8))
    for rank in range(1, 12):
        ranks.call(rank, 0, "broadcast", done=True)
        time.sleep(0.1)
        ranks.call(rank, 1, f"call {max(rank, 4)}")
    began_s = time.monotonic()
    # Two engines have the same ranks.
    text = questions.report_peers([(lock, ranks.watches[:1]), (lock, ranks.watches[:1])])
    assert 1 <= time.monotonic() - began_s < 2
    lines = text.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        "the last operations of rank 1, by its clock:", "ranks 2-4: the same operations",
        *(f"the last operations of rank {rank}, by its clock:" for rank in (5, 6, 9)),
        "ranks 10-11: other operations", "ranks 7-8: no answer within 1 s; stopped, failing, or "
        "outside mpiring without a progress thread"]
    assert sum("#1 call 4: NOT COMPLETE" in line for line in lines) == 1


def test_whoever_ends_the_job_waits_no_longer_than_for_all_answers(monkeypatch):
    ranks = Ranks(3)
    lock, began_s = Turns(ranks, monkeypatch), time.monotonic()
    assert questions.report_peers([(lock, ranks.watches[:1])]) == (
        "rank 1 has called nothing\nrank 2: the same operations")
    assert questions.report_peers([]) == "" and time.monotonic() - began_s < 0.1


def test_a_rank_is_asked_in_one_group_of_an_engine(monkeypatch):
    """Groups that were split from the first one number their ranks differently."""
    ranks = Ranks(3)
    lock = Turns(ranks, monkeypatch)
    ranks.watches[0]._counter.ranks = [4, 2, 1]
    first, other = ranks.watches[0], Mock(rank=1, ranks=[4, 2, 5], at_end={2: ("p", "")})
    assert questions.report_peers([(lock, [first, other])]) == (
        "rank 1 has called nothing\nranks 2,5: the same operations")
    assert list(other.hear_at_end.call_args.args[0]) == [2]


def test_a_rank_that_has_failed_answers_only_whoever_ends_the_job(monkeypatch):
    ranks = Ranks(3, stall_warning_s=0.1)
    Turns(ranks, monkeypatch)
    ranks.call(0, 0)
    ranks.look(0.2, ranks=[0])
    ranks.watches[2].hear_at_end([1])
    ranks.watches[1].answer(failed=True)
    assert {source for source, _ in ranks.letters[0]} == {2}
    assert ranks.watches[2].hear_at_end([1])


def test_a_dead_rank_keeps_nobody_from_ending_the_job(monkeypatch):
    ranks = Ranks(3)
    lock, post = Turns(ranks, monkeypatch, silent=[0]), ranks.watches[0]._mailbox.post

    def to_the_living(dest, message):
        if dest == 1:
            raise ProcessFailedError("rank 1 has died")
        post(dest, message)

    ranks.watches[0]._mailbox.post = to_the_living
    text = questions.report_peers([(lock, ranks.watches[:1])])
    assert "rank 1: no answer" in text and "rank 2 has called nothing" in text
    ranks.watches[0].at_end.clear()
    ranks.watches[0]._mailbox.poll = Mock(side_effect=ProcessFailedError("rank 1 has died"))
    began_s = time.monotonic()
    assert questions.report_peers([(lock, ranks.watches[:1])]).startswith("ranks 1-2: no answer")
    assert time.monotonic() - began_s < 0.1
