"""Tests that one rank of the job reports an error of several ranks, and that none is lost."""

import contextlib
import io
import sys
from contextlib import redirect_stderr
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from mpiring.errors import BufferMismatchError, StallError
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


class Aborted(Exception):
    """The job would have ended here."""


def ended(error, words, rank, turn=0, peers="", **options):
    """Let a rank raise an error inside mpiring that ends the job; return what it prints."""
    def abort(status):
        raise Aborted

    ender = JobEnder(rank, 3, abort, lambda last: "the last operations", lambda: peers, **options)
    ender.first, ender.turn = of(words, rank), turn
    try:
        with contextlib.ExitStack() as stack:
            stack.callback(
                exec, compile("raise error", ending.__file__, "exec"), {"error": error})
    except type(error) as raised:
        with pytest.raises(Aborted), redirect_stderr(io.StringIO()) as printed:
            ender(raised)
    return printed.getvalue()


def test_a_lost_connection_may_be_a_lost_worker(words):
    for error in ConnectionResetError(104, "Connection reset by peer"), EOFError():
        assert "one of their processes has died, for example" in ended(error, words, 0)
    assert "has died" not in ended(ValueError("a bug"), words, 0)


def test_one_report_for_the_job(words):
    """The rank that is not the first one waits until the job ends, and reports if it does not."""
    began = ending.time.monotonic()
    text = ended(BufferMismatchError("rank 1 called a"), words, 1)
    assert ending.time.monotonic() - began < 1
    assert __file__ in text and ending.__file__ not in text
    assert contextlib.__file__ not in text
    assert "BufferMismatchError: rank 1 called a\nthe last operations\n" in text
    assert text.endswith("set MPIRING_FULL_TRACEBACKS=1.\n")
    for rank, turn in ((0, 0), (2, 3)):
        began = ending.time.monotonic()
        text = ended(BufferMismatchError("rank 0 called b"), words, rank, turn)
        assert ending.time.monotonic() - began > 2 and "Traceback" not in text


def test_all_ranks_report_in_full_on_request(words):
    for rank in (1, 0):
        began = ending.time.monotonic()
        text = ended(BufferMismatchError("rank 1 called a"), words, rank, rank, in_full=True)
        assert ending.time.monotonic() - began < 1
        assert ending.__file__ in text and contextlib.__file__ in text and "FULL" not in text


def test_a_rank_whose_error_is_known_prints_a_line(words, monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "__stderr__", SimpleNamespace(write=seen.append, flush=lambda: None))
    texts = [ended(ValueError(f"rank {rank} called a, but another b\nand more"), words, rank)
             for rank in (1, 0, 2)]
    assert seen == texts, "whoever has replaced stderr may hold it back"
    assert "Traceback" in texts[0] and "the last operations\n" in texts[0]
    assert texts[0].endswith("failed with ValueError: the job ends\n")
    for rank, text in zip((0, 2), texts[1:]):
        assert text.startswith(f"mpiring: rank {rank} of 3 on ") and text.count("\n") == 1
        assert text.endswith(f"failed with ValueError: rank {rank} called a, but another b\n")


def test_the_others_follow_the_report_of_the_rank_that_fails(words):
    """Unless the error has told of them."""
    text = ended(ValueError("a bug"), words, 1, peers="rank 0 waits\nrank 2 waits")
    assert text.endswith("failed with ValueError: the job ends\n"
                         "mpiring: the other ranks:\n  rank 0 waits\n  rank 2 waits\n")
    for message, told in [("rank 0: Timed out\n  the last operations of rank 1: …", True),
                          ("wait for #3: Timed out after 2 s", False)]:
        text = ended(StallError(message), words, 0, peers="rank 1 waits")
        assert ("rank 1 waits" in text) == (not told)


def test_an_interrupt_while_others_are_asked_ends_the_job(words):
    def interrupted():
        raise KeyboardInterrupt

    ender = JobEnder(0, 2, Mock(side_effect=Aborted), lambda last: "", interrupted)
    with pytest.raises(Aborted), redirect_stderr(io.StringIO()):
        ender(ValueError("a bug"))
