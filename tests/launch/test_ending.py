"""Tests that one rank of a node reports what several ranks raise, and that none goes unreported."""

import sys
import time
from types import SimpleNamespace

import pytest

from mpiring.launch import ending
from mpiring.launch.ending import FirstReport, JobEnder
from mpiring.transport.layout import REPORT_PRINTED


@pytest.fixture
def words(monkeypatch):
    """Of three ranks; no time passes but by sleeping."""
    now = [1000.0]
    monkeypatch.setattr(ending, "time", SimpleNamespace(
        monotonic=lambda: now[0], monotonic_ns=lambda: int(now[0] * 1e9),
        sleep=lambda seconds: now.__setitem__(0, now[0] + seconds)))
    return [[0] * (REPORT_PRINTED + 1) for _ in range(3)]


def of(words, rank):
    return FirstReport(lambda: words, rank)


def test_whoever_is_alone_reports_and_the_others_do_not(words):
    first = of(words, 2)
    assert first.is_due(ValueError("a bug"))
    first.printed()
    assert not of(words, 0).is_due(ValueError("the same, seen from here"))
    assert of(words, 1).is_due(KeyError("another kind"))


def test_a_rank_that_dies_before_it_has_printed_is_replaced(words):
    for memory in (words, None):
        assert of(memory, 2).is_due(ValueError("a bug"))
        assert of(memory, 0).is_due(ValueError("a bug")), "it was never printed"
    of(None, 0).printed()


def test_a_rank_whose_error_is_known_prints_a_line(words, monkeypatch):
    texts, seen = [], []
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=texts.append, flush=lambda: None))
    monkeypatch.setattr(sys, "__stderr__", SimpleNamespace(write=seen.append, flush=lambda: None))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)

    class Aborted(Exception):
        pass

    def abort(status):
        raise Aborted

    for rank in (1, 0, 2):
        ender = JobEnder(rank, 3, abort, lambda last: "the last operations")
        ender.first = of(words, rank)
        try:
            raise ValueError(f"rank {rank} called a, but another b\nand more")
        except ValueError as error:
            with pytest.raises(Aborted):
                ender(error)
    assert seen == texts, "whoever has replaced stderr may hold it back"
    assert "Traceback" in texts[0] and "the last operations\n" in texts[0]
    assert texts[0].endswith("failed with ValueError: the job ends\n")
    for rank, text in zip((0, 2), texts[1:]):
        assert text.startswith(f"mpiring: rank {rank} of 3 on ") and text.count("\n") == 1
        assert text.endswith(f"failed with ValueError: rank {rank} called a, but another b\n")
